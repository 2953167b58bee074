// Routed experts of a wide step: gate, up and activation (GATED, DIM_N = 2 WIDTH rows of HIDDEN),
// or down (DIM_N = HIDDEN rows of WIDTH). A pair is (token, rank): token TOP_K + rank. A block
// takes BLOCK_ROWS rows of one expert for one item of `tile_route`: up to BLOCK_TOKENS of the pairs
// that chose it. Items of one expert follow each other, so its weights are read from the device
// once and then from the L2.
//
//   GATED   out[pair] = bf16(silu(g) u) of x[token], nothing rounded in between
//   else    out[pair] = bf16(product scale) of x[pair]
#include "tile.cuh"

constexpr int OUT_ROWS = GATED ? BLOCK_ROWS / 2 : BLOCK_ROWS, OUT_WIDTH = GATED ? DIM_N / 2 : DIM_N;
constexpr int ROW_BLOCKS = (DIM_N + BLOCK_ROWS - 1) / BLOCK_ROWS;
static_assert(OUT_WIDTH % 8 == 0, "16 bytes at a time");

struct Shared {
  union {
    Stage stages[STAGES];
    Staged<OUT_ROWS> out;
  };
  int rows[BLOCK_TOKENS], pairs[BLOCK_TOKENS];
};

// items: [ITEMS] (expert, first, count, 0), count 0 for none; lists: [expert][CHUNK] pairs, of
// which an item takes `count` from `first` on.
extern "C" __global__ void __launch_bounds__(THREADS)
    tile_experts(const bf16* x, const u8* weights, const float* scales, const uint4* items,
                 const int* lists, bf16* out) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, row_block = blockIdx.x % ROW_BLOCKS;
  wait_and_trigger();
  const uint4 item = load_act16(items + blockIdx.x / ROW_BLOCKS);
  const int expert = item.x, first = item.y, count = item.z, tiles = (count + 7) / 8;
  if (count == 0) return;
  const u8* matrix = weights + (size_t)expert * ((DIM_N + 15) / 16) * tile_bytes(DIM_K);
  const Product<DIM_N, DIM_K> product = {matrix, row_block * BLOCK_TILES};
  product.start(sm.stages);
  const float unit = tensor_unit(scales + expert);
  if (tid < BLOCK_TOKENS) {
    const int* list = lists + (size_t)expert * CHUNK + first;
    const int pair = tid < count ? load_act_int(list + tid) : -1;
    sm.pairs[tid] = pair;
    sm.rows[tid] = GATED && pair >= 0 ? pair / TOP_K : pair;
  }
  __syncthreads();
  Sums c;
  product.run(c, sm.stages, x, sm.rows, tiles);
#if GATED
  sm.out.gated<false>(c, unit, tiles);
#else
  sm.out.plain(c, unit, tiles);
#endif
  constexpr int PIECES = OUT_ROWS / 8;
  for (int i = tid; i < count * PIECES; i += THREADS) {
    const int token = i / PIECES, row = row_block * OUT_ROWS + i % PIECES * 8;
    if (row < OUT_WIDTH)
      *(uint4*)(out + (size_t)sm.pairs[token] * OUT_WIDTH + row) = sm.out.piece(token, i % PIECES);
  }
}
