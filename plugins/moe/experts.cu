// Routed experts (softcapped SwiGLU) of a mixture and their weighted sum, T = 1..8 tokens in one
// launch. Every weight is read once for all tokens that chose its expert.
//
// As in w4a16/experts.cu, blocks first take tiles of 8 gate and 8 up rows of the distinct experts,
// then all wait for all, as everyone needs all activations, and then blocks own row tiles of the
// output. Each warp's weights come through stages of its own in the order of its work, so those of
// the second part arrive while it waits. BLOCKS must fit the GPU at once.
//
// A tile's K is in slices of SLICE vectors. Of a block's tiles each warp takes whole ones, as long
// as there is one for every warp; the slices of the rest are shared by all warps. Either way the
// slices' sums are added as `strided_sum` adds them. An expert's K of the output is in parts of
// PART vectors, one warp's each, added the same way. So bits depend on neither T nor BLOCKS.
//
// BY_WORDS: blocks do not wait at a counter but for the activations themselves (words.cuh).
// SHARE_ROWS: row tiles that do not go round all blocks are shared by all, unit by unit, and a
// block each adds up what the others hand to it, by words too. Several tokens only.
// TRACE: that many clocks of every block, taken by its first thread.
#include "stages.cuh"
#include "top_k.cuh"
#include "words.cuh"

#ifndef TRACE
#define TRACE 0
#endif
#if TRACE
#define MARK(event) \
  if (threadIdx.x == 0) trace[blockIdx.x * TRACE + (event)] = clock64()
#else
#define MARK(event)
#endif

constexpr int THREADS = WARPS * 32, SLICE = 3, PART = 9;
constexpr int GATE_VECTORS = HIDDEN / VECTOR_K, TILE_BYTES = GATE_VECTORS * VECTOR_BYTES;
constexpr int SLICES = (GATE_VECTORS + SLICE - 1) / SLICE, EXPERT_TILES = WIDTH / 8;
constexpr int DOWN_VECTORS = (WIDTH + VECTOR_K - 1) / VECTOR_K;
constexpr int JOB_BYTES = DOWN_VECTORS * VECTOR_BYTES, PARTS = (DOWN_VECTORS + PART - 1) / PART;
constexpr int ROW_TILES = HIDDEN / 16, MOST_ROW_TILES = (ROW_TILES + BLOCKS - 1) / BLOCKS;
constexpr int STAGE_BYTES = STAGE_VECTORS * VECTOR_BYTES;
static_assert(HIDDEN % VECTOR_K == 0 && WIDTH % 16 == 0, "whole vectors, whole lanes");
static_assert(SLICE % STAGE_VECTORS == 0 && PART % SLICE == 0, "whole stages, whole slices");
static_assert(SLICES <= WARPS, "a warp for each slice");
static_assert(OWN_EXPERTS <= THREADS, "a thread for each expert");

// Shared tiles between two barriers: so many at once, so often.
constexpr int TILES_AT_ONCE = WARPS / SLICES;
static_assert(!BY_WORDS || HIDDEN_SHARED, "they go to shared memory");
// With the other one ptxas spills.
#if SHARE_ROWS
using RowTile = int;
#else
using RowTile = size_t;
#endif
constexpr int WHOLE_ROUNDS = ROW_TILES / BLOCKS;
constexpr int LEFT_TILES = SHARE_ROWS ? ROW_TILES % BLOCKS : 0;
static_assert(!SHARE_ROWS || (BY_WORDS && !ONE_TOKEN && PARTS == 1), "a word for each slot");
// With more tiles left than this, a whole one for each of most warps takes less time.
constexpr int MOST_SHARED = TILES_AT_ONCE * (WARPS * 5 / 6);

