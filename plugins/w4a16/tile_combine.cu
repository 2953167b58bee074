// The shared expert's down-projection of a wide step, and the sum of everything:
//   out = bf16(bf16(sum over ranks of w y) + bf16(product scale))
// y[pair] is what `tile_experts` gave, w[pair] the pair's routing weight. Rows of out from
// num_tokens on are left as they are.
#include "tile.cuh"

static_assert(DIM_N % 8 == 0, "16 bytes at a time");

struct Shared {
  union {
    Stage stages[STAGES];
    Staged<BLOCK_ROWS> out;
  };
  int rows[BLOCK_TOKENS];
};

extern "C" __global__ void __launch_bounds__(THREADS)
    tile_combine(const bf16* x, const u8* weights, const float* scale, const bf16* y,
                 const float* pair_weights, bf16* out, const int* num_tokens) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, row_block = blockIdx.x / TOKEN_BLOCKS;
  const TokenBlock tokens = token_block(blockIdx.x % TOKEN_BLOCKS, num_tokens);
  const Product<DIM_N, DIM_K> product = {weights, row_block * BLOCK_TILES};
  const float unit = begin(product, tokens, sm.stages, sm.rows, scale);
  if (tokens.count <= 0) return;
  Sums c;
  product.run(c, sm.stages, x, sm.rows, tokens.tiles());
  sm.out.plain(c, unit, tokens.tiles());
  constexpr int PIECES = BLOCK_ROWS / 8;
  for (int i = tid; i < tokens.count * PIECES; i += THREADS) {
    const int token = tokens.first + i / PIECES, row = row_block * BLOCK_ROWS + i % PIECES * 8;
    if (row >= DIM_N) continue;
    float routed[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < TOP_K; k++) {
      const size_t pair = (size_t)token * TOP_K + k;
      const float w = load_act_float(pair_weights + pair);
      const uint4 v = load_act16(y + pair * DIM_N + row);
      const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        routed[2 * j] = fmaf(w, low_float(words[j]), routed[2 * j]);  // the product is exact
        routed[2 * j + 1] = fmaf(w, high_float(words[j]), routed[2 * j + 1]);
      }
    }
    const uint4 v = sm.out.piece(i / PIECES, i % PIECES);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    u32 sum[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      sum[j] = pack_bf16(round_bf16(routed[2 * j]) + low_float(words[j]),
                         round_bf16(routed[2 * j + 1]) + high_float(words[j]));
    *(uint4*)(out + (size_t)token * DIM_N + row) = make_uint4(sum[0], sum[1], sum[2], sum[3]);
  }
}
