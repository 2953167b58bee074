// Routed experts (gate, up, activation, down), the shared expert's down projection and their sum,
// for T = 2..8 tokens in one launch. Every weight is read once for all tokens that chose its
// expert.
//
// First each warp of each block takes whole tiles of 8 gate and 8 up rows of the distinct experts,
// as long as there is one for every warp; of the rest GROUP warps share each, so that none works
// twice as long as the others. Then blocks own a row tile of 16 rows of the output each, of which a
// warp's job is one expert's (or WIDTH of the shared expert's) K. Every block needs all
// activations, so in between all wait for all: BLOCKS must fit the GPU at once. Each warp's weights
// come through a ring of its own, in the order of its work, so those of the second part arrive
// while it waits. What is small is loaded before them: behind them it would come last.
//
// Bits are those of one token: gate_up.cu splits K over its warps, and here the same parts are
// summed in the same order; down.cu likewise.
//
// There is one loop for gate/up and one for down, as instructions matter: every launch fetches
// them, and the kernels of a layer do not fit the instruction cache together.
#include "ring.cuh"
#include "route.cuh"

constexpr int WARPS = 16, THREADS = WARPS * 32;
constexpr int VECTORS = HIDDEN / VECTOR_K, NV = vectors_per_warp(HIDDEN, WARPS);
constexpr int STEP = 2 * NV > STAGE_VECTORS ? 2 * NV : STAGE_VECTORS;
constexpr int TILE_BYTES = tile_bytes(HIDDEN), EXPERT_TILES = WIDTH / 8;
constexpr int TILE_STAGES = VECTORS / STAGE_VECTORS;
constexpr int JOB_VECTORS = WIDTH / VECTOR_K, JOB_BYTES = tile_bytes(WIDTH);
constexpr int JOB_STAGES = JOB_VECTORS / STAGE_VECTORS;
constexpr int ROW_TILES = HIDDEN / 16, SHARED_JOBS = SHARED_WIDTH / WIDTH;
static_assert(VECTORS % STEP == 0 && STEP % STAGE_VECTORS == 0, "whole steps");
static_assert(JOB_VECTORS % CHUNK_VECTORS == 0, "a job is whole chunks");
static_assert(SHARED_WIDTH % WIDTH == 0, "the shared expert is a multiple of a routed one");
static_assert(ROW_TILES <= BLOCKS, "a block for each row tile");

// Warps that share a tile, a step of it each, and how many tiles are shared at once. A block shares
// as many as take less time that way than one more for a warp.
constexpr int GROUP = 8, GROUPS = WARPS / GROUP;
constexpr int MOST_SHARED = 5 * GROUPS, SLICES = VECTORS / NV;
constexpr bool SHARES = VECTORS == GROUP * STEP;  // a step for each

struct Shared {
  alignas(128) u8 ring[WARPS][STAGES * STAGE_BYTES];
  union {  // rows padded, so that they start in different banks
    struct {
      alignas(16) bf16 z[MAX_TOKENS][HIDDEN + 8];
      bf16 shared_hidden[MAX_TOKENS][SHARED_WIDTH + 8];
    };
    alignas(16) bf16 hidden[SLOTS][WIDTH + 8];
  };
  union {
    struct {
      alignas(16) float partial[SHARED_JOBS + SLOTS][128];
      float down_scale[EXPERTS];  // NVFP4
    };
    alignas(16) float sums[2][GROUPS][SHARES ? SLICES * 128 : 1];  // [slice][row 16][token 8]
  };
  Route route;
  float gate_up_scale[EXPERTS];  // NVFP4
  u64 first[WARPS][FIRST_BARS];  // of the rings
};

// Rows of WIDTH_OF_ROW values, at most ROWS, on their way to padded rows in shared memory: all
// loads first, then all stores. All threads.
template <int WIDTH_OF_ROW, int ROWS>
struct Rows {
  static constexpr int PIECES = WIDTH_OF_ROW / 8, COUNT = (ROWS * PIECES + THREADS - 1) / THREADS;
  uint4 piece[COUNT];

