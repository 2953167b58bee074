// Choice of a wide step: the experts of each token and their weights (route.cuh), a warp a token.
// `tile_route` makes the experts' lists of it. Rows from num_tokens on are left as they are.
#include "route.cuh"

constexpr int WARPS = 4, THREADS = WARPS * 32;

// chosen, weights: [T][TOP_K].
extern "C" __global__ void __launch_bounds__(THREADS)
    tile_choose(const bf16* logits, const int* num_tokens, int* chosen, float* weights) {
  const int lane = threadIdx.x & 31, token = blockIdx.x * WARPS + (threadIdx.x >> 5);
  wait_and_trigger();
  if (token >= load_act_int(num_tokens)) return;
  const u32 key = top_key(load_logits(logits + (size_t)token * EXPERTS, lane), lane);
  const float weight = routing_weight(key, lane);
  if (lane < TOP_K) {
    chosen[token * TOP_K + lane] = expert_of(key);
    weights[token * TOP_K + lane] = weight;
  }
}
