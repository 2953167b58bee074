// Lists of a wide step: for each expert its pairs (token TOP_K + rank), and the lists' parts of up
// to ITEM_PAIRS as items, of which a block of `tile_experts` takes one: so a list that is long does
// not make one block slow. One block, so that nothing has to be kept from step to step. The order
// within a list and of the experts among the items depends on which warp comes first; no result
// does.
#include "w4a16.cuh"

constexpr int THREADS = 1024;
static_assert(EXPERTS <= THREADS, "a thread for each expert");

struct Shared {
  u32 counts[EXPERTS];
  u32 num_items;
};

// chosen: [T][TOP_K]; items: [ITEMS] (expert, first, count, 0), all that can be; lists:
// [EXPERTS][CHUNK].
extern "C" __global__ void __launch_bounds__(THREADS)
    tile_route(const int* chosen, const int* num_tokens, uint4* items, int* lists) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x;
  if (tid < EXPERTS) sm.counts[tid] = 0;
  if (tid == 0) sm.num_items = 0;
  __syncthreads();
  const int num_pairs = load_act_int(num_tokens) * TOP_K;
  wait_and_trigger();
  for (int pair = tid; pair < num_pairs; pair += THREADS) {
    const int expert = load_act_int(chosen + pair);
    lists[(size_t)expert * CHUNK + atomicAdd(&sm.counts[expert], 1u)] = pair;
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
