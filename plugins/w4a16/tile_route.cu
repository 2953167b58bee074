// Routing of a wide step: the experts of each token and their weights (route.cuh), and for each
// expert the list of its pairs (token TOP_K + rank). One block, a warp a token at a time, so that
// nothing has to be kept from step to step. The order of a list depends on which warp comes first;
// no result depends on that order.
#include "route.cuh"

constexpr int WARPS = 32, THREADS = WARPS * 32;

struct Shared {
  u32 counts[EXPERTS];
};

// counts: [EXPERTS]; lists: [EXPERTS][CHUNK]; weights: [T][TOP_K].
extern "C" __global__ void __launch_bounds__(THREADS)
    tile_route(const bf16* logits, const int* num_tokens, u32* counts, int* lists, float* weights) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (tid < EXPERTS) sm.counts[tid] = 0;
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
  if (tid < EXPERTS) counts[tid] = sm.counts[tid];
}
