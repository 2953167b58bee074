// residual = bf16(x + delta) and z = bf16(norm of the unrounded sum): one block a token, HIDDEN / 8
// threads of eight values each. A row's bits do not depend on how many rows there are.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(HIDDEN / 8)
    add_rms_norm(const bf16* x, const bf16* delta, const bf16* weight, bf16* residual, bf16* z,
                 float eps) {
  constexpr int WARPS = HIDDEN / 8 / 32;
  __shared__ float sums[WARPS];
  const int tid = threadIdx.x;
  const size_t at = (size_t)blockIdx.x * HIDDEN + tid * 8;
  pdl_trigger();
  const uint4 w = load_weight16(weight + tid * 8);
  pdl_wait();
  const uint4 a = load_act16(x + at);
  uint4 b = make_uint4(0, 0, 0, 0);
  if (HAS_DELTA) b = load_act16(delta + at);
  const u32 as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
  const u32 ws[4] = {w.x, w.y, w.z, w.w};
  float s[8], square = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    s[2 * i] = low_float(as[i]) + low_float(bs[i]);
    s[2 * i + 1] = high_float(as[i]) + high_float(bs[i]);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) square = fmaf(s[i], s[i], square);
  square = warp_sum(square);
  if ((tid & 31) == 0) sums[tid >> 5] = square;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < WARPS; i++) total += sums[i];
  const float scale = rsqrtf(total / HIDDEN + eps);
  u32 r[4], n[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    r[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
    n[i] = pack_bf16(s[2 * i] * scale * low_float(ws[i]), s[2 * i + 1] * scale * high_float(ws[i]));
  }
  *(uint4*)(residual + at) = make_uint4(r[0], r[1], r[2], r[3]);
  *(uint4*)(z + at) = make_uint4(n[0], n[1], n[2], n[3]);
}