// Whether a block can have more tiles than are worth sharing: one token's are fewer.
constexpr int MOST_EXPERTS = TOKENS * TOP_K < OWN_EXPERTS ? TOKENS * TOP_K : OWN_EXPERTS;
constexpr int MOST_TILES = (MOST_EXPERTS * EXPERT_TILES + BLOCKS - 1) / BLOCKS;
constexpr bool HAS_OWN = MOST_TILES > MOST_SHARED || MOST_TILES >= WARPS;
constexpr int TURNS = !ONE_TOKEN ? 1 : MOST_TILES < 8 ? MOST_TILES : 8;
constexpr int ROUND_TILES = TURNS * TILES_AT_ONCE;

// Rows are padded, so that they start in different banks.
constexpr int Z_STRIDE = HIDDEN + 8, HIDDEN_STRIDE = DOWN_VECTORS * VECTOR_K + 8;
using Partial = float[TOKEN_COLUMNS * TOP_K * PARTS * 16];  // [token][slot][part][row]
struct Shared {
  alignas(128) u8 stages[WARPS][STAGES * STAGE_BYTES];
  union {
    alignas(16) bf16 z[TOKEN_COLUMNS * Z_STRIDE];
#if HIDDEN_SHARED
    alignas(16) bf16 hidden[TOKENS * TOP_K * HIDDEN_STRIDE];
#else
    alignas(16) Partial partial[MOST_ROW_TILES];
#endif
  };
  union {
    alignas(16) float sums[2][TURNS][WARPS][TILE_SUMS];
#if HIDDEN_SHARED
    alignas(16) Partial partial[MOST_ROW_TILES];
#endif
  };
  Route route;
#if ONE_TOKEN
  Candidates candidates;
#endif
  u64 first[WARPS][STAGES];  // barriers of the first stages
};

// ROWS rows of PIECES x 8 values on their way to padded rows in shared memory: all loads, then all
// stores. All threads.
template <int PIECES, int ROWS>
struct Rows {
  static constexpr int COUNT = (ROWS * PIECES + THREADS - 1) / THREADS;
  uint4 piece[COUNT];

  INK_DEVICE void load(const bf16* from, int rows) {
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
      const int i = threadIdx.x + n * THREADS;
      if (i < rows * PIECES) piece[n] = load_act16(from + i * 8);
    }
  }
  // Once nobody is to write to them any more (words.cuh). wanted(row): whether it is waited for;
  // others become zeros.
  template <class Wanted>
  INK_DEVICE void receive(const bf16* from, Wanted wanted, int* error) {
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
      const int i = threadIdx.x + n * THREADS;
      const u32 none = i < ROWS * PIECES && wanted(i / PIECES) ? EMPTY : 0;
      piece[n] = make_uint4(none, none, none, none);
    }
#pragma unroll 1
    for (u32 spins = 0; spins < INK_SPIN_LIMIT; spins++) {
#pragma unroll
      for (int n = 0; n < COUNT; n++)
        if (has_empty(piece[n])) piece[n] = load_inbox16(from + (threadIdx.x + n * THREADS) * 8);
      bool is_complete = true;
#pragma unroll
      for (int n = 0; n < COUNT; n++) is_complete = is_complete && !has_empty(piece[n]);
      if (is_complete) return;
    }
    report_error(error, ERROR_SENTINEL);
  }
  INK_DEVICE void store(bf16* to, int stride, int rows) const {
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
      const int i = threadIdx.x + n * THREADS;
      if (i < rows * PIECES) *(uint4*)(to + i / PIECES * stride + i % PIECES * 8) = piece[n];
    }
  }
};

// a = cap(g; 4) sigmoid(g) cap(u; 25) of rounded g and u, with the model's caps.
INK_DEVICE bf16 activation(float gate, float up) {
  const float g = round_bf16(gate), u = round_bf16(up);
  const float capped_gate = tanhf(g / GATE_CAP) * GATE_CAP, capped_up = tanhf(u / UP_CAP) * UP_CAP;
  return to_bf16(capped_gate * (1.f / (1.f + expf(-g))) * capped_up);
}

