// Routed experts (softcapped SwiGLU) of a mixture and their weighted sum, T = 1..8 tokens in one
// launch. Every weight is read once for all tokens that chose its expert.
//
// As in w4a16/experts.cu, blocks first take tiles of 8 gate and 8 up rows of the distinct experts,
// then all wait for all, as everyone needs all activations, and then blocks own row tiles of the
// output. Each warp's weights come through stages of its own in the order of its work (work.cuh),
// so those of the second part arrive while it waits. BLOCKS must fit the GPU at once.
//
// A tile's K is in slices of SLICE vectors. Of a block's tiles each warp takes whole ones, as long
// as there is one for every warp; the slices of the rest are shared by all warps. Either way the
// slices' sums are added as `strided_sum` adds them. An expert's K of the output is in parts of
// PART vectors, one warp's each, added the same way. So bits depend on neither T nor BLOCKS.
//
// BY_WORDS: blocks do not wait at a counter but for the activations themselves (words.cuh).
// SHARE_ROWS: row tiles that do not go round all blocks are shared by all, unit by unit, and a
// block each adds up what the others hand to it, by words too. Several tokens only.
// PUSHES: values go to all ranks at once, see push.cuh; `out` is a table of peers.
// TRACE: that many clocks of every block, taken by its first thread.
#include "rows.cuh"
#include "work.cuh"

#ifndef PUSHES
#define PUSHES 0
#endif
#if PUSHES
#include "all_reduce/push.cuh"
#endif

#ifndef TRACE
#define TRACE 0
#endif
#if TRACE
#define MARK(event) \
  if (threadIdx.x == 0) trace[blockIdx.x * TRACE + (event)] = clock64()
#else
#define MARK(event)
#endif

static_assert(!BY_WORDS || HIDDEN_SHARED, "they go to shared memory");
static_assert(!PUSHES || (TRIGGER == 1 && IS_PARTIAL && !IS_CHUNK), "see push.cuh");

// Rows are padded, so that they start in different banks.
constexpr int Z_STRIDE = HIDDEN + 8, HIDDEN_STRIDE = DOWN_VECTORS * VECTOR_K + 8;
using Partial = float[TOKEN_COLUMNS * TOP_K * PARTS * 16];  // [token][slot][part][row]
struct Shared {
  alignas(128) u8 stages[WARPS][STAGES * STAGE_BYTES];
  union {
    alignas(16) bf16 z[TOKENS * Z_STRIDE];
#if HIDDEN_SHARED
    alignas(16) bf16 hidden[TOKENS * TOP_K * HIDDEN_STRIDE];
#else
    alignas(16) Partial partial[MOST_ROW_TILES];
#endif
  };
  union {
    alignas(16) float sums[SUM_BUFFERS][TURNS][WARPS][SLICE_SUMS];
    Candidates candidates;  // before there are sums
#if HIDDEN_SHARED
    alignas(16) Partial partial[MOST_ROW_TILES];
#endif
  };
  Route route;
  u64 first[WARPS][STAGES];  // barriers of the first stages
#if PUSHES
  Push push;
#endif
};

static_assert(sizeof(Candidates) <= sizeof Shared::sums, "no more than sums");

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
                bf16* exchange,
#else
                bf16* hidden, u64* arrivals,
#endif
#if BY_WORDS || SHARE_ROWS
                u32* turns,
#endif
#if SHARE_ROWS
                float* parts,
#endif
                void* out, int* error,
#if IS_CHUNK || PUSHES
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
  float gate_unit = UNIT, down_unit = UNIT;
  if (FORMAT == FORMAT_NVFP4 && tid < OWN_EXPERTS) {
    gate_unit *= load_weight_float(gate_up_scale + tid);
    down_unit *= load_weight_float(down_scale + tid);
  }
  const PerExpert own_bias = load_bias(bias);
  Candidates& candidates = sm.candidates;
  clear_route(candidates, sm.route);
  const Route& choice = sm.route;
  Work work(gate_up, down, choice, b, warp);
  Piece my_piece = {down, 0, 0, 0};  // of stage `lane`
  if (IS_KNOWN) my_piece = work.piece(lane);
#if PUSHES
  const Peers* const peers = (const Peers*)out;
  const Push::Asked asked = Push::asked(peers, error, live_rows);
  sm.push.keep(asked);
#endif
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
  PerExpert score;
  if (token_of_warp() < T) score = load_scores(own_scores + token_of_warp() * EXPERTS);
  const int first_expert = HAS_RANK ? load_act_int(rank) * OWN_EXPERTS : 0;
#if BY_WORDS || SHARE_ROWS
  const u32 turn = load_act4(turns + b);
