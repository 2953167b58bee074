// Router of a mixture of experts: sigmoid(x . W) in float32 for every expert, T tokens from `first`
// on. ROWS experts a block, whose weights stand in registers before the wait; threads share K.
//
// The sum of a row's products has one order, whatever T is: thread i has k = 4 i .. 4 i + 3 of each
// 4 THREADS, lanes add up as a butterfly, and warps one after the other.
#include "w4a16/w4a16.cuh"

constexpr int THREADS = NUM_THREADS, PIECES = (HIDDEN / 4 + THREADS - 1) / THREADS, WARPS = THREADS / 32;
constexpr int TOKENS = ONE_TOKEN ? 1 : MAX_TOKENS, SUMS = ROWS * TOKENS;
static_assert(HIDDEN % 4 == 0 && ROWS <= 4, "whole pieces, at most four rows a block");

struct Shared {
  float sums[WARPS][32];
};

// Lane l gets the sum over lanes of value l. The order is that of `warp_sum`.
template <int OFFSET = 16>
INK_DEVICE float lane_sums(float (&v)[32], int lane) {
  const bool upper = lane & OFFSET;
#pragma unroll
  for (int i = 0; i < OFFSET; i++) {
    const float keep = upper ? v[i + OFFSET] : v[i], give = upper ? v[i] : v[i + OFFSET];
    v[i] = keep + __shfl_xor_sync(INK_FULL_WARP, give, OFFSET);
  }
  if constexpr (OFFSET > 1) return lane_sums<OFFSET / 2>(v, lane);
  return v[0];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    moe_router(const bf16* x, const float* weight, float* scores, int num_rows) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int group = blockIdx.x / BLOCKS, row0 = blockIdx.x % BLOCKS * ROWS;
  const int first = group * MAX_TOKENS, T = ONE_TOKEN ? 1 : min(num_rows - first, MAX_TOKENS);
  trigger_first();
  uint4 w[ROWS][PIECES];
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int piece = p * THREADS + tid;
      w[r][p] = piece < HIDDEN / 4 && row0 + r < EXPERTS
                    ? load_weight16(weight + (size_t)(row0 + r) * HIDDEN + piece * 4)
                    : make_uint4(0, 0, 0, 0);
    }
  wait_and_trigger();
  uint2 v[TOKENS][PIECES];
#pragma unroll
  for (int t = 0; t < TOKENS; t++)
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const int piece = p * THREADS + tid;
      v[t][p] = piece < HIDDEN / 4 && t < T ? load_act8(x + (size_t)(first + t) * HIDDEN + piece * 4)
                                            : make_uint2(0, 0);
    }
  float sums[32];
#pragma unroll
  for (int i = 0; i < 32; i++) sums[i] = 0;
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      float sum = 0;
#pragma unroll
      for (int p = 0; p < PIECES; p++) {
        sum = fmaf(__uint_as_float(w[r][p].x), low_float(v[t][p].x), sum);
        sum = fmaf(__uint_as_float(w[r][p].y), high_float(v[t][p].x), sum);
        sum = fmaf(__uint_as_float(w[r][p].z), low_float(v[t][p].y), sum);
        sum = fmaf(__uint_as_float(w[r][p].w), high_float(v[t][p].y), sum);
      }
      sums[r * TOKENS + t] = sum;
    }
  if (ONE_TOKEN) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const float sum = warp_sum(sums[r]);
      if (lane == r) sm.sums[warp][r] = sum;
    }
  } else {
    sm.sums[warp][lane] = lane_sums<>(sums, lane);
  }
  __syncthreads();
  const int row = row0 + tid / TOKENS, token = tid % TOKENS;
  if (tid >= SUMS || row >= EXPERTS || token >= T) return;
  float logit = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) logit += sm.sums[i][tid];
  scores[(size_t)(first + token) * EXPERTS + row] = 1.f / (1.f + expf(-logit));
}
