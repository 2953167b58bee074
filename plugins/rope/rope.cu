// rope: a thread rotates four pairs, values `pair` and `pair` + HEAD / 2 of a head.
#include "vector.cuh"
#include "w4a16/sin_cos.cuh"

constexpr int HALF = HEAD / 2, JOBS = HALF / 4;
__constant__ float INVERSE_FREQUENCIES[HALF] = {INV_FREQ};

extern "C" __global__ void __launch_bounds__(128)
    rope(const bf16* x, const int* position, bf16* out, int num_heads) {
  pdl_trigger();
  const int i = blockIdx.x * 128 + threadIdx.x, head = i / JOBS, pair = i % JOBS * 4;
  const bool is_live = head < num_heads;
  Four sine, cosine;
  if (is_live) {
    const float p = (float)(load_act_int(position) + head / HEADS);
#pragma unroll
    for (int e = 0; e < 4; e++)
      sin_cos(__fmul_rn(p, INVERSE_FREQUENCIES[pair + e]), sine.v[e], cosine.v[e]);
  }
  pdl_wait();
  if (!is_live) return;
  const size_t at = (size_t)head * HEAD + pair;
  const Four low = load_act_four<false>(x, at), high = load_act_four<false>(x, at + HALF);
  Four a, b;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    a.v[e] = __fsub_rn(__fmul_rn(low.v[e], cosine.v[e]), __fmul_rn(high.v[e], sine.v[e]));
    b.v[e] = __fadd_rn(__fmul_rn(high.v[e], cosine.v[e]), __fmul_rn(low.v[e], sine.v[e]));
  }
  store_four<false>(out, at, a);
  store_four<false>(out, at + HALF, b);
}
