// Rows of activations four values at a time, for kernels that are no products of matrices.
//
// Sums and products that a row's bits depend on are spelled with fmaf, __fmul_rn and __fadd_rn:
// what a compiler contracts could differ from one variant of a kernel to the next.
#ifndef INK_VECTOR_CUH
#define INK_VECTOR_CUH
#include "device.cuh"

struct Four {
  float v[4];
};

INK_DEVICE Four zero_four() { return Four{{0.f, 0.f, 0.f, 0.f}}; }
INK_DEVICE Four four_of(uint2 pairs) {
  return Four{{low_float(pairs.x), high_float(pairs.x), low_float(pairs.y), high_float(pairs.y)}};
}
INK_DEVICE Four four_of(uint4 bits) {
  return Four{{__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
               __uint_as_float(bits.w)}};
}
INK_DEVICE uint2 bf16_of(const Four& x) {
  return make_uint2(pack_bf16(x.v[0], x.v[1]), pack_bf16(x.v[2], x.v[3]));
}
INK_DEVICE Four round_four(const Four& x) { return four_of(bf16_of(x)); }

// Four values from element `at` on of memory of bf16 or float32, aligned to all four.
template <bool FLOAT32>
INK_DEVICE Four load_act_four(const void* p, size_t at) {
  if constexpr (FLOAT32)
    return four_of(load_act16((const float*)p + at));
  else
    return four_of(load_act8((const bf16*)p + at));
}
template <bool FLOAT32>
INK_DEVICE Four load_weight_four(const void* p, size_t at) {
  if constexpr (FLOAT32)
    return four_of(load_weight16((const float*)p + at));
  else
    return four_of(load_weight8((const bf16*)p + at));
}
// Gives what a reader of the memory will see.
template <bool FLOAT32>
INK_DEVICE Four store_four(void* p, size_t at, const Four& x) {
  if constexpr (FLOAT32) {
    *(float4*)((float*)p + at) = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
    return x;
  } else {
    const uint2 rounded = bf16_of(x);
    *(uint2*)((bf16*)p + at) = rounded;
    return four_of(rounded);
  }
}

INK_DEVICE float sum_of_squares(const Four& x) {
  return fmaf(x.v[3], x.v[3], fmaf(x.v[2], x.v[2], fmaf(x.v[1], x.v[1], __fmul_rn(x.v[0], x.v[0]))));
}
// Over LANES neighbouring lanes, a power of two; all of the warp take part.
template <int LANES>
INK_DEVICE float lanes_sum(float x) {
#pragma unroll
  for (int o = LANES / 2; o; o >>= 1) x = __fadd_rn(x, __shfl_xor_sync(INK_FULL_WARP, x, o));
  return x;
}

// ---- heads: LANES lanes have four values each of a vector of 4 LANES values ----
// x min(1, threshold / (|x| + 1e-6)), not rounded.
template <int LANES>
INK_DEVICE Four clip_head(Four x, float threshold) {
  const float norm = sqrtf(lanes_sum<LANES>(sum_of_squares(x)));
  const float shrink = fminf(threshold / __fadd_rn(norm, 1e-6f), 1.f);
#pragma unroll
  for (int i = 0; i < 4; i++) x.v[i] = __fmul_rn(x.v[i], shrink);
  return x;
}
// x / rms(x), not rounded.
template <int LANES>
INK_DEVICE Four norm_head(Four x, float eps) {
  const float r = rsqrtf(fmaf(lanes_sum<LANES>(sum_of_squares(x)), 1.f / (4 * LANES), eps));
#pragma unroll
  for (int i = 0; i < 4; i++) x.v[i] = __fmul_rn(x.v[i], r);
  return x;
}

#endif  // INK_VECTOR_CUH