// rows: of the whole step; first: the row that this launch begins with.
extern "C" __global__ void __maxnreg__(REGISTERS)
    moe_experts(const bf16* x, const float* scores, const float* bias, const int* rank,
                const u8* gate_up, const float* gate_up_scale, const u8* down,
                const float* down_scale,
#if BY_WORDS
                bf16* exchange, u32* turns,
#if SHARE_ROWS
                float* parts,
#endif
#else
                bf16* hidden, u64* arrivals,
#endif
                void* out, int* error,
#if IS_CHUNK
                const int* live_rows,
#endif
                int rows, int first
#if TRACE
                ,
                long long* trace
#endif
) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, b = blockIdx.x;
  if (lane < STAGES) mbar_init(&sm.first[warp][lane], 1);
  __syncwarp();
  float gate_unit = UNIT, down_unit = UNIT;
  if (FORMAT == FORMAT_NVFP4 && tid < OWN_EXPERTS) {
    gate_unit *= load_weight_float(gate_up_scale + tid);
    down_unit *= load_weight_float(down_scale + tid);
  }
#if ONE_TOKEN
  const float own_bias = tid < EXPERTS ? load_weight_float(bias + tid) : 0.f;
#else
  PerExpert own_bias;
  if (warp < MAX_TOKENS) own_bias = load_bias(bias, lane);
#endif
  clear_route<THREADS>(sm.route);
  __syncthreads();
  MARK(0);
  wait_and_trigger();
  MARK(1);
  int T = ONE_TOKEN ? 1 : rows;
#if IS_CHUNK
  T = min(min(rows, load_act_int(live_rows)) - first, MAX_TOKENS);
  if (T <= 0) return;  // every block alike
#endif
  // What the choice needs first, and all before the weights: small loads queue behind large ones.
  const float* const own_scores = scores + (size_t)first * EXPERTS;
#if ONE_TOKEN
  const float score = tid < EXPERTS ? load_act_float(own_scores + tid) : 0.f;
#else
  PerExpert score;
  if (warp < T) score = load_scores(own_scores + warp * EXPERTS, lane);
#endif
  const int first_expert = HAS_RANK ? load_act_int(rank) * OWN_EXPERTS : 0;
#if BY_WORDS
  const u32 turn = load_act4(turns + b);
#endif
  Rows<HIDDEN / 8, TOKENS> z_rows;
  z_rows.load(x + (size_t)first * HIDDEN, T);
#if ONE_TOKEN
  if (tid < OWN_EXPERTS) {
    sm.candidates.gate_unit[tid] = gate_unit;
    sm.candidates.down_unit[tid] = down_unit;
  }
  top_experts<THREADS>(tid < EXPERTS ? ordered(score + own_bias) : 0, sm.candidates);
  const Choice chosen = route_one(own_scores, sm.candidates, first_expert, sm.route);
  __syncthreads();
#else
  const Choice chosen = route<THREADS>(own_scores, score, own_bias, first_expert, T, gate_unit,
                                       down_unit, sm.route);
