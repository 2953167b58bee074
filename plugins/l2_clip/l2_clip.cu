// l2_clip: a head of HEAD / 4 lanes with four values each.
#include "vector.cuh"

constexpr int LANES = HEAD / 4, BLOCK_HEADS = 128 / LANES;

extern "C" __global__ void __launch_bounds__(128)
    l2_clip(const bf16* x, const bf16* scale, bf16* out, int num_heads, float threshold) {
  pdl_trigger();
  const int job = blockIdx.x * BLOCK_HEADS + threadIdx.x / LANES;
  const int column = threadIdx.x % LANES * 4;
  const bool is_live = job < num_heads;
  Four factor;
  if (HAS_SCALE && is_live) factor = load_weight_four<false>(scale, job % HEADS * HEAD + column);
  pdl_wait();
  const size_t at = (size_t)job * HEAD + column;
  Four y = zero_four();
  if (is_live) {
    y = load_act_four<false>(x, at);
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (HAS_SCALE) y.v[e] = __fmul_rn(y.v[e], factor.v[e]);
  }
  y = clip_head<LANES>(y, threshold);
  if (is_live) store_four<false>(out, at, y);
}
