// Routed experts (gate, up, activation, down), the shared expert's down projection and their sum,
// for T = 2..8 tokens in one launch. Every weight is read once for all tokens that chose its
// expert.
//
// First each warp of each block takes whole tiles of 8 gate and 8 up rows of the distinct experts;
// then blocks own a row tile of 16 rows of the output each, of which a warp's job is one expert's
// (or WIDTH of the shared expert's) K. Every block needs all activations, so in between all wait
// for all: BLOCKS must fit the GPU at once. Each warp's weights come through a ring of its own, in
// the order of its work, so those of the second part arrive while it waits.
//
// Bits are those of one token: gate_up.cu splits K over its warps, and a warp here sums the
// same parts in the same order; down.cu likewise.
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

struct Shared {
  alignas(128) u8 ring[WARPS][STAGES * STAGE_BYTES];
  union {  // rows padded, so that they start in different banks
    alignas(16) bf16 z[MAX_TOKENS][HIDDEN + 8];
    alignas(16) bf16 hidden[SLOTS][WIDTH + 8];
  };
  alignas(16) float partial[SHARED_JOBS + SLOTS][128];
  Route route;
  float unit[MAX_TOKENS][8];
};

// Rows of `width` values to padded rows in shared memory; all threads.
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
  wait_and_trigger();
  route(logits, T, sm.route);  // with block barriers
  const Route& choice = sm.route;

  // This warp's tiles are b + BLOCKS (warp + WARPS n). Its jobs are counted from the last warp, as
  // the first ones have more tiles.
  const int num_tiles = choice.num_experts * EXPERT_TILES,
            num_jobs = SHARED_JOBS + choice.num_experts;
  const int first_tile = b + BLOCKS * warp, first_job = WARPS - 1 - warp;
  const int my_tiles = (max(num_tiles - first_tile, 0) + BLOCKS * WARPS - 1) / (BLOCKS * WARPS);
  Ring ring = {sm.ring[warp], lane};
  // What is requested next: stages of one tile or job lie one after the other.
  const u8* next = nullptr;
  int left = 0, next_tile = first_tile, next_job = first_job;
  auto request = [&]() {
    if (left == 0) {
      if (next_tile < num_tiles) {
        const int expert = choice.expert[next_tile / EXPERT_TILES];
        next = gate_up + ((size_t)expert * EXPERT_TILES + next_tile % EXPERT_TILES) * TILE_BYTES;
        left = TILE_STAGES;
        next_tile += BLOCKS * WARPS;
      } else if (b < ROW_TILES && next_job < num_jobs) {
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
  if (tid < T * TOP_K) unit = tensor_unit(down_scale + choice.chosen[slot / TOP_K][slot % TOP_K]);
  if (tid < 128) shared_unit = tensor_unit(shared_scale);
  if (tid < T * TOP_K) sm.unit[slot / TOP_K][slot % TOP_K] = unit;

  __syncthreads();

  // ---- gate, up and activation ----
#pragma unroll 1
  for (int n = 0; n < my_tiles; n++) {
    const int i = first_tile + n * BLOCKS * WARPS, u = i / EXPERT_TILES;
    const float scale = tensor_unit(gate_up_scale + choice.expert[u]);
    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};  // as `strided_sum` over warps
#pragma unroll 1
    for (int first = 0; first < VECTORS; first += STEP) {
      Tile tile = zero_tile();
      const u8* stage = nullptr;
#pragma unroll
      for (int v = 0; v < STEP; v++) {
        if (v % STAGE_VECTORS == 0) stage = ring.wait();
        Activations<1> x;
        load_tokens_shared<1>(x, sm.z[g], first + v, lane);
        multiply_shared<1>(tile, stage, x, v % STAGE_VECTORS, lane);
        if (v % NV == NV - 1) {
          float (&sum)[4] = v / NV & 1 ? odd : even;
#pragma unroll
          for (int e = 0; e < 4; e++) sum[e] += tile.c[0][e] + tile.c[1][e];
          tile = zero_tile();
        }
        if (v % STAGE_VECTORS == STAGE_VECTORS - 1) request();
      }
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int token = (lane & 3) * 2 + e, k = choice.rank[u][token];
      const float gate = (even[e] + odd[e]) * scale, up = (even[2 + e] + odd[2 + e]) * scale;
      if (k != NO_RANK)
        hidden[((size_t)token * TOP_K + k) * WIDTH + i % EXPERT_TILES * 8 + g] =
            to_bf16(silu_approx(gate) * up);
    }
  }
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
    shared = round_bf16(shared * shared_unit);
    out[(size_t)token * HIDDEN + row] = to_bf16(round_bf16(routed) + shared);
  }
}