  INK_DEVICE void load(const bf16* from, int rows) {
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
      const int i = threadIdx.x + n * THREADS;
      if (i < rows * PIECES) piece[n] = load_act16(from + i * 8);
    }
  }
  INK_DEVICE void store(bf16* to, int rows) const {
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
      const int i = threadIdx.x + n * THREADS;
      if (i < rows * PIECES)
        *(uint4*)(to + i / PIECES * (WIDTH_OF_ROW + 8) + i % PIECES * 8) = piece[n];
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    experts(const bf16* z, const bf16* logits, const bf16* shared_hidden, const u8* gate_up,
            const float* gate_up_scale, const u8* down, const float* down_scale,
            const u8* shared_down, const float* shared_scale, bf16* hidden, bf16* out,
            u64* arrivals, int* error, int T) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, b = blockIdx.x;
  auto unit_of = [](float scale) { return WEIGHTS ? 1.f : scale * UNIT; };
  if (WEIGHTS == 0 && tid < EXPERTS) copy_async4(sm.gate_up_scale + tid, gate_up_scale + tid);
  copy_async_commit();
  if (lane < FIRST_BARS) mbar_init(&sm.first[warp][lane], 2);
  __syncwarp();
  wait_and_trigger();
  const uint4 bits = warp < T ? load_logits(logits + warp * EXPERTS, lane) : make_uint4(0, 0, 0, 0);
  const float shared_unit = tid < 128 ? tensor_unit(shared_scale) : 0.f;
  Rows<HIDDEN, MAX_TOKENS> z_rows;
  Rows<SHARED_WIDTH, MAX_TOKENS> shared_rows;
  z_rows.load(z, T);  // before the weights: small loads queue behind large ones
  shared_rows.load(shared_hidden, T);
  const u32 key = route(bits, T, sm.route);  // with block barriers
  const Route& choice = sm.route;

  // The block's tiles are b + BLOCKS t, of which this warp has t = warp, warp + WARPS, ... below
  // `own`, and a part of own + group, own + group + GROUPS, ... Its jobs are counted from the last
  // warp, as the first ones have more tiles.
  const int num_tiles = choice.num_experts * EXPERT_TILES,
            num_jobs = b < ROW_TILES ? SHARED_JOBS + choice.num_experts : 0;
  const int end = (max(num_tiles - b, 0) + BLOCKS - 1) / BLOCKS, rest = end % WARPS;
  const int own = SHARES && rest <= MOST_SHARED ? end - rest : end;
  const int group = warp / GROUP, part = warp % GROUP, first_job = WARPS - 1 - warp;
  auto tile_at = [&](int t) {
    const int i = b + BLOCKS * t, expert = choice.expert[i / EXPERT_TILES];
    return gate_up + ((size_t)expert * EXPERT_TILES + i % EXPERT_TILES) * TILE_BYTES;
  };
  Ring ring = {sm.ring[warp], sm.first[warp], lane};
  // What is requested next: stages of one tile or job lie one after the other.
  const u8* next = nullptr;
  int left = 0, next_own = warp, next_shared = own + group, next_job = first_job;
  auto source = [&]() -> const u8* {
    if (left == 0) {
      if (next_own < own) {
        next = tile_at(next_own);
        left = TILE_STAGES;
        next_own += WARPS;
      } else if (next_shared < end) {
        next = tile_at(next_shared) + part * (STEP / STAGE_VECTORS) * STAGE_BYTES;
        left = STEP / STAGE_VECTORS;
        next_shared += GROUPS;
      } else if (next_job < num_jobs) {
        const int routed = next_job - SHARED_JOBS;
        next = routed < 0 ? shared_down + ((size_t)b * SHARED_JOBS + next_job) * JOB_BYTES
                          : down + ((size_t)choice.expert[routed] * ROW_TILES + b) * JOB_BYTES;
        left = JOB_STAGES;
        next_job += WARPS;
      } else {
        return nullptr;
      }
    }
    left--;
    next += STAGE_BYTES;
    return next - STAGE_BYTES;
  };
  auto request = [&]() { ring.request(source()); };
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) ring.request_first(source());
  weigh(key, T, sm.route);
  z_rows.store(sm.z[0], T);
  shared_rows.store(sm.shared_hidden[0], T);

  copy_async_wait_but<STAGES>();  // the scales
  __syncthreads();

  // ---- gate, up and activation ----
  auto activate = [&](int t, int row, int token, float gate, float up) {
    const int i = b + BLOCKS * t, u = i / EXPERT_TILES, k = choice.rank[u][token];
    if (k == NO_RANK) return;
    const float scale = unit_of(sm.gate_up_scale[choice.expert[u]]);
    hidden[((size_t)token * TOP_K + k) * WIDTH + i % EXPERT_TILES * 8 + row] =
        to_bf16(silu_approx(gate * scale) * (up * scale));
  };
  // A step is of an own tile, whose slices the warp adds up as `strided_sum` over warps would, or
  // of a shared one: those go to shared memory, and behind the group's barrier two warps, others in
  // every round, add them up while the next step goes to the other half of `sums`.
  float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
  int t = warp < own ? warp : own + group, first = 0, round = 0;
