// y = x W^T for the tokens of a wide step: bf16(product scale) [T, DIM_N], or with GATED
// bf16(silu(g) u) [T, DIM_N / 2] of gate and up rows, each rounded to bf16. A block for each
// BLOCK_ROWS rows and BLOCK_TOKENS tokens, neighbors sharing rows. Rows of y from num_tokens on are
// left as they are.
#include "tile.cuh"

constexpr int OUT_ROWS = GATED ? BLOCK_ROWS / 2 : BLOCK_ROWS, OUT_WIDTH = GATED ? DIM_N / 2 : DIM_N;
static_assert(OUT_WIDTH % 8 == 0, "16 bytes at a time");

struct Shared {
  union {
    Stage stages[STAGES];
    Staged<OUT_ROWS> out;
  };
  int rows[BLOCK_TOKENS];
};

extern "C" __global__ void __launch_bounds__(THREADS)
    tile_linear(const bf16* x, const u8* weights, const float* scale, bf16* y,
                const int* num_tokens) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, row_block = blockIdx.x / TOKEN_BLOCKS;
  const TokenBlock tokens = token_block(blockIdx.x % TOKEN_BLOCKS, num_tokens);
  const Product<DIM_N, DIM_K> product = {weights, row_block * BLOCK_TILES};
  const float unit = begin(product, tokens, sm.stages, sm.rows, scale);
  if (tokens.count <= 0) return;
  Sums c;
  product.run(c, sm.stages, x, sm.rows, tokens.tiles());
#if GATED
  sm.out.gated<true>(c, unit, tokens.tiles());
#else
  sm.out.plain(c, unit, tokens.tiles());
#endif
  constexpr int PIECES = OUT_ROWS / 8;
  for (int i = tid; i < tokens.count * PIECES; i += THREADS) {
    const int token = i / PIECES, row = row_block * OUT_ROWS + i % PIECES * 8;
    if (row < OUT_WIDTH)
      *(uint4*)(y + (size_t)(tokens.first + token) * OUT_WIDTH + row) =
          sm.out.piece(token, i % PIECES);
  }
}
