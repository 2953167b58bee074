// Routed and shared experts' down projection, weighted sum and final addition, for one token; more
// tokens: experts.cu. One row tile of 16 rows a block. A job is one expert's (or WIDTH of the
// shared expert's) K; warp w takes jobs w, w + 8, ...
//
// Launched right after `gate_up`, which see: the routing, the first weights and the shared expert's
// product come before the wait. Few registers, so that a block has room beside one of `gate_up` and
// its weights arrive while that works.
#include "route.cuh"

constexpr int WARPS = 8;
constexpr int NV = WIDTH / VECTOR_K, JOB_BYTES = tile_bytes(WIDTH), ROW_TILES = HIDDEN / 16;
constexpr int SHARED_JOBS = SHARED_WIDTH / WIDTH, JOBS = SHARED_JOBS + TOP_K;
static_assert(NV % CHUNK_VECTORS == 0, "a job is whole chunks");
static_assert(SHARED_WIDTH % WIDTH == 0, "the shared expert is a multiple of a routed one");

struct Shared {
  alignas(128) u8 tile[WARPS][JOB_BYTES];
  alignas(16) float partial[JOBS][128];
  SoloRoute route;
  float unit[8];
  u64 full[WARPS];
};

extern "C" __global__ void __maxnreg__(REGISTERS)
    down(const bf16* logits, const bf16* hidden, const bf16* shared_hidden, const u8* weights,
         const float* scales, const u8* shared_weights, const float* shared_scale, bf16* out,
         int* error) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  trigger_first();
  if (lane == 0) mbar_init(&sm.full[warp], 1);
  __syncwarp();
  const u8* const shared_tiles = shared_weights + (size_t)blockIdx.x * SHARED_JOBS * JOB_BYTES;
  auto request = [&](const u8* tile) {
    __syncwarp();  // all lanes are done with the one before
    if (lane != 0) return;
    mbar_expect(&sm.full[warp], JOB_BYTES);
    load_weights(sm.tile[warp], tile, JOB_BYTES, &sm.full[warp]);
  };
  // Warps whose first job is the shared expert's need not wait for the choice.
  if (warp < SHARED_JOBS) request(shared_tiles + warp * JOB_BYTES);
  const int* const expert = choose(logits, lane, warp, sm.route);
  auto request_routed = [&](int job) {
    request(weights + ((size_t)expert[job - SHARED_JOBS] * ROW_TILES + blockIdx.x) * JOB_BYTES);
  };
  if (warp >= SHARED_JOBS && warp < JOBS) request_routed(warp);
  float unit = 0, shared_unit = 0;
  if (tid < TOP_K) unit = tensor_unit(scales + expert[tid]);
  if (tid < 16) shared_unit = tensor_unit(shared_scale);
  if (tid < TOP_K) sm.unit[tid] = unit;

  u32 parity = 0;
  auto work = [&](int job, const bf16* x) {
    Tile halves[2] = {zero_tile(), zero_tile()};
    mbar_wait(&sm.full[warp], parity, error);
    parity ^= 1;
#pragma unroll
    for (int v = 0; v < NV; v += 2) {
      Activations<2> b;  // the token in every column
      load_tokens<2>(b, x, v, lane);
      multiply_shared<2>(halves[2 * v / NV], sm.tile[warp], b, v, lane);
    }
    store_tile(sm.partial[job], halves, lane);
  };
  // As the logits, the shared expert's vector is by the router, which has ended.
  int job = warp;
#pragma unroll 1
  for (; job < SHARED_JOBS; job += WARPS) {
    work(job, shared_hidden + job * WIDTH);
    if (job + WARPS < SHARED_JOBS)
      request(shared_tiles + (job + WARPS) * JOB_BYTES);
    else if (job + WARPS < JOBS)
      request_routed(job + WARPS);
  }
  wait_and_trigger();
#pragma unroll 1
  for (; job < JOBS; job += WARPS) {
    work(job, hidden + (job - SHARED_JOBS) * WIDTH);
    if (job + WARPS < JOBS) request_routed(job + WARPS);
  }
  __syncthreads();
  if (tid < 16) {
    float routed = 0;
#pragma unroll
    for (int k = 0; k < TOP_K; k++) {
      const float y = sm.partial[SHARED_JOBS + k][tid * 8] * sm.unit[k];
      routed = fmaf(sm.route.weight[k], round_bf16(y), routed);  // the product is exact
    }
    float shared = 0;
#pragma unroll
    for (int j = 0; j < SHARED_JOBS; j++) shared += sm.partial[j][tid * 8];
    shared = round_bf16(shared * shared_unit);
    out[blockIdx.x * 16 + tid] = to_bf16(round_bf16(routed) + shared);
  }
}
