// The bf16 chunks of the matrix that a quantized one stands for, but for its global scale, from the
// vectors of moe/weights.cuh: a warp a vector. Exact. Macros: FORMAT, NUM_VECTORS.
#include "moe/weights.cuh"

constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(WARPS * 32) unpack_vectors(const u8* packed, u8* out) {
  const int lane = threadIdx.x & 31, vector = blockIdx.x * WARPS + (threadIdx.x >> 5);
  pdl_trigger();
  pdl_wait();
  if (vector >= NUM_VECTORS) return;
  const u8* from = packed + (size_t)vector * VECTOR_BYTES;
  constexpr u32 UNITS = 0x43004300u;  // two of 2^7, see weights.cuh
  u32 a[4][4];
#if FORMAT == FORMAT_NVFP4
  const uint4 codes = load_weight16(from + lane * 16);
  const Scales s = scales_of<0>(load_weight2(from + 512 + lane * 2));
  const u32 w[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int m = 0; m < 4; m++) dequantize(a[m], w[m], s);
#else
  const u32 exponents = load_weight2(from + 1024 + (lane >> 1) * 2);
  const u32 low = (exponents & 0xFF) * 0x00800080u, high = (exponents >> 8) * 0x00800080u;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint4 codes = load_weight16(from + h * 512 + lane * 16);
    const u32 w[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        a[2 * h + i][2 * k] = mul_bf16x2(even_codes(w[2 * i + k]), low);
        a[2 * h + i][2 * k + 1] = mul_bf16x2(odd_codes(w[2 * i + k]), high);
      }
  }
#endif
#pragma unroll
  for (int m = 0; m < 4; m++)
    *(uint4*)(out + (size_t)vector * 2048 + m * 512 + lane * 16) =
        make_uint4(mul_bf16x2(a[m][0], UNITS), mul_bf16x2(a[m][1], UNITS),
                   mul_bf16x2(a[m][2], UNITS), mul_bf16x2(a[m][3], UNITS));
}
