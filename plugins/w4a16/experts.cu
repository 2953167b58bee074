// Routed experts (gate, up, activation, down), the shared expert's down projection and their sum,
// for T = 2..8 tokens in one launch. Every weight is read once for all tokens that chose its
// expert.
//
// First come tiles of 8 gate and 8 up rows of the distinct experts, dealt out to the blocks; two
// warps share a tile. Then blocks own a row tile of 16 rows of the output each, of which a warp's
// job is one expert's (or WIDTH of the shared expert's) K. Every block needs all activations, so in
// between all wait for all: BLOCKS must fit the GPU at once. Each warp's weights come through a
// ring of its own, in the order of its work, so those of the second part arrive while it waits.
//
// Bits are those of one token. gate_up.cu splits K over its warps; here a warp sums the same parts
// one by one, in the same order, and hands the sums to the warp that has the other half of K.
#include "ring.cuh"
#include "route.cuh"

constexpr int WARPS = 16, THREADS = WARPS * 32;
constexpr int VECTORS = HIDDEN / VECTOR_K, NV = vectors_per_warp(HIDDEN, WARPS);
constexpr int PARTS = VECTORS / NV;
constexpr int SPLIT = PARTS % 4 == 0 && VECTORS / 2 % STAGE_VECTORS == 0 ? 2 : 1;
constexpr int TEAMS = WARPS / SPLIT;  // of the warps of a tile
constexpr int TILE_BYTES = tile_bytes(HIDDEN), EXPERT_TILES = WIDTH / 8;
constexpr int TILE_STAGES = VECTORS / SPLIT / STAGE_VECTORS;  // of a warp
constexpr int JOB_VECTORS = WIDTH / VECTOR_K, JOB_BYTES = tile_bytes(WIDTH);
constexpr int JOB_STAGES = JOB_VECTORS / STAGE_VECTORS;
constexpr int ROW_TILES = HIDDEN / 16, SHARED_JOBS = SHARED_WIDTH / WIDTH;
static_assert(VECTORS % STAGE_VECTORS == 0 && JOB_VECTORS % CHUNK_VECTORS == 0, "whole stages");
static_assert(SHARED_WIDTH % WIDTH == 0, "the shared expert is a multiple of a routed one");
static_assert(ROW_TILES <= BLOCKS, "a block for each row tile");

struct Sums {
  float even[4], odd[4];
};
struct Shared {
  alignas(128) u8 ring[WARPS][STAGES * STAGE_BYTES];
  union {  // rows padded, so that they start in different banks
    alignas(16) bf16 z[MAX_TOKENS][HIDDEN + 8];
    alignas(16) bf16 hidden[SLOTS][WIDTH + 8];
  };
  union {
    alignas(16) Sums passed[TEAMS][2][32];  // from one warp of a tile to the other, by turns
    alignas(16) float partial[SHARED_JOBS + SLOTS][128];
  };
  Route route;
  float unit[MAX_TOKENS][8];
  alignas(8) u64 full[WARPS][STAGES];
};

// Rows of WIDTH_OF_ROW values to padded rows in shared memory; all threads.
template <int WIDTH_OF_ROW>
INK_DEVICE void copy_rows(bf16* to, const bf16* from, int rows) {
  constexpr int PIECES = WIDTH_OF_ROW / 8;
  for (int i = threadIdx.x; i < rows * PIECES; i += THREADS)
    *(uint4*)(to + i / PIECES * (WIDTH_OF_ROW + 8) + i % PIECES * 8) = load_act16(from + i * 8);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    experts(const bf16* z, const bf16* logits, const bf16* shared_hidden, const u8* gate_up,
            const float* gate_up_scale, const u8* down, const float* down_scale,
            const u8* shared_down, const float* shared_scale, bf16* hidden, bf16* out,
            u64* arrivals, int* error, int T) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, b = blockIdx.x;
  if (tid < WARPS * STAGES) mbar_init(&sm.full[0][0] + tid, 1);
  wait_and_trigger();
  route(logits, T, sm.route);  // with block barriers
  const Route& choice = sm.route;

  // This block's tiles are b + BLOCKS n; those of a team are n = team, team + TEAMS, ... A warp's
  // jobs are counted from the last one, as the first teams have more tiles.
  const int team = warp / SPLIT, half = warp % SPLIT, first_job = WARPS - 1 - warp;
  const int num_tiles = choice.num_experts * EXPERT_TILES;
  const int my_tiles = (max(num_tiles - b, 0) + BLOCKS - 1) / BLOCKS;
  const int num_jobs = b < ROW_TILES ? SHARED_JOBS + choice.num_experts : 0;
  Ring ring = {sm.ring[warp], sm.full[warp], error, lane};
  // What is requested next: stages of one tile or job lie one after the other.
  const u8* next = nullptr;
  int left = 0, next_tile = team, next_job = first_job;
  auto request = [&]() {
    if (left == 0) {
      if (next_tile < my_tiles) {
        const int i = b + next_tile * BLOCKS, expert = choice.expert[i / EXPERT_TILES];
        next = gate_up + ((size_t)expert * EXPERT_TILES + i % EXPERT_TILES) * TILE_BYTES +
               half * (TILE_BYTES / SPLIT);
        left = TILE_STAGES;
        next_tile += TEAMS;
      } else if (next_job < num_jobs) {
        const int routed = next_job - SHARED_JOBS;
        next = routed < 0 ? shared_down + ((size_t)b * SHARED_JOBS + next_job) * JOB_BYTES
                          : down + ((size_t)choice.expert[routed] * ROW_TILES + b) * JOB_BYTES;
        left = JOB_STAGES;
        next_job += WARPS;
      }
    }
    ring.request(left ? next : nullptr);
    next += STAGE_BYTES;
    left = max(left - 1, 0);
  };
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) request();
  copy_rows<HIDDEN>(sm.z[0], z, T);  // while the weights are on their way

  // For later.
  float unit = 0, shared_unit = 0;
  const int slot = tid < T * TOP_K ? tid : 0;
  if (tid < T * TOP_K) unit = load_scale(down_scale + choice.chosen[slot / TOP_K][slot % TOP_K]);
  if (tid < 128) shared_unit = load_scale(shared_scale);
  __syncthreads();

  // ---- gate, up and activation ----
