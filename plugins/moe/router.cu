// Router of a mixture of experts: sigmoid(x . W) in float32 for every expert, eight tokens a group
// of blocks. ROWS experts a block, whose weights come to shared memory before the wait; threads
// share K.
//
// The sum of a row's products has one order, whatever T is: thread i has k = 4 i .. 4 i + 3 of each
// 4 THREADS, lanes add up as a butterfly, and warps one after the other. Few registers and threads,
// so that with one token a block of the experts has room beside it.
#include "router_sums.cuh"

constexpr int THREADS = NUM_THREADS, WARPS = THREADS / 32;
constexpr int PIECES = (HIDDEN / 4 + THREADS - 1) / THREADS;
constexpr int TOKENS = ONE_TOKEN ? 1 : MAX_TOKENS, SUMS = ROWS * TOKENS;
static_assert(HIDDEN % 4 == 0 && SUMS <= 32, "whole pieces, a lane for each sum");
static_assert(SUMS <= THREADS, "a thread for each sum");

struct Shared {
  alignas(128) float weight[ROWS][HIDDEN];
  float sums[WARPS][SUMS];
  u64 bar;
};

extern "C" __global__ void __maxnreg__(REGISTERS)
    moe_router(const bf16* x, const float* weight, float* scores, int* error, int num_rows) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int group = blockIdx.x / BLOCKS, row0 = blockIdx.x % BLOCKS * ROWS;
  const int first = group * MAX_TOKENS, T = ONE_TOKEN ? 1 : min(num_rows - first, MAX_TOKENS);
  const int rows = min(ROWS, EXPERTS - row0);
  trigger_first();
  if (tid == 0) {
    mbar_init(&sm.bar, 1);
    mbar_expect(&sm.bar, rows * HIDDEN * 4);
    bulk_load(sm.weight, weight + (size_t)row0 * HIDDEN, rows * HIDDEN * 4, &sm.bar);
  }
  wait_and_trigger();
  uint2 v[TOKENS][PIECES];
#pragma unroll
  for (int t = 0; t < TOKENS; t++)
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int piece = p * THREADS + tid;
      const bf16* const from = x + (size_t)(first + t) * HIDDEN + piece * 4;
      v[t][p] = piece < HIDDEN / 4 && t < T ? load_act8(from) : make_uint2(0, 0);
    }
  __syncthreads();  // the barrier is there
  mbar_wait(&sm.bar, 0, error);
#pragma unroll 1
  for (int r = 0; r < rows; r++) {
    float sums[MAX_TOKENS] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int piece = p * THREADS + tid;
      if (piece >= HIDDEN / 4) break;
      const float4 w = *(const float4*)&sm.weight[r][piece * 4];
#pragma unroll
      for (int t = 0; t < TOKENS; t++) {
        sums[t] = fmaf(w.x, low_float(v[t][p].x), sums[t]);
        sums[t] = fmaf(w.y, high_float(v[t][p].x), sums[t]);
        sums[t] = fmaf(w.z, low_float(v[t][p].y), sums[t]);
        sums[t] = fmaf(w.w, high_float(v[t][p].y), sums[t]);
      }
    }
    const float sum = ONE_TOKEN ? warp_sum(sums[0]) : lane_sums(sums, lane);
    if (ONE_TOKEN ? lane == 0 : lane % 4 == 0) sm.sums[warp][r * TOKENS + lane / 4] = sum;
  }
  __syncthreads();
  const int row = tid / TOKENS, token = tid % TOKENS;
  if (row >= rows || token >= T) return;
  float logit = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) logit += sm.sums[i][tid];
  scores[(size_t)(first + token) * EXPERTS + row0 + row] = 1.f / (1.f + expf(-logit));
}
