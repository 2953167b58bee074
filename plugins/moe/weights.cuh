// Experts' weights: vectors of 16 rows x 64 k, each with its scales, 1..8 tokens, bf16 activations.
//
// A matrix is [row tile][k / 64] vectors (moe/packing.py packs it; k is padded with zeros), so a
// row tile is one contiguous stream and any number of vectors of it is one piece. As in w4a16.cuh,
// lane 4g + t owns rows g and g + 8 and k = 16 t .. + 15 of a vector, and the B operand of a vector
// is 32 contiguous bytes of the token's row:
//   NVFP4,  576 bytes: codes [lane][16 B], then scales [lane][row g, row g+8], e5m3
//   bf16,  2048 bytes: [mma][lane][16 B]
//   MXFP8, 1056 bytes: codes [mma / 2][lane][16 B], then exponents [g][k / 32][row g, row g+8]
//
// NVFP4 and bf16 are as there. An MXFP8 code (e4m3) shifted to bits {15, 10..4} of a bf16 reads as
// value x 2^-120, also where it is subnormal; one packed multiply by 2^(113 + k), whose exponent
// field is the stored byte, gives value x 2^(k - 7). Packing sees to it that all of this is exact.
// The 2^7 goes into the float32 sum (UNIT).
#ifndef INK_MOE_WEIGHTS_CUH
#define INK_MOE_WEIGHTS_CUH
#define FORMAT_NVFP4 0
#define FORMAT_BF16 1
#define FORMAT_MXFP8 2
#define WEIGHTS (FORMAT == FORMAT_BF16)
#include "w4a16/w4a16.cuh"

constexpr int VECTOR_BYTES = FORMAT == FORMAT_NVFP4 ? 576 : FORMAT == FORMAT_BF16 ? 2048 : 1056;

// Two codes of a word, those in even bytes or those in odd ones.
INK_DEVICE u32 even_codes(u32 w) { return ((w << 4) & 0x07F007F0u) | ((w << 8) & 0x80008000u); }
INK_DEVICE u32 odd_codes(u32 w) { return ((w >> 4) & 0x07F007F0u) | (w & 0x80008000u); }

// vector: in shared memory; b: this lane's token and k.
INK_DEVICE void multiply_vector(Tile& tile, const u8* vector, const Tokens& b, int lane) {
  const u32 x[8] = {b.lo.x, b.lo.y, b.lo.z, b.lo.w, b.hi.x, b.hi.y, b.hi.z, b.hi.w};
#if FORMAT == FORMAT_NVFP4
  const uint4 codes = *(const uint4*)(vector + lane * 16);
  const Scales s = scales_of<0>(*(const u16*)(vector + 512 + lane * 2));
  const u32 w[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int m = 0; m < 4; m++) {
    u32 a[4];
    dequantize(a, w[m], s);
    mma_bf16(tile.c[m & 1], a, x[2 * m], x[2 * m + 1]);
  }
#elif FORMAT == FORMAT_BF16
#pragma unroll
  for (int m = 0; m < 4; m++) {
    const uint4 w = *(const uint4*)(vector + m * 512 + lane * 16);
    const u32 a[4] = {w.x, w.y, w.z, w.w};
    mma_bf16(tile.c[m & 1], a, x[2 * m], x[2 * m + 1]);
  }
#else
  const u32 exponents = *(const u16*)(vector + 1024 + (lane >> 1) * 2);
  const u32 low = (exponents & 0xFF) * 0x00800080u, high = (exponents >> 8) * 0x00800080u;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint4 codes = *(const uint4*)(vector + h * 512 + lane * 16);
    const u32 w[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 a[4] = {
          mul_bf16x2(even_codes(w[2 * i]), low), mul_bf16x2(odd_codes(w[2 * i]), high),
          mul_bf16x2(even_codes(w[2 * i + 1]), low), mul_bf16x2(odd_codes(w[2 * i + 1]), high)};
      const int m = 2 * h + i;
      mma_bf16(tile.c[m & 1], a, x[2 * m], x[2 * m + 1]);
    }
  }
#endif
}
#endif  // INK_MOE_WEIGHTS_CUH
