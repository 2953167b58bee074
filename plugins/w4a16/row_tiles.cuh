// What ring_linear.cu and ring_quant.cu share: several matrices of one width as one list of row
// tiles, zeros padding K to whole chunks, and rows of their inputs as operands of a warp's vectors.
//
// Macros: MATRICES, ROWS (of each), INPUT_OF (the x of each), DIM_K (K before padding, x8),
// NUM_WARPS (divides the vectors).
#ifndef INK_ROW_TILES_CUH
#define INK_ROW_TILES_CUH
#include "w4a16.cuh"

constexpr int VECTORS = (DIM_K + 255) / 256 * CHUNK_VECTORS, NV = VECTORS / NUM_WARPS;
static_assert(VECTORS % NUM_WARPS == 0 && DIM_K % 8 == 0, "whole shares, 16 bytes of x");

// The number `i` of a list; no array, which would be looked up in memory.
__device__ constexpr int pick(int) { return 0; }
template <class... REST>
__device__ constexpr int pick(int i, int first, REST... rest) {
  return i == 0 ? first : pick(i - 1, rest...);
}
__device__ constexpr int rows_of(int matrix) { return pick(matrix, ROWS); }
__device__ constexpr int input_of(int matrix) { return pick(matrix, INPUT_OF); }
__device__ constexpr int first_tile(int matrix) {
  int tile = 0;
  for (int m = 0; m < matrix; m++) tile += (rows_of(m) + 15) / 16;
  return tile;
}
constexpr int NUM_TILES = first_tile(MATRICES);

// B operands of the warp's vectors; zeros for rows at T and above, and behind the width.
INK_DEVICE void load_rows(Activations<NV>& b, const bf16* x, int first, int lane, int T) {
  const int g = lane >> 2;
#if DIM_K % 256 == 0
  load_tokens<NV>(b, g < T ? x + (size_t)g * DIM_K : nullptr, first, lane);
#else
#pragma unroll
  for (int i = 0; i < NV; i++) {
    const int k = (first + i) * VECTOR_K + (lane & 3) * 16;
    const bf16* p = x + (size_t)g * DIM_K + k;
    b.v[i].lo = g < T && k < DIM_K ? load_act16(p) : make_uint4(0, 0, 0, 0);
    b.v[i].hi = g < T && k + 8 < DIM_K ? load_act16(p + 8) : make_uint4(0, 0, 0, 0);
  }
#endif
}
#endif  // INK_ROW_TILES_CUH
