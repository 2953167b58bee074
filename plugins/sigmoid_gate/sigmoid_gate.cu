// sigmoid_gate: four values a thread.
#include "vector.cuh"

extern "C" __global__ void __launch_bounds__(128)
    sigmoid_gate(const bf16* x, const bf16* gate, bf16* out, int num_fours) {
  pdl_trigger();
  pdl_wait();
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= num_fours) return;
  const size_t at = (size_t)i * 4;
  Four y = load_act_four<false>(x, at);
  const Four g = load_act_four<false>(gate, at);
#pragma unroll
  for (int e = 0; e < 4; e++)
    y.v[e] = __fmul_rn(y.v[e], 1.f / __fadd_rn(1.f, expf(-g.v[e])));
  store_four<false>(out, at, y);
}
