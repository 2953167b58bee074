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
#include "stages.cuh"
#include "top_k.cuh"

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
constexpr int TILES_AT_ONCE = WARPS / SLICES, TURNS = ONE_TOKEN ? 8 : 1;
constexpr int ROUND_TILES = TURNS * TILES_AT_ONCE;
// With more tiles left than this, a whole one for each of most warps takes less time.
constexpr int MOST_SHARED = TILES_AT_ONCE * (WARPS * 5 / 6);

// Whether a block can have more tiles than are worth sharing: one token's are fewer.
constexpr int MOST_EXPERTS = TOKENS * TOP_K < OWN_EXPERTS ? TOKENS * TOP_K : OWN_EXPERTS;
constexpr int MOST_TILES = (MOST_EXPERTS * EXPERT_TILES + BLOCKS - 1) / BLOCKS;
constexpr bool HAS_OWN = MOST_TILES > MOST_SHARED || MOST_TILES >= WARPS;

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
                const float* down_scale, bf16* hidden, void* out, u64* arrivals, int* error,
#if IS_CHUNK
                const int* live_rows,
#endif
                int rows, int first) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, b = blockIdx.x;
  if (lane < STAGES) mbar_init(&sm.first[warp][lane], 1);
  __syncwarp();
  float gate_unit = UNIT, down_unit = UNIT;
  if (FORMAT == FORMAT_NVFP4 && tid < OWN_EXPERTS) {
    gate_unit *= load_weight_float(gate_up_scale + tid);
    down_unit *= load_weight_float(down_scale + tid);
  }
  Bias own_bias;
  if (warp < MAX_TOKENS) own_bias = load_bias(bias, lane);
  wait_and_trigger();
  int T = ONE_TOKEN ? 1 : rows;
#if IS_CHUNK
  T = min(min(rows, load_act_int(live_rows)) - first, MAX_TOKENS);
  if (T <= 0) return;  // every block alike
#endif
  // Before the weights: small loads queue behind large ones.
  Rows<HIDDEN / 8, TOKENS> z_rows;
  z_rows.load(x + (size_t)first * HIDDEN, T);
  const int first_expert = HAS_RANK ? load_act_int(rank) * OWN_EXPERTS : 0;
  const Choice chosen = route<THREADS>(scores + (size_t)first * EXPERTS, own_bias, first_expert, T,
                                       gate_unit, down_unit, sm.route);
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
  const int row_tiles = (max(ROW_TILES - first_row_tile, 0) + BLOCKS - 1) / BLOCKS;
  const int row_tile_units = choice.num_experts * PARTS, num_units = row_tiles * row_tile_units;
  auto tile_at = [&](int t) {
    const int i = b + BLOCKS * t, expert = choice.expert[i / EXPERT_TILES];
    return gate_up + ((size_t)expert * EXPERT_TILES + i % EXPERT_TILES) * TILE_BYTES;
  };
  auto part_vectors = [&](int part) { return min(PART, DOWN_VECTORS - part * PART); };

  // What is requested next: stages of one piece lie one after the other.
  Stages<STAGES, STAGE_BYTES> stages = {sm.stages[warp], sm.first[warp], lane};
  const u8* next = nullptr;
  int left = 0;  // vectors of the piece
  int next_own = warp, next_shared = my_vectors ? own + my_tile : end, next_unit = warp;
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
      } else if (next_unit < num_units) {
        const int r = next_unit / row_tile_units, of_tile = next_unit % row_tile_units;
        const int expert = choice.expert[of_tile / PARTS], part = of_tile % PARTS;
        next = down + ((size_t)expert * ROW_TILES + first_row_tile + BLOCKS * r) * JOB_BYTES +
               part * PART * VECTOR_BYTES;
        left = part_vectors(part);
        next_unit += WARPS;
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
  weigh(chosen, ROUTE_SCALE, T, sm.route);
  z_rows.store(sm.z, Z_STRIDE, T);
  __syncthreads();

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
    hidden[((size_t)token * TOP_K + slot) * WIDTH + i % EXPERT_TILES * 8 + row] =
        activation(gate * unit, up * unit);
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
        even[e] += s & 1 ? 0.f : sum;
        odd[e] += s & 1 ? sum : 0.f;
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
  __syncthreads();
  if (tid == 0) {
    const u64 all = (arrive(arrivals) / BLOCKS + 1) * BLOCKS;  // every launch adds BLOCKS
    u32 spins = 0;
    while (load_arrivals(arrivals) < all && spins < INK_SPIN_LIMIT) spins++;
    if (spins == INK_SPIN_LIMIT) report_error(error, ERROR_SENTINEL);
  }
  __syncthreads();

  // ---- down ----
#if HIDDEN_SHARED
  {
    Rows<WIDTH / 8, TOKENS * TOP_K> hidden_rows;
    hidden_rows.load(hidden, T * TOP_K);
    hidden_rows.store(sm.hidden, HIDDEN_STRIDE, T * TOP_K);
    if (WIDTH % VECTOR_K)  // finite values beyond the width, where weights are zero
      for (int i = tid; i < TOKENS * TOP_K * VECTOR_K; i += THREADS) {
        const int k = DOWN_VECTORS * VECTOR_K - 1 - i % VECTOR_K;
        if (k >= WIDTH) sm.hidden[i / VECTOR_K * HIDDEN_STRIDE + k] = 0;
      }
    __syncthreads();
  }
#endif
#pragma unroll 1
  for (int unit = warp; unit < num_units; unit += WARPS) {
    const int r = unit / row_tile_units, of_tile = unit % row_tile_units;
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
      float* const p = sm.partial[r] + ((token * TOP_K + of_token) * PARTS + part) * 16 + g;
      p[0] = tile.c[0][e] + tile.c[1][e];
      p[8] = tile.c[0][2 + e] + tile.c[1][2 + e];
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = tid; i < row_tiles * 16 * TOKEN_COLUMNS; i += THREADS) {
    const int row = i % 16, token = i / 16 % TOKEN_COLUMNS, r = i / (16 * TOKEN_COLUMNS);
    if (token >= T) continue;
    float sum = 0;
    const int num_slots = choice.num_slots[token];
#pragma unroll
    for (int s = 0; s < TOP_K; s++) {
      const float* const p = sm.partial[r] + (token * TOP_K + s) * PARTS * 16 + row;
      const float d = strided_sum<PARTS>(p, 16) * choice.down_unit[choice.index[token][s]];
      const float term = __fmul_rn(IS_SLICE ? d : round_bf16(d), choice.weight[token][s]);
      sum = s < num_slots ? __fadd_rn(sum, term) : sum;
    }
    const size_t at =
        (size_t)(first + token) * HIDDEN + (first_row_tile + BLOCKS * r) * 16 + row;
    if (IS_PARTIAL)
      ((float*)out)[at] = sum;
    else
      ((bf16*)out)[at] = to_bf16(sum);
  }
}
