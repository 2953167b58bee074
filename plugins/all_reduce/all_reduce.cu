// out = OUT(sum over ranks of x), float32 x of NUM_TOKENS rows of WIDTH values: each thread sends
// its quads of values to all ranks, then waits for those of the others. Every rank adds in rank
// order, so all hold the same bits. IS_WIDE: of the rows only num_tokens are there.
#include "all_reduce/lamport.cuh"

constexpr u32 ROW_QUADS = WIDTH / 4;

extern "C" __global__ void __launch_bounds__(THREADS)
    all_reduce(const float* x, void* out, const Peers* peers, const int* num_tokens, int* error) {
  Exchange exchange(peers, error);
  const u32 first = blockIdx.x * THREADS + threadIdx.x, count = gridDim.x * THREADS;
  pdl_trigger();
  pdl_wait();
  exchange.begin();
  const u32 rows = IS_WIDE ? min(load_act_int(num_tokens), NUM_TOKENS) : NUM_TOKENS;
  const u32 quads = rows * ROW_QUADS;
  uint4 v = make_uint4(0, 0, 0, 0);
  if (first < quads) v = load_act16(x + first * 4);
  exchange.ready();
  for (u32 q = first; q < quads; q += count)
    exchange.send16(q * 16, q == first ? v : load_act16(x + q * 4));
  exchange.clear(first, count);
  __syncthreads();
  exchange.end(quads * 16, gridDim.x, THREADS);
  for (u32 q = first; q < quads; q += count) {
    uint4 parts[RANKS];
    exchange.receive16(q * 16, load_act16(x + q * 4), parts);
    const float4 sum = sum_of_ranks(parts);
#if OUT_BF16
    ((uint2*)out)[q] = make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
#else
    ((float4*)out)[q] = sum;
#endif
  }
}
