// rms_norm: a block a row, four values a thread and round. X_FLOAT32 and OUT_FLOAT32: else bf16.
#include "vector.cuh"

constexpr int ROUNDS = (WIDTH / 4 + THREADS - 1) / THREADS, WARPS = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const void* x, const bf16* weight, void* out, float eps) {
  __shared__ float sums[WARPS];
  const int tid = threadIdx.x;
  pdl_trigger();
  uint2 w[ROUNDS];
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const int column = 4 * (i * THREADS + tid);
    if (HAS_WEIGHT && column < WIDTH) w[i] = load_weight8(weight + column);
  }
  pdl_wait();
  const size_t row = (size_t)blockIdx.x * WIDTH;
  Four v[ROUNDS];
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const int column = 4 * (i * THREADS + tid);
    v[i] = column < WIDTH ? load_act_four<X_FLOAT32>(x, row + column) : zero_four();
  }
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) sum = __fadd_rn(sum, sum_of_squares(v[i]));
  sum = lanes_sum<32>(sum);
  if ((tid & 31) == 0) sums[tid >> 5] = sum;
  __syncthreads();
  sum = sums[0];
#pragma unroll
  for (int i = 1; i < WARPS; i++) sum = __fadd_rn(sum, sums[i]);
  const float r = rsqrtf(fmaf(sum, 1.f / WIDTH, eps));
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const int column = 4 * (i * THREADS + tid);
    if (column >= WIDTH) break;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      v[i].v[e] = __fmul_rn(v[i].v[e], r);
      if (HAS_WEIGHT) v[i].v[e] = __fmul_rn(v[i].v[e], four_of(w[i]).v[e]);
    }
    store_four<OUT_FLOAT32>(out, row + column, v[i]);
  }
}