#endif
  MARK(2);
  const Route& choice = sm.route;

  // The block's tiles are b + BLOCKS t, of which this warp has t = warp, warp + WARPS, ... below
  // `own`, and slices of those from `own` on. Row tiles are counted from the last block, as the
  // first ones have more tiles; units are (row tile, distinct expert, part).
  const int num_tiles = choice.num_experts * EXPERT_TILES;
  const int end = (max(num_tiles - b, 0) + BLOCKS - 1) / BLOCKS, rest = end % WARPS;
  const int own = !HAS_OWN ? 0 : rest <= MOST_SHARED ? end - rest : end;
  const int my_tile = warp / SLICES, my_slice = warp % SLICES * SLICE;
  const int my_vectors = my_tile < TILES_AT_ONCE ? min(SLICE, GATE_VECTORS - my_slice) : 0;
  const int first_row_tile = BLOCKS - 1 - b;
  const int row_tiles =
      SHARE_ROWS ? WHOLE_ROUNDS : (max(ROW_TILES - first_row_tile, 0) + BLOCKS - 1) / BLOCKS;
  const int row_tile_units = choice.num_experts * PARTS;
  // This block's units of the tiles that are shared.
  const int from_left = LEFT_TILES * row_tile_units * b / BLOCKS;
  const int num_left = LEFT_TILES * row_tile_units * (b + 1) / BLOCKS - from_left;
  auto tile_at = [&](int t) {
    const int i = b + BLOCKS * t, expert = choice.expert[i / EXPERT_TILES];
    return gate_up + ((size_t)expert * EXPERT_TILES + i % EXPERT_TILES) * TILE_BYTES;
  };
  auto part_vectors = [&](int part) { return min(PART, DOWN_VECTORS - part * PART); };
  struct Unit {
    int r, of_tile;
  };
  // The unit `step` behind this one; r is row_tiles where there is none, or a shared one.
  auto advance = [&](Unit& unit, int step) {
    unit.of_tile += step;
#pragma unroll 1
    while (unit.r < row_tiles && unit.of_tile >= row_tile_units) {
      unit.of_tile -= row_tile_units;
      unit.r++;
    }
  };

  auto is_unit = [&](const Unit& unit) {
    return SHARE_ROWS ? unit.r < row_tiles || unit.of_tile < num_left : unit.r < row_tiles;
  };
  struct Place {
    RowTile row_tile;
    int of_tile;
  };
  auto place_of = [&](const Unit& unit) -> Place {
    if (!SHARE_ROWS || unit.r < row_tiles)
      return {(RowTile)first_row_tile + BLOCKS * unit.r, unit.of_tile};
    const int number = from_left + unit.of_tile, tile = number / row_tile_units;
    return {(RowTile)(BLOCKS * WHOLE_ROUNDS + tile), number - tile * row_tile_units};
  };

  // What is requested next: stages of one piece lie one after the other.
  Stages<STAGES, STAGE_BYTES, BY_BULK> stages = {sm.stages[warp], sm.first[warp], lane};
  const u8* next = nullptr;
  int left = 0;  // vectors of the piece
  int next_own = warp, next_shared = my_vectors ? own + my_tile : end;
  Unit next_unit = {0, 0};
  advance(next_unit, warp);
  int num_bytes = 0;
  auto source = [&]() -> const u8* {
    if (left == 0) {
      if (HAS_OWN && next_own < own) {
        next = tile_at(next_own);
        left = GATE_VECTORS;
        next_own += WARPS;
      } else if (next_shared < end) {
        next = tile_at(next_shared) + my_slice * VECTOR_BYTES;
        left = my_vectors;
        next_shared += TILES_AT_ONCE;
      } else if (is_unit(next_unit)) {
        const auto [row_tile, of_tile] = place_of(next_unit);
        const int expert = choice.expert[of_tile / PARTS], part = of_tile % PARTS;
        next = down + ((size_t)expert * ROW_TILES + row_tile) * JOB_BYTES +
               part * PART * VECTOR_BYTES;
        left = part_vectors(part);
        advance(next_unit, WARPS);
      } else {
        num_bytes = 0;
        return nullptr;
      }
    }
    const int count = min(STAGE_VECTORS, left);
    const u8* const from = next;
    left -= count;
    num_bytes = count * VECTOR_BYTES;
    next += num_bytes;
    return from;
  };
  auto request = [&]() {
    const u8* const from = source();
    stages.request(from, num_bytes);
  };
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) {
    const u8* const from = source();
    stages.request_first(from, num_bytes);
  }
  MARK(3);
#if BY_WORDS
  constexpr int SLOT_VALUES = TOKENS * TOP_K * WIDTH;
  bf16* const hidden = exchange + (turn & 1) * SLOT_VALUES;
  turn_over<THREADS>(exchange + (~turn & 1) * SLOT_VALUES, hidden, SLOT_VALUES / 8, b, BLOCKS);
#if SHARE_ROWS
  constexpr int PART_VALUES = LEFT_TILES * TOKEN_COLUMNS * TOP_K * 16;
  float* const handed = parts + (turn & 1) * PART_VALUES;
  turn_over<THREADS>((bf16*)(parts + (~turn & 1) * PART_VALUES), (const bf16*)handed,
                     PART_VALUES / 4, b, BLOCKS);
