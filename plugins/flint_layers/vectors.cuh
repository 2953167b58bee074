// Products and vectors of one token in layers.cu: weights as A operands, sums over warps, the
// residual stream.
#ifndef INK_FLINT_LAYERS_VECTORS_CUH
#define INK_FLINT_LAYERS_VECTORS_CUH
#include "exchange.cuh"
#include "memory.cuh"

// ---- weights of N vectors as A operands, before the activations are there ----
template <int N>
struct Ready {
  u32 a[N][4][4];
};
template <int N>
INK_DEVICE void make_ready(Ready<N>& r, const u8* tile, int first, int lane) {
  static_assert(N == 2 || N == 4, "scales of two or four vectors at once");
  u32 scales[N / 2];
  if (N == 4) {
    const uint2 v = *(const uint2*)vector_scales(tile, first, lane);
    scales[0] = v.x, scales[N / 2 - 1] = v.y;
  } else {
    scales[0] = *(const u32*)vector_scales(tile, first, lane);
  }
#pragma unroll
  for (int i = 0; i < N; i++) {
    const uint4 codes = *(const uint4*)vector_codes(tile, first + i, lane);
    const Scales s = i & 1 ? scales_of<1>(scales[i / 2]) : scales_of<0>(scales[i / 2]);
    const u32 w[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int m = 0; m < 4; m++) dequantize(r.a[i][m], w[m], s);
  }
  // Not to be moved behind the wait.
#pragma unroll
  for (int i = 0; i < N; i++)
#pragma unroll
    for (int m = 0; m < 4; m++)
      asm volatile(""
                   : "+r"(r.a[i][m][0]), "+r"(r.a[i][m][1]), "+r"(r.a[i][m][2]),
                     "+r"(r.a[i][m][3]));
}
template <int N>
INK_DEVICE void multiply_ready(Tile& t, const Ready<N>& r, const Activations<N>& b) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    const Tokens& v = b.v[i];
    const u32 x[8] = {v.lo.x, v.lo.y, v.lo.z, v.lo.w, v.hi.x, v.hi.y, v.hi.z, v.hi.w};
#pragma unroll
    for (int m = 0; m < 4; m++) mma_bf16(t.c[m & 1], r.a[i][m], x[2 * m], x[2 * m + 1]);
  }
}
// ---- sums over warps of one token: every column of B was the token ----
INK_DEVICE void store_rows(float* partial, const Tile& t, int lane) {  // [row 16] of a warp
  if ((lane & 3) == 0) {
    partial[lane >> 2] = t.c[0][0] + t.c[1][0];
    partial[8 + (lane >> 2)] = t.c[0][2] + t.c[1][2];
  }
}
// The product with a warp's slice of 256 bf16, eight a lane, by way of the warp's `page`.
INK_DEVICE void multiply_slice(const Ready<4>& w, uint4 slice, bf16* page, float* partial,
                               int lane) {
  *(uint4*)(page + lane * 8) = slice;
  __syncwarp();
  Activations<4> act;
  load_tokens_shared<4>(act, page, 0, lane);
  Tile t = zero_tile();
  multiply_ready(t, w, act);
  store_rows(partial, t, lane);
}
// Row lane & 15 of [warp 16][row 16], in the order of `strided_sum`.
INK_DEVICE float row_sum(const float* partial, int lane) {
  float x = 0;
#pragma unroll
  for (int i = 0; i < WARPS / 2; i++) x += partial[i * 32 + lane];
  return x + __shfl_xor_sync(INK_FULL_WARP, x, 16);
}

// ---- vectors ----
// A lane's four elements of the normed stream: z = bf16(s / rms * w) of the unrounded s. A warp has
// the sum of squares of its slice; `sums` of the warps meet in shared memory. All warps.
INK_DEVICE uint2 receive_normed(const float* stream, float* sums, uint2 weight, float eps, int warp,
                                int lane, Patience& patience) {
  const uint4 words = receive16(stream + warp * 128 + lane * 4, patience);
  const float v[4] = {__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                      __uint_as_float(words.w)};
  const float of_warp = tree_sum((__fmul_rn(v[0], v[0]) + __fmul_rn(v[1], v[1])) +
                                 (__fmul_rn(v[2], v[2]) + __fmul_rn(v[3], v[3])));
  if (lane == 0) sums[warp] = of_warp;
  __syncthreads();
  float sum = sums[lane & 15];
#pragma unroll
  for (int o = 1; o < 16; o <<= 1) sum += __shfl_xor_sync(INK_FULL_WARP, sum, o);
  const float r = inverse_rms(sum, 1.f / HIDDEN, eps);
  return make_uint2(pack_bf16(v[0] * r * low_float(weight.x), v[1] * r * high_float(weight.x)),
                    pack_bf16(v[2] * r * low_float(weight.y), v[3] * r * high_float(weight.y)));
}
// Eight elements in lanes 0..7 as four words, twice.
INK_DEVICE void publish_eight(u32* to, float y, int lane) {
  const float low = __shfl_sync(INK_FULL_WARP, y, lane % 4 * 2);
  const float high = __shfl_sync(INK_FULL_WARP, y, lane % 4 * 2 + 1);
  if (lane < SECTOR) publish4(to + lane, pack_bf16(low, high));
}

#endif  // INK_FLINT_LAYERS_VECTORS_CUH
