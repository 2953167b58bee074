// Routing of a wide step: the experts of each token and their weights (route.cuh), for each expert
// the list of its pairs (token TOP_K + rank), and the lists' parts of up to ITEM_PAIRS as items, of
// which a block of `tile_experts` takes one: so a list that is long does not make one block slow.
// One block, a warp a token at a time, so that nothing has to be kept from step to step. The order
// within a list and of the experts among the items depends on which warp comes first; no result
// does.
#include "route.cuh"

constexpr int WARPS = 32, THREADS = WARPS * 32;

struct Shared {
  u32 counts[EXPERTS];
  u32 num_items;
};

// items: [ITEMS] (expert, first, count, 0), all that can be; lists: [EXPERTS][CHUNK];
// weights: [T][TOP_K].
extern "C" __global__ void __launch_bounds__(THREADS)
    tile_route(const bf16* logits, const int* num_tokens, uint4* items, int* lists,
               float* weights) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (tid < EXPERTS) sm.counts[tid] = 0;
  if (tid == 0) sm.num_items = 0;
  __syncthreads();
  const int T = load_act_int(num_tokens);
  wait_and_trigger();
#pragma unroll 2
  for (int token = warp; token < T; token += WARPS) {
    int expert;
    float weight;
    top_experts(logits + (size_t)token * EXPERTS, lane, expert, weight);
    if (lane < TOP_K) {
      const int pair = token * TOP_K + lane;
      weights[pair] = weight;
      lists[(size_t)expert * CHUNK + atomicAdd(&sm.counts[expert], 1u)] = pair;
    }
  }
  __syncthreads();
  if (tid < EXPERTS && sm.counts[tid] > 0) {
    const u32 count = sm.counts[tid];
    uint4* to = items + atomicAdd(&sm.num_items, (count + ITEM_PAIRS - 1) / ITEM_PAIRS);
    for (u32 first = 0; first < count; first += ITEM_PAIRS)
      *to++ = make_uint4(tid, first, min(count - first, (u32)ITEM_PAIRS), 0);
  }
  __syncthreads();
  for (int i = sm.num_items + tid; i < ITEMS; i += THREADS) items[i] = make_uint4(0, 0, 0, 0);
}