#endif
  if (tid == 0) turns[b] = turn + 1;  // all have read it
#endif
  weigh(chosen, ROUTE_SCALE, T, sm.route);
  z_rows.store(sm.z, Z_STRIDE, T);
  __syncthreads();
  MARK(4);

  // ---- gate, up and activation ----
  // A slice: `vectors` of a tile from vector `at` on.
  const bf16* const z = sm.z + (ONE_TOKEN ? 0 : g * Z_STRIDE) + (lane & 3) * 16;
  auto multiply_slice = [&](Tile& tile, int at, int vectors) {
#pragma unroll 1
    for (int s = 0; s < SLICE; s += STAGE_VECTORS) {
      if (GATE_VECTORS % SLICE && s >= vectors) break;
      const u8* const stage = stages.wait(error);
#pragma unroll
      for (int v = 0; v < STAGE_VECTORS; v++) {
        if (GATE_VECTORS % SLICE && s + v >= vectors) break;
        const bf16* const from = z + (at + s + v) * VECTOR_K;
        const Tokens y = {*(const uint4*)from, *(const uint4*)(from + 8)};
        multiply_vector(tile, stage + v * VECTOR_BYTES, y, lane);
      }
      request();
    }
  };
  auto activate = [&](int t, int row, int token, float gate, float up) {
    const int i = b + BLOCKS * t, u = i / EXPERT_TILES, slot = choice.slot[u][token];
    if (slot == NO_SLOT) return;
    const float unit = choice.gate_unit[u];
    bf16* const to = hidden + ((size_t)token * TOP_K + slot) * WIDTH + i % EXPERT_TILES * 8 + row;
    *(volatile bf16*)to = activation(gate * unit, up * unit);
  };
#pragma unroll 1
  for (int t = warp; HAS_OWN && t < own; t += WARPS) {
    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int s = 0; s < SLICES; s++) {
      Tile tile = zero_tile();
      multiply_slice(tile, s * SLICE, min(SLICE, GATE_VECTORS - s * SLICE));
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float sum = tile.c[0][e] + tile.c[1][e];
        const float next = even[e] + sum;  // the two change places: their sum has no order
        even[e] = odd[e];
        odd[e] = next;
      }
    }
    const int column = (lane & 3) * 2;
    if (!ONE_TOKEN || column == 0)
#pragma unroll 1
      for (int e = 0; e < (ONE_TOKEN ? 1 : 2); e++)
        activate(t, g, column + e, e ? even[1] + odd[1] : even[0] + odd[0],
                 e ? even[3] + odd[3] : even[2] + odd[2]);
  }
  // Sums go to shared memory, and behind a barrier some warps, others in every round, add them up
  // while the next round's go to the other half of `sums`.
  int round = 0;
#pragma unroll 1
  for (int base = own; base < end; base += ROUND_TILES, round++) {
    float* const sums = &sm.sums[round & 1][0][0][0];
#pragma unroll 1
    for (int turn = 0; turn < TURNS; turn++) {
      if (my_vectors == 0 || base + turn * TILES_AT_ONCE + my_tile >= end) break;
      Tile tile = zero_tile();
      multiply_slice(tile, my_slice, my_vectors);
      store_tile(sums + (turn * WARPS + warp) * TILE_SUMS, tile, lane);
    }
    __syncthreads();
    constexpr int ELEMENTS = 8 * TOKEN_COLUMNS;  // of a tile
    const int count = min(ROUND_TILES, end - base) * ELEMENTS;
    // The round's first warp comes after the last one of the round before.
    const int from = round * ((ROUND_TILES * ELEMENTS + 31) / 32) % WARPS;
    const int place = (warp >= from ? warp - from : warp - from + WARPS) * 32 + lane;
#pragma unroll 1
    for (int i = place; i < count; i += THREADS) {
      const int tile = i / ELEMENTS, element = i % ELEMENTS;
      const int slot = tile / TILES_AT_ONCE * WARPS + tile % TILES_AT_ONCE * SLICES;
      const float* const p = sums + slot * TILE_SUMS + element;
      activate(base + tile, element / TOKEN_COLUMNS, element % TOKEN_COLUMNS,
               strided_sum<SLICES>(p, TILE_SUMS), strided_sum<SLICES>(p + ELEMENTS, TILE_SUMS));
    }
  }
  MARK(5);
