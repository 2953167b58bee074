// residual_add: four values a thread. RESIDUAL: 0 none, 1 bf16, 2 float32.
#include "vector.cuh"

extern "C" __global__ void __launch_bounds__(128)
    residual_add(const void* residual, const bf16* update, void* out, int num_fours) {
  pdl_trigger();
  pdl_wait();
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= num_fours) return;
  const size_t at = (size_t)i * 4;
  Four sum = load_act_four<false>(update, at);
  if (RESIDUAL) {
    const Four old = load_act_four<RESIDUAL == 2>(residual, at);
#pragma unroll
    for (int e = 0; e < 4; e++) sum.v[e] = __fadd_rn(old.v[e], sum.v[e]);
  }
  store_four<OUT_FLOAT32>(out, at, sum);
}
