// Routed experts of a wide step: gate, up and activation (GATED, DIM_N = 2 WIDTH rows of HIDDEN),
// or down (DIM_N = HIDDEN rows of WIDTH). A pair is (token, rank): token TOP_K + rank. A block
// takes BLOCK_ROWS rows of one expert and all pairs that `tile_route` has put on its list,
// BLOCK_TOKENS after the other; the expert's weights are read from the device once and then from
// the L2. In a step whose pairs leave few experts without any, the first weights are requested
// before that is known.
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

// lists: [expert][CHUNK] pairs, of which counts[expert] are there.
extern "C" __global__ void __launch_bounds__(THREADS)
    tile_experts(const bf16* x, const u8* weights, const float* scales, const u32* counts,
                 const int* lists, bf16* out, const int* num_tokens) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x;
  const int expert = blockIdx.x / ROW_BLOCKS, row_block = blockIdx.x % ROW_BLOCKS;
  const u8* matrix = weights + (size_t)expert * ((DIM_N + 15) / 16) * tile_bytes(DIM_K);
  const Product<DIM_N, DIM_K> product = {matrix, row_block * BLOCK_TILES};
  const float unit = tensor_unit(scales + expert);
  const bool is_early = load_act_int(num_tokens) * TOP_K >= 4 * EXPERTS;
  if (is_early) product.start(sm.stages);
  wait_and_trigger();
  const int count = (int)load_act4(counts + expert);
  if (count == 0 && is_early) copy_async_wait();
#pragma unroll 1
  for (int first = 0; first < count; first += BLOCK_TOKENS) {
    const int here = min(count - first, BLOCK_TOKENS), tiles = (here + 7) / 8;
    if (first > 0 || !is_early) product.start(sm.stages);
    if (tid < BLOCK_TOKENS) {
      int pair = -1;
      if (tid < here) {
        // Within bounds whatever stands there.
        const u32 listed = load_act4(lists + (size_t)expert * CHUNK + first + tid);
        pair = min(listed, CHUNK * TOP_K - 1u);
      }
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
    for (int i = tid; i < here * PIECES; i += THREADS) {
      const int token = i / PIECES, row = row_block * OUT_ROWS + i % PIECES * 8;
      if (row < OUT_WIDTH)
        *(uint4*)(out + (size_t)sm.pairs[token] * OUT_WIDTH + row) =
            sm.out.piece(token, i % PIECES);
    }
    __syncthreads();  // before the next copies go where `out` is
  }
}