#if BY_WORDS
  __syncthreads();  // all have read z
#else
  __syncthreads();
  if (tid == 0) {
    const u64 all = (arrive(arrivals) / BLOCKS + 1) * BLOCKS;  // every launch adds BLOCKS
    u32 spins = 0;
    while (load_arrivals(arrivals) < all && spins < INK_SPIN_LIMIT) spins++;
    if (spins == INK_SPIN_LIMIT) report_error(error, ERROR_SENTINEL);
  }
  __syncthreads();
#endif
  MARK(6);

  // ---- down ----
#if HIDDEN_SHARED
  {
    Rows<WIDTH / 8, TOKENS * TOP_K> hidden_rows;
#if BY_WORDS
    hidden_rows.receive(
        hidden,
        [&](int row) {  // others nobody writes
          return row < T * TOP_K && (!HAS_RANK || row % TOP_K < choice.num_slots[row / TOP_K]);
        },
        error);
#else
    hidden_rows.load(hidden, T * TOP_K);
#endif
    hidden_rows.store(sm.hidden, HIDDEN_STRIDE, T * TOP_K);
    if (WIDTH % VECTOR_K)  // finite values beyond the width, where weights are zero
      for (int i = tid; i < TOKENS * TOP_K * VECTOR_K; i += THREADS) {
        const int k = DOWN_VECTORS * VECTOR_K - 1 - i % VECTOR_K;
        if (k >= WIDTH) sm.hidden[i / VECTOR_K * HIDDEN_STRIDE + k] = 0;
      }
    __syncthreads();
  }
#endif
  MARK(7);
  Unit unit = {0, 0};
