// Routing of a wide step: the experts of each token and their weights (route.cuh), and for each
// expert the list of its pairs (token TOP_K + rank). A warp a token, eight a block. The order of a
// list depends on which warp comes first; no result depends on that order.
#include "route.cuh"

constexpr int WARPS = 8;

// counts: [EXPERTS], zero before; lists: [EXPERTS][CHUNK]; weights: [T][TOP_K].
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    tile_route(const bf16* logits, const int* num_tokens, u32* counts, int* lists, float* weights) {
  const int lane = threadIdx.x & 31, token = blockIdx.x * WARPS + (threadIdx.x >> 5);
  wait_and_trigger();
  if (token >= load_act_int(num_tokens)) return;  // a whole warp
  int expert;
  float weight;
  top_experts<true>(logits + (size_t)token * EXPERTS, lane, expert, weight);
  if (lane < TOP_K) {
    const int pair = token * TOP_K + lane;
    weights[pair] = weight;
    lists[(size_t)expert * CHUNK + atomicAdd(counts + expert, 1u)] = pair;
  }
}
