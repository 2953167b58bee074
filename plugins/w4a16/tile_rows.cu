// y = x W^T for the tokens of a wide step, of any number of rows: [T, DIM_N], float32 with
// FLOAT_RESULT, else bf16. Where tile_linear.cu cannot write 16 bytes at a time, or a kernel before
// has made the matrix (IS_MADE), but for its scale (SCALED). Rows of y from num_tokens on are left
// as they are.
#include "tile.cuh"

struct Shared {
  Stage stages[STAGES];
  int rows[BLOCK_TOKENS];
};

#if FLOAT_RESULT
typedef float Result;
INK_DEVICE Result result_of(float y) { return y; }
#else
typedef bf16 Result;
INK_DEVICE Result result_of(float y) { return to_bf16(y); }
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    tile_rows(const bf16* x, const u8* weights, const float* scale, Result* y,
              const int* num_tokens) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const float unit = SCALED ? load_weight_float(scale) : 1.f;
  if (IS_MADE) pdl_wait();
  const int row_block = blockIdx.x / TOKEN_BLOCKS;
  const TokenBlock tokens = token_block(blockIdx.x % TOKEN_BLOCKS, num_tokens);
  const Product<DIM_N, DIM_K> product = {weights, row_block * BLOCK_TILES};
  begin(product, tokens, sm.stages, sm.rows, nullptr);
  if (tokens.count <= 0) return;
  Sums c;
  product.run(c, sm.stages, x, sm.rows, tokens.tiles());
#pragma unroll
  for (int r = 0; r < WARP_TILES; r++)
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int token = n * 8 + (lane & 3) * 2 + i % 2;
        const int row = (product.first_tile + warp * WARP_TILES + r) * 16 + (lane >> 2) + i / 2 * 8;
        if (token < tokens.count && row < DIM_N)
          y[(size_t)(tokens.first + token) * DIM_N + row] = result_of(c[r][n][i] * unit);
      }
}