#pragma unroll 1
  while (t < own || (SHARES && t - group < end)) {
    const bool is_own = t < own;
    if (!is_own) first = part * STEP;
    float* const sums = sm.sums[round & 1][group] + first / NV * (SHARES ? 128 : 0);
    if (t < end) {
      Tile slice[2] = {zero_tile(), zero_tile()};
      const u8* stage = nullptr;
#pragma unroll
      for (int v = 0; v < STEP; v++) {
        if (v % STAGE_VECTORS == 0) stage = ring.wait(error);
        Activations<1> x;
        load_tokens_shared<1>(x, sm.z[g], first + v, lane);
        Tile& tile = slice[v / NV % 2];
        multiply_shared<1>(tile, stage, x, v % STAGE_VECTORS, lane);
        if (v % STAGE_VECTORS == STAGE_VECTORS - 1) request();
        if (v % NV != NV - 1) continue;
        if (SHARES && !is_own) {
          store_tile(sums + v / NV * 128, tile, lane);
        } else {
          float (&sum)[4] = v / NV % 2 ? odd : even;
#pragma unroll
          for (int e = 0; e < 4; e++) sum[e] += tile.c[0][e] + tile.c[1][e];
        }
        tile = zero_tile();
      }
    }
    if (is_own) {
      first += STEP;
      if (first < VECTORS) continue;
#pragma unroll
      for (int e = 0; e < 2; e++)
        activate(t, g, (lane & 3) * 2 + e, even[e] + odd[e], even[2 + e] + odd[2 + e]);
#pragma unroll
      for (int e = 0; e < 4; e++) even[e] = odd[e] = 0;
      first = 0;
      t = t + WARPS < own ? t + WARPS : own + group;
    } else {
      named_barrier(1 + group, GROUP * 32);
      if (t < end && part / 2 == round % (GROUP / 2)) {
        const int at = part % 2 * 32 + lane;
        const float* const row = sm.sums[round & 1][group] + at;
        activate(t, at / 8, at % 8, strided_sum<SLICES>(row, 128),
                 strided_sum<SLICES>(row + 64, 128));
      }
      round++;
      t += GROUPS;
    }
  }
  __syncthreads();
  u64 all = 0;
  if (tid == 0) all = (arrive(arrivals) / BLOCKS + 1) * BLOCKS;  // every launch adds BLOCKS
  if (b >= ROW_TILES) return;
  if (WEIGHTS == 0 && tid < EXPERTS) copy_async4(sm.down_scale + tid, down_scale + tid);

  // ---- down ----
  // x: this lane's token.
  auto work = [&](int job, const bf16* x) {
    constexpr int HALF = JOB_VECTORS / 2;
    float sum[4] = {0, 0, 0, 0};
    const u8* stage = nullptr;
#pragma unroll 1
    for (int first = 0; first < JOB_VECTORS; first += HALF) {
      Tile tile = zero_tile();
#pragma unroll
      for (int i = 0; i < HALF; i++) {
        const int v = first + i, of_stage = (HALF % STAGE_VECTORS ? v : i) % STAGE_VECTORS;
        if (of_stage == 0) stage = ring.wait(error);
        Activations<1> y;
        load_tokens_shared<1>(y, x, v, lane);
        multiply_shared<1>(tile, stage, y, of_stage, lane);
        if (of_stage == STAGE_VECTORS - 1) request();
      }
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float half = tile.c[0][e] + tile.c[1][e];
        sum[e] = first ? sum[e] + half : half;
      }
    }
    float* const p = sm.partial[job] + lane * 2;
    *(float2*)p = make_float2(sum[0], sum[1]);
    *(float2*)(p + 64) = make_float2(sum[2], sum[3]);
  };
  // The shared expert's jobs come first and need no other block's results.
  bool has_met = false;
#pragma unroll 1
  for (int job = first_job;; job += WARPS) {
    if (job >= SHARED_JOBS && !has_met) {
      if (tid == 0) {
        u32 spins = 0;
        while (load_arrivals(arrivals) < all && spins < INK_SPIN_LIMIT) spins++;
        if (spins == INK_SPIN_LIMIT) report_error(error, ERROR_SENTINEL);
      }
      __syncthreads();
      Rows<WIDTH, SLOTS> hidden_rows;
      hidden_rows.load(hidden, T * TOP_K);
      hidden_rows.store(sm.hidden[0], T * TOP_K);
      __syncthreads();
      has_met = true;
    }
    if (job >= num_jobs) break;
    // Columns of tokens that did not choose the expert are not read.
    const int k = job < SHARED_JOBS ? 0 : choice.rank[job - SHARED_JOBS][g];
    work(job, job < SHARED_JOBS ? sm.shared_hidden[g] + job * WIDTH
                                : sm.hidden[k == NO_RANK ? 0 : g * TOP_K + k]);
  }
  copy_async_wait();  // the scales
  __syncthreads();
  const int row = b * 16 + (tid >> 3), token = tid & 7;
  if (tid < 128 && token < T) {
    float routed = 0;
#pragma unroll
    for (int k = 0; k < TOP_K; k++) {
      const float y = sm.partial[SHARED_JOBS + choice.index[token][k]][tid] *
                      unit_of(sm.down_scale[choice.chosen[token][k]]);
      routed = fmaf(choice.weight[token][k], round_bf16(y), routed);  // the product is exact
    }
    float shared = 0;
#pragma unroll
    for (int j = 0; j < SHARED_JOBS; j++) shared += sm.partial[j][tid];
    shared = round_bf16(shared * shared_unit);
    out[(size_t)token * HIDDEN + row] = to_bf16(round_bf16(routed) + shared);
  }
}
