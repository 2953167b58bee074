// The choice of experts in layers.cu, and the requests of their weights.
#ifndef INK_FLINT_LAYERS_CHOOSE_CUH
#define INK_FLINT_LAYERS_CHOOSE_CUH
#include "memory.cuh"
#include "vectors.cuh"
#include "w4a16/route.cuh"

// Warp CHOICE_WARP + d requests gate/up tile d, DOWN_WARP the down tiles; WEIGHT_WARP has the
// weights.
constexpr int CHOICE_WARP = 2, DOWN_WARP = CHOICE_WARP + EXPERT_SLOTS, WEIGHT_WARP = DOWN_WARP + 1;
static_assert(WEIGHT_WARP < FIRST_WARP, "these warps request nothing else");

constexpr int CHOSEN_BARRIER = 7, LOGITS_BARRIER = 8;  // after those of attend.cuh
INK_DEVICE void chosen_arrive() {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"n"(CHOSEN_BARRIER), "n"(THREADS) : "memory");
}
INK_DEVICE void chosen_wait() { named_barrier(CHOSEN_BARRIER, THREADS); }

// All warps. Those named above choose, each for itself, from logits that the first of them polls.
template <class Mark>
INK_DEVICE void choose_experts(Shared& sm, const Layer& layer, const Slot& words, u32 parity,
                               int warp, int lane, Patience& patience, Mark mark) {
  const int b = blockIdx.x;
  if (warp < CHOICE_WARP || warp > WEIGHT_WARP) return;
  constexpr int BLOCKS_OF_LANE = OWNERS / 32;
  uint2 logits[BLOCKS_OF_LANE];
  if (warp == CHOICE_WARP)
    for (u32 spins = 0;; spins++) {
      bool is_missing = false;
#pragma unroll
      for (int j = 0; j < BLOCKS_OF_LANE; j++) {
        const int from = lane + 32 * j;
        logits[j] = make_uint2(0, 0);
        if (from * ROUTER_ROWS < EXPERTS) logits[j] = poll8(words.logits[b % LOGIT_COPIES][from]);
        is_missing |= logits[j].x == EMPTY || (ROUTER_ROWS > 1 && logits[j].y == EMPTY);
      }
      if (!__any_sync(INK_FULL_WARP, is_missing) || patience.is_over(spins)) break;
    }
  __syncwarp();
  if (warp == CHOICE_WARP)
#pragma unroll
    for (int j = 0; j < BLOCKS_OF_LANE; j++) sm.all_logits[lane + 32 * j] = logits[j];
  named_barrier(LOGITS_BARRIER, 32 * (WEIGHT_WARP - CHOICE_WARP + 1));
  if (warp > CHOICE_WARP)
#pragma unroll
    for (int j = 0; j < BLOCKS_OF_LANE; j++) logits[j] = sm.all_logits[lane + 32 * j];
  if (warp == CHOICE_WARP) mark(8);
  Keys keys;
#pragma unroll
  for (int j = 0; j < BLOCKS_OF_LANE; j++) {
    const int first = (lane + 32 * j) * ROUTER_ROWS;
    keys.key[2 * j] = first < EXPERTS ? key_of(logits[j].x, first) : 0;
    keys.key[2 * j + 1] =
        ROUTER_ROWS > 1 && first + 1 < EXPERTS ? key_of(logits[j].y, first + 1) : 0;
  }
  const int d = warp - CHOICE_WARP, tile = (d * OWNERS + b) % EXPERT_TILES;
  const int last = d < EXPERT_SLOTS ? (d * OWNERS + b) / EXPERT_TILES : TOP_K - 1;
  u32 mine = 0, best = 0;
#pragma unroll 1
  for (int k = 0; k <= last; k++) {
    best = take_largest(keys);
    if (lane == k) mine = best;
  }
  if (d < EXPERT_SLOTS) {
    if (lane < 2) {  // halves of K, each for the warps that multiply it as soon as it is here
      constexpr int BYTES = TILE_BYTES / 2;
      const int expert = expert_of(best);
      mbar_expect(&sm.bar_gate_up[d][lane], BYTES);
      bulk_load_once(
          sm.gate_up + d * TILE_BYTES + lane * BYTES,
          layer.at[GATE_UP] + ((size_t)expert * EXPERT_TILES + tile) * TILE_BYTES + lane * BYTES,
          BYTES, &sm.bar_gate_up[d][lane]);
    }
    chosen_arrive();
  } else if (warp == DOWN_WARP) {
    chosen_arrive();
    if (lane == 0) mbar_expect(&sm.bar_down, TOP_K * JOB_BYTES);
    // Until the gate/up tiles are here the bandwidth is theirs.
    wait(&sm.bar_gate_up[0][0], parity, patience);
    __syncwarp();
    if (lane < TOP_K)
      bulk_load_once(sm.down + lane * JOB_BYTES,
                     layer.at[DOWN] + ((size_t)expert_of(mine) * OWNERS + b) * JOB_BYTES, JOB_BYTES,
                     &sm.bar_down);
  } else {
    chosen_arrive();
    const float weight = routing_weight(mine, lane);
    if (lane < TOP_K) {
      sm.routing_weight[lane] = weight;
      sm.gate_up_unit[lane] = sm.gate_up_scale[expert_of(mine)] * UNIT;
      sm.down_unit[lane] = sm.down_scale[expert_of(mine)] * UNIT;
    }
  }
  __syncwarp();
  if (warp == CHOICE_WARP) mark(9);
}

#endif  // INK_FLINT_LAYERS_CHOOSE_CUH
