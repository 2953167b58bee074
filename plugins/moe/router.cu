// Router of a mixture of experts: sigmoid(x . W) in float32 for every expert, eight tokens a group
// of blocks. ROWS experts a block, whose weights come to shared memory before the wait; NUM_THREADS
// threads share K, and of several tokens SHARES such sets of threads have SHARE tokens each.
//
// The sum of a row's products has one order, whatever T is: thread i has k = 4 i .. 4 i + 3 of each
// 4 THREADS, lanes add up as a butterfly, and warps one after the other. Few registers, so that
// with one token a block of the experts has room beside it, and with several a block has room
// beside those of what comes before, and so its weights before the wait.
//
// Macros: HIDDEN, EXPERTS, ROWS, BLOCKS (of a group of tokens), NUM_THREADS, TOKENS (of a group, at
// most), SHARES, SHARE (a power of two), REGISTERS, TRIGGER.
#include "router_sums.cuh"

constexpr int THREADS = NUM_THREADS, WARPS = THREADS / 32;
constexpr int PIECES = (HIDDEN / 4 + THREADS - 1) / THREADS;
constexpr int PLACES = SHARES * SHARE, SUMS = ROWS * PLACES;
static_assert(HIDDEN % 4 == 0 && TOKENS <= PLACES, "whole pieces, a place for each token");
static_assert(SUMS <= SHARES * THREADS, "a thread for each sum");

struct Shared {
  alignas(128) float weight[ROWS][HIDDEN];
  float sums[WARPS][SUMS];
  u64 bar;
};

extern "C" __global__ void __maxnreg__(REGISTERS)
    moe_router(const bf16* x, const float* weight, float* scores, int* error, int num_rows) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, i = SHARES == 1 ? tid : tid % THREADS;
  const int group = blockIdx.x / BLOCKS, row0 = blockIdx.x % BLOCKS * ROWS;
  const int first = group * TOKENS, T = min(num_rows - first, TOKENS);
  const int rows = min(ROWS, EXPERTS - row0), own = SHARES == 1 ? 0 : tid / THREADS * SHARE;
  trigger_first();
  if (tid == 0) {
    mbar_init(&sm.bar, 1);
    mbar_expect(&sm.bar, rows * HIDDEN * 4);
    bulk_load(sm.weight, weight + (size_t)row0 * HIDDEN, rows * HIDDEN * 4, &sm.bar);
  }
  const bf16* const from = x + (size_t)(first + own) * HIDDEN + i * 4;
  auto has_piece = [&](int p) {
    return HIDDEN / 4 % THREADS == 0 || p * THREADS + i < HIDDEN / 4;
  };
  wait_and_trigger();
  uint2 v[SHARE][PIECES];
#pragma unroll
  for (int t = 0; t < SHARE; t++)
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      v[t][p] = make_uint2(0, 0);
      if (own + t < T && has_piece(p)) v[t][p] = load_act8(from + t * HIDDEN + p * THREADS * 4);
    }
  __syncthreads();  // the barrier is there
  mbar_wait(&sm.bar, 0, error);
  // Of rows that the last block does not have sums are made of what is there, and not used.
  float sums[ROWS][SHARE] = {};
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
    if (!has_piece(p)) break;
    float4 values[SHARE];
#pragma unroll
    for (int t = 0; t < SHARE; t++)
      values[t] = make_float4(low_float(v[t][p].x), high_float(v[t][p].x), low_float(v[t][p].y),
                              high_float(v[t][p].y));
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const float4 w = *(const float4*)&sm.weight[r][(p * THREADS + i) * 4];
#pragma unroll
      for (int t = 0; t < SHARE; t++) {
        sums[r][t] = fmaf(w.x, values[t].x, sums[r][t]);
        sums[r][t] = fmaf(w.y, values[t].y, sums[r][t]);
        sums[r][t] = fmaf(w.z, values[t].z, sums[r][t]);
        sums[r][t] = fmaf(w.w, values[t].w, sums[r][t]);
      }
    }
  }
  constexpr int LANES = 32 / SHARE;  // that have a token's sum in the end
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const float sum = lane_sums(sums[r], lane);
    if (lane % LANES == 0) sm.sums[i >> 5][r * PLACES + own + lane / LANES] = sum;
  }
  __syncthreads();
  const int row = tid / PLACES, token = tid % PLACES;
  if (row >= rows || token >= T) return;
  float logit = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) logit += sm.sums[w][tid];
  scores[(size_t)(first + token) * EXPERTS + row0 + row] = 1.f / (1.f + expf(-logit));
}
