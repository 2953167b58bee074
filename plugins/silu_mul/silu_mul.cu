// silu_mul: four values a thread, of rows [gates | ups] of WIDTH each.
#include "vector.cuh"

extern "C" __global__ void __launch_bounds__(128)
    silu_mul(const bf16* gate_up, bf16* out, int num_fours) {
  pdl_trigger();
  pdl_wait();
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= num_fours) return;
  const size_t row = i / (WIDTH / 4), column = i % (WIDTH / 4) * 4;
  Four y = load_act_four<false>(gate_up, row * (2 * WIDTH) + column);
  const Four up = load_act_four<false>(gate_up, row * (2 * WIDTH) + WIDTH + column);
#pragma unroll
  for (int e = 0; e < 4; e++)
    y.v[e] = __fmul_rn(y.v[e] / __fadd_rn(1.f, expf(-y.v[e])), up.v[e]);
  store_four<false>(out, (size_t)i * 4, y);
}