#endif
#if PUSHES
  const u32 push_word = Push::word_of(asked);
#endif
  Rows<HIDDEN / 8, TOKENS, THREADS> z_rows;
  z_rows.load(x + (size_t)first * HIDDEN, T);
  MARK(2);
  top_experts(score, own_bias, first_expert, T, candidates, sm.route);
  Stages<STAGES, STAGE_BYTES, MANY_STAGES, Work> stages = {sm.stages[warp], sm.first[warp], lane,
                                                          work};
  Source source;
  if (IS_KNOWN) source = my_piece.of(candidates.best[0][my_piece.u]);
  const Choice chosen = load_choice(own_scores, T, candidates);
  if (!IS_KNOWN) {
    work.count(route(gate_unit, down_unit, candidates, sm.route));
    if (lane < STAGES) my_piece = work.piece(lane);
    __syncthreads();
    source = my_piece.of(choice.expert[my_piece.u]);
  }
  MARK(3);
  stages.begin(source);
  MARK(4);
  if (IS_KNOWN) {
    route(gate_unit, down_unit, candidates, sm.route);
    __syncthreads();
  } else {
    stages.know(STAGES);
  }
  const int own = work.own, end = work.end;
  const int my_tile = work.my_tile, my_slice = work.my_slice, my_vectors = work.my_vectors;
#if BY_WORDS
  constexpr int SLOT_VALUES = TOKENS * TOP_K * WIDTH;
  bf16* const hidden = exchange + (turn & 1) * SLOT_VALUES;
  turn_over<THREADS>(exchange + (~turn & 1) * SLOT_VALUES, hidden, SLOT_VALUES / 8, b, BLOCKS);
#endif
#if SHARE_ROWS
  constexpr int PART_VALUES = LEFT_TILES * TOKEN_COLUMNS * TOP_K * PARTS * 16;
  float* const handed = parts + (turn & 1) * PART_VALUES;
  turn_over<THREADS>((bf16*)(parts + (~turn & 1) * PART_VALUES), (const bf16*)handed,
                     PART_VALUES / 4, b, BLOCKS);
#endif
#if BY_WORDS || SHARE_ROWS
  if (tid == 0) turns[b] = turn + 1;  // all have read it
#endif
#if PUSHES
  sm.push.keep(push_word, peers);