#pragma unroll 1
  for (int n = team, turn = 0; n < my_tiles; n += TEAMS, turn ^= 1) {
    const int i = b + n * BLOCKS, u = i / EXPERT_TILES;
    const float scale = load_scale(gate_up_scale + choice.expert[u]);
    float part[PARTS / SPLIT][4];
    Tile tile;
    const u8* stage = nullptr;
#pragma unroll
    for (int v = 0; v < VECTORS / SPLIT; v++) {
      if (v % STAGE_VECTORS == 0) stage = ring.wait();
      if (v % NV == 0) tile = zero_tile();
      Activations<1> x;
      load_tokens_shared<1>(x, sm.z[g], half * (VECTORS / SPLIT) + v, lane);
      multiply_shared<1>(tile, stage, x, v % STAGE_VECTORS, lane);
      if (v % NV == NV - 1)
#pragma unroll
        for (int e = 0; e < 4; e++) part[v / NV][e] = tile.c[0][e] + tile.c[1][e];
      if (v % STAGE_VECTORS == STAGE_VECTORS - 1) request();
    }
    // As `strided_sum` over warps.
    Sums sums = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    Sums& passed = sm.passed[team][turn][lane];
    if (half == 1) {
      named_barrier(1 + team, 64);
      sums = passed;
    }
#pragma unroll
    for (int q = 0; q < PARTS / SPLIT; q++)
#pragma unroll
      for (int e = 0; e < 4; e++) (q & 1 ? sums.odd : sums.even)[e] += part[q][e];
    if (half + 1 < SPLIT) {
      passed = sums;
      named_barrier(1 + team, 64);
      continue;
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int token = (lane & 3) * 2 + e, k = choice.rank[u][token];
      const float gate = (sums.even[e] + sums.odd[e]) * (scale * UNIT);
      const float up = (sums.even[2 + e] + sums.odd[2 + e]) * (scale * UNIT);
      if (k != NO_RANK)
        hidden[((size_t)token * TOP_K + k) * WIDTH + i % EXPERT_TILES * 8 + g] =
            to_bf16(silu_approx(gate) * up);
    }
  }
  if (tid < T * TOP_K) sm.unit[slot / TOP_K][slot % TOP_K] = unit * UNIT;
  __syncthreads();
  u64 all = 0;
  if (tid == 0) all = (arrive(arrivals) / BLOCKS + 1) * BLOCKS;  // every launch adds BLOCKS
  if (b >= ROW_TILES) return;

  // ---- down ----
  auto work = [&](int job, const bf16* x, bool is_shared) {  // x: this lane's token
    Tile halves[2] = {zero_tile(), zero_tile()};
    const u8* stage = nullptr;
#pragma unroll
    for (int v = 0; v < JOB_VECTORS; v++) {
      if (v % STAGE_VECTORS == 0) stage = ring.wait();
      Activations<1> y;
      if (is_shared)
        load_tokens_shared<1>(y, x, v, lane);
      else
        load_tokens<1>(y, x, v, lane);
      multiply_shared<1>(halves[2 * v / JOB_VECTORS], stage, y, v % STAGE_VECTORS, lane);
      if (v % STAGE_VECTORS == STAGE_VECTORS - 1) request();
    }
    store_tile(sm.partial[job], halves, lane);
  };
  int job = first_job;
#pragma unroll 1
  for (; job < SHARED_JOBS; job += WARPS)
    work(job, g < T ? shared_hidden + (size_t)g * SHARED_WIDTH + job * WIDTH : nullptr, false);
  if (tid == 0) {
    u32 spins = 0;
    while (load_arrivals(arrivals) < all && spins < INK_SPIN_LIMIT) spins++;
    if (spins == INK_SPIN_LIMIT) report_error(error, ERROR_SENTINEL);
  }
  __syncthreads();
  copy_rows<WIDTH>(sm.hidden[0], hidden, T * TOP_K);
  __syncthreads();
#pragma unroll 1
  for (; job < num_jobs; job += WARPS) {
    const int k = choice.rank[job - SHARED_JOBS][g];  // columns of other tokens are not read
    work(job, sm.hidden[k == NO_RANK ? 0 : g * TOP_K + k], true);
  }
  __syncthreads();
  const int row = b * 16 + (tid >> 3), token = tid & 7;
  if (tid < 128 && token < T) {
    float routed = 0;
#pragma unroll
    for (int k = 0; k < TOP_K; k++) {
      const float y = sm.partial[SHARED_JOBS + choice.index[token][k]][tid] * sm.unit[token][k];
      routed = fmaf(choice.weight[token][k], round_bf16(y), routed);  // the product is exact
    }
    float shared = 0;
#pragma unroll
    for (int j = 0; j < SHARED_JOBS; j++) shared += sm.partial[j][tid];
    shared = round_bf16(shared * (shared_unit * UNIT));
    out[(size_t)token * HIDDEN + row] = to_bf16(round_bf16(routed) + shared);
  }
}