#pragma unroll 1
  for (advance(unit, warp); is_unit(unit); advance(unit, WARPS)) {
    const auto [row_tile, of_tile] = place_of(unit);
    const int u = of_tile / PARTS, part = of_tile % PARTS, vectors = part_vectors(part);
    // Columns of tokens that did not choose the expert are not read.
    const int slot = ONE_TOKEN ? choice.slot[u][0] : choice.slot[u][g];
    const bool has_row = slot != NO_SLOT;
    const int row = has_row ? (ONE_TOKEN ? 0 : g * TOP_K) + slot : 0;
    const int k0 = part * PART * VECTOR_K + (lane & 3) * 16;
#if HIDDEN_SHARED
    const bf16* const y = sm.hidden + row * HIDDEN_STRIDE + k0;
#else
    const bf16* const y = hidden + (size_t)row * WIDTH + k0;
#endif
    Tile tile = zero_tile();
#pragma unroll 1
    for (int at = 0; at < vectors; at += STAGE_VECTORS) {
      Tokens tokens[STAGE_VECTORS];
#pragma unroll
      for (int v = 0; v < STAGE_VECTORS; v++) {
        if (DOWN_VECTORS % STAGE_VECTORS && at + v >= vectors) break;
        const bf16* const from = y + (at + v) * VECTOR_K;
#if HIDDEN_SHARED
        tokens[v] = {*(const uint4*)from, *(const uint4*)(from + 8)};
#else
        const uint4 none = make_uint4(0, 0, 0, 0);
        const bool is_read = has_row && k0 + (at + v) * VECTOR_K < WIDTH;
        tokens[v].lo = is_read ? load_act16(from) : none;
        tokens[v].hi = is_read ? load_act16(from + 8) : none;
#endif
      }
      const u8* const stage = stages.wait(error);
#pragma unroll
      for (int v = 0; v < STAGE_VECTORS; v++) {
        if (DOWN_VECTORS % STAGE_VECTORS && at + v >= vectors) break;
        multiply_vector(tile, stage + v * VECTOR_BYTES, tokens[v], lane);
      }
      request();
    }
#pragma unroll
    for (int e = 0; e < (ONE_TOKEN ? 1 : 2); e++) {
      const int token = (lane & 3) * 2 + e;
      if (ONE_TOKEN && token) break;
      const int of_token = choice.slot[u][token];
      if (of_token == NO_SLOT) continue;
      const int at = ((token * TOP_K + of_token) * PARTS + part) * 16 + g;
#if SHARE_ROWS
      if (unit.r == row_tiles) {
        volatile float* const to =
            handed + (row_tile - BLOCKS * WHOLE_ROUNDS) * TOKEN_COLUMNS * TOP_K * 16 + at;
        to[0] = tile.c[0][e] + tile.c[1][e];
        to[8] = tile.c[0][2 + e] + tile.c[1][2 + e];
        continue;
      }
#endif
      float* const p = sm.partial[unit.r] + at;
      p[0] = tile.c[0][e] + tile.c[1][e];
      p[8] = tile.c[0][2 + e] + tile.c[1][2 + e];
    }
  }
  MARK(8);
  __syncthreads();
  MARK(9);
  // sums: of slot s at s * stride.
  auto finish = [&](int row_tile, int row, int token, const float* sums, int stride) {
    float sum = 0;
    const int num_slots = choice.num_slots[token];
#pragma unroll
    for (int s = 0; s < TOP_K; s++) {
      const float d = strided_sum<PARTS>(sums + s * stride, 16) *
                      choice.down_unit[choice.index[token][s]];
      const float term = __fmul_rn(IS_SLICE ? d : round_bf16(d), choice.weight[token][s]);
      sum = s < num_slots ? __fadd_rn(sum, term) : sum;
    }
    const size_t at = (size_t)(first + token) * HIDDEN + (size_t)row_tile * 16 + row;
    if (IS_PARTIAL)
      ((float*)out)[at] = sum;
    else
      ((bf16*)out)[at] = to_bf16(sum);
  };
#pragma unroll 1
  for (int i = threadIdx.x; i < row_tiles * 16 * TOKEN_COLUMNS; i += THREADS) {
    const int row = i % 16, token = i / 16 % TOKEN_COLUMNS, r = i / (16 * TOKEN_COLUMNS);
    if (token >= T) continue;
    finish(first_row_tile + BLOCKS * r, row, token,
           sm.partial[r] + token * TOP_K * PARTS * 16 + row, PARTS * 16);
  }
#if SHARE_ROWS
  // A tile of the shared ones for each of the first blocks: four rows of a slot a thread, through
  // the shared memory of the own tiles, behind a barrier.
  if (b < LEFT_TILES) {
    __syncthreads();
    for (int i = tid; i < T * TOP_K * 4; i += THREADS) {
      const bool is_wanted = i / 4 % TOP_K < choice.num_slots[i / (4 * TOP_K)];
      const float* const from = handed + b * TOKEN_COLUMNS * TOP_K * 16 + i * 4;
      uint4 v = make_uint4(0, 0, 0, 0);
      u32 spins = 0;
      if (is_wanted)
        do v = load_inbox16(from);
        while (max(max(v.x, v.y), max(v.z, v.w)) == EMPTY && ++spins < INK_SPIN_LIMIT);
      if (spins == INK_SPIN_LIMIT) report_error(error, ERROR_SENTINEL);
      *(uint4*)(sm.partial[0] + i * 4) = v;
    }
    __syncthreads();
    for (int i = tid; i < 16 * T; i += THREADS)
      finish(BLOCKS * WHOLE_ROUNDS + b, i % 16, i / 16,
             sm.partial[0] + i / 16 * TOP_K * 16 + i % 16,
             16);
  }
#endif
  MARK(10);
}