#endif
  weigh(chosen, first_expert, ROUTE_SCALE, T, candidates, sm.route);
  z_rows.store(sm.z, Z_STRIDE, T);
  __syncthreads();
  MARK(5);

  // ---- gate, up and activation ----
  // A slice: `vectors` of a tile from vector `at` on.
  // Columns behind the last token are that one's again.
  const bf16* const z = sm.z + (ONE_TOKEN ? 0 : min(g, TOKENS - 1) * Z_STRIDE) + (lane & 3) * 16;
  auto multiply_slice = [&](Tile& tile, int at, int vectors) {
#pragma unroll 1
    for (int s = 0; s < SLICE; s += STAGE_VECTORS) {
      const u8* const stage = stages.wait(error);
#pragma unroll
      for (int v = 0; v < STAGE_VECTORS; v++) {
        if (SHORT_SLICES && s + v >= vectors) break;
        const bf16* const from = z + (at + s + v) * VECTOR_K;
        const Tokens y = {*(const uint4*)from, *(const uint4*)(from + 8)};
        multiply_vector(tile, stage + v * VECTOR_BYTES, y, lane);
      }
      stages.request();
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
    float* const sums = &sm.sums[round % SUM_BUFFERS][0][0][0];
#pragma unroll 1
    for (int turn = 0; turn < TURNS; turn++) {
      if (my_vectors == 0 || base + turn * TILES_AT_ONCE + my_tile >= end) break;
      Tile tile = zero_tile();
      multiply_slice(tile, my_slice, my_vectors);
      store_slice(sums + (turn * WARPS + warp) * SLICE_SUMS, tile, lane);
    }
    __syncthreads();
    constexpr int ELEMENTS = 8 * SUM_COLUMNS;  // of a tile
    const int count = min(ROUND_TILES, end - base) * ELEMENTS;
    // The round's first warp comes after the last one of the round before.
    const int from = round * ((ROUND_TILES * ELEMENTS + 31) / 32) % WARPS;
    const int place = (warp >= from ? warp - from : warp - from + WARPS) * 32 + lane;
#pragma unroll 1
    for (int i = place; i < count; i += THREADS) {
      const int tile = i / ELEMENTS, element = i % ELEMENTS;
      const int slot = tile / TILES_AT_ONCE * WARPS + tile % TILES_AT_ONCE * SLICES;
      const float* const p = sums + slot * SLICE_SUMS + element;
      activate(base + tile, element / SUM_COLUMNS, element % SUM_COLUMNS,
               strided_sum<SLICES>(p, SLICE_SUMS), strided_sum<SLICES>(p + ELEMENTS, SLICE_SUMS));
    }
  }
  MARK(6);
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
  MARK(7);

  // ---- down ----
#if HIDDEN_SHARED
  {
    Rows<WIDTH / 8, TOKENS * TOP_K, THREADS> hidden_rows;
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
  MARK(8);
  const int row_tiles = work.row_tiles;
#pragma unroll 1
  for (int unit = warp; unit < work.num_units; unit += WARPS) {
    const auto [row_tile, of_tile, r] = work.place(unit);
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
    for (int at = 0; at < UNIT_STAGES * STAGE_VECTORS; at += STAGE_VECTORS) {
#if !HIDDEN_SHARED
      Tokens tokens[STAGE_VECTORS];
#pragma unroll
      for (int v = 0; v < STAGE_VECTORS; v++) {
        if (SHORT_UNITS && at + v >= vectors) break;
        const bf16* const from = y + (at + v) * VECTOR_K;
        const uint4 none = make_uint4(0, 0, 0, 0);
        const bool is_read = has_row && k0 + (at + v) * VECTOR_K < WIDTH;
        tokens[v].lo = is_read ? load_act16(from) : none;
        tokens[v].hi = is_read ? load_act16(from + 8) : none;
      }
#endif
      const u8* const stage = stages.wait(error);
#pragma unroll
      for (int v = 0; v < STAGE_VECTORS; v++) {
        if (SHORT_UNITS && at + v >= vectors) break;
#if HIDDEN_SHARED
        const bf16* const from = y + (at + v) * VECTOR_K;
        const Tokens of_vector = {*(const uint4*)from, *(const uint4*)(from + 8)};
#else
        const Tokens& of_vector = tokens[v];
#endif
        multiply_vector(tile, stage + v * VECTOR_BYTES, of_vector, lane);
      }
      stages.request();
    }
#pragma unroll
    for (int e = 0; e < (ONE_TOKEN ? 1 : 2); e++) {
      const int token = (lane & 3) * 2 + e;
      if (ONE_TOKEN && token) break;
      const int of_token = choice.slot[u][token];
      if (of_token == NO_SLOT) continue;
      const int at = ((token * TOP_K + of_token) * PARTS + part) * 16 + g;
#if SHARE_ROWS
      if (r == row_tiles) {
        volatile float* const to =
            handed + (row_tile - BLOCKS * WHOLE_ROUNDS) * TOKEN_COLUMNS * TOP_K * PARTS * 16 + at;
        to[0] = tile.c[0][e] + tile.c[1][e];
        to[8] = tile.c[0][2 + e] + tile.c[1][2 + e];
        continue;
      }
#endif
      float* const p = sm.partial[r] + at;
      p[0] = tile.c[0][e] + tile.c[1][e];
      p[8] = tile.c[0][2 + e] + tile.c[1][2 + e];
    }
  }
  MARK(9);
  __syncthreads();
  MARK(10);
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
#if PUSHES
    sm.push.send(token, at, sum);
#else
    if (IS_PARTIAL)
      ((float*)out)[at] = sum;
    else
      ((bf16*)out)[at] = to_bf16(sum);
#endif
  };
#pragma unroll 1
  for (int i = threadIdx.x; i < row_tiles * 16 * TOKEN_COLUMNS; i += THREADS) {
    const int row = i % 16, token = i / 16 % TOKEN_COLUMNS, r = i / (16 * TOKEN_COLUMNS);
    if (token >= T) continue;
    finish(work.first_row_tile + BLOCKS * r, row, token,
           sm.partial[r] + token * TOP_K * PARTS * 16 + row, PARTS * 16);
  }
#if SHARE_ROWS
  // A tile of the shared ones for each of the first blocks: four rows of a slot's part a thread,
  // through the shared memory of the own tiles, behind a barrier.
  if (b < LEFT_TILES) {
    __syncthreads();
    for (int i = tid; i < T * TOP_K * PARTS * 4; i += THREADS) {
      const int slot = i / (4 * PARTS) % TOP_K;
      const bool is_wanted = slot < choice.num_slots[i / (4 * PARTS * TOP_K)];
      const float* const from = handed + b * TOKEN_COLUMNS * TOP_K * PARTS * 16 + i * 4;
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
             sm.partial[0] + i / 16 * TOP_K * PARTS * 16 + i % 16, PARTS * 16);
  }
#endif
  MARK(11);
}
