// sum_parts: a thread adds up four values of all PARTS, in order. OUT_FLOAT32: else bf16.
#include "vector.cuh"

extern "C" __global__ void __launch_bounds__(128)
    sum_parts(const void* p0, const void* p1, const void* p2, const void* p3, const void* p4,
              const void* p5, const void* p6, const void* p7, void* out, int fours) {
  pdl_trigger();
  pdl_wait();
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= fours) return;
  const void* const parts[] = {p0, p1, p2, p3, p4, p5, p6, p7};
  Four v[PARTS];
#pragma unroll
  for (int p = 0; p < PARTS; p++) v[p] = load_act_four<true>(parts[p], (size_t)i * 4);
#pragma unroll
  for (int p = 1; p < PARTS; p++)
#pragma unroll
    for (int e = 0; e < 4; e++) v[0].v[e] = __fadd_rn(v[0].v[e], v[p].v[e]);
  store_four<OUT_FLOAT32>(out, (size_t)i * 4, v[0]);
}
