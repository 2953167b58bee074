// Residual add and RMSNorm of a wide step, for products that read z from memory: one block of 256
// threads a token, at most 2048 values. residual and z have the bits of `Norm`, which the kernels
// for 1..8 tokens do in front of their products. With ROPE also the sines and cosines of the
// token's rotary angles. Rows from num_tokens on are left as they are.
#include "sin_cos.cuh"
#include "w4a16.cuh"

constexpr int PAIRS = 64;
static_assert(HIDDEN <= 2048 && HIDDEN % 8 == 0, "eight values a thread");

#if ROPE
__constant__ float INVERSE_FREQUENCIES[PAIRS] = {INV_FREQ};
#endif

// angles: (sine, cosine) [T][PAIRS].
extern "C" __global__ void __launch_bounds__(256)
    tile_norm(const bf16* x, const bf16* delta, const bf16* norm_weight, bf16* residual, bf16* z,
              float2* angles, const int* position, const int* num_tokens, float eps) {
  float* sums = (float*)dynamic_smem();
  const int tid = threadIdx.x, k = tid * 8, token = blockIdx.x;
  const bool is_live = k < HIDDEN;
  uint4 w = make_uint4(0, 0, 0, 0), a = w, d = w;
  if (is_live) w = load_weight16(norm_weight + k);
  const bool is_valid = token < load_act_int(num_tokens);
#if ROPE
  if (is_valid && tid < PAIRS) {
    float2 v;
    sin_cos(__fmul_rn((float)(load_act_int(position) + token), INVERSE_FREQUENCIES[tid]), v.x, v.y);
    d.x = __float_as_uint(v.x), d.y = __float_as_uint(v.y);
  }
#endif
  wait_and_trigger();
  if (!is_valid) return;
#if ROPE
  // After the wait: an earlier launch may still read what lies there.
  if (tid < PAIRS)
    angles[(size_t)token * PAIRS + tid] = make_float2(__uint_as_float(d.x), __uint_as_float(d.y));
  d = make_uint4(0, 0, 0, 0);
#endif
  const size_t at = (size_t)token * HIDDEN + k;
  if (is_live) a = load_act16(x + at);
  if (HAS_DELTA && is_live) d = load_act16(delta + at);
  const u32 as[4] = {a.x, a.y, a.z, a.w}, ds[4] = {d.x, d.y, d.z, d.w};
  const u32 ws[4] = {w.x, w.y, w.z, w.w};
  float s[8];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    s[2 * i] = HAS_DELTA ? low_float(as[i]) + low_float(ds[i]) : low_float(as[i]);
    s[2 * i + 1] = HAS_DELTA ? high_float(as[i]) + high_float(ds[i]) : high_float(as[i]);
  }
  const float sum = tree_sum(sum_of_squares(s));
  if ((tid & 31) == 0) sums[tid >> 5] = sum;
  __syncthreads();
  const float total =
      ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  const float r = inverse_rms(total, 1.f / HIDDEN, eps);
  if (!is_live) return;
  u32 stream[4], normed[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    stream[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
    normed[i] = pack_bf16(s[2 * i] * r * low_float(ws[i]), s[2 * i + 1] * r * high_float(ws[i]));
  }
  *(uint4*)(residual + at) = make_uint4(stream[0], stream[1], stream[2], stream[3]);
  *(uint4*)(z + at) = make_uint4(normed[0], normed[1], normed[2], normed[3]);
}
