// Sums over a warp's lanes for eight tokens.
#ifndef INK_MOE_ROUTER_SUMS_CUH
#define INK_MOE_ROUTER_SUMS_CUH
#include "w4a16/w4a16.cuh"

// Lane 4 t .. 4 t + 3 gets the sum over lanes of value t of eight. The order is that of `warp_sum`.
INK_DEVICE float lane_sums(float (&v)[MAX_TOKENS], int lane) {
#pragma unroll
  for (int half = 4, o = 16; half; half >>= 1, o >>= 1) {
    const bool upper = lane & o;
#pragma unroll
    for (int i = 0; i < MAX_TOKENS / 2; i++) {
      if (i >= half) break;
      const float keep = upper ? v[i + half] : v[i], give = upper ? v[i] : v[i + half];
      v[i] = keep + __shfl_xor_sync(INK_FULL_WARP, give, o);
    }
  }
  v[0] += __shfl_xor_sync(INK_FULL_WARP, v[0], 2);
  return v[0] + __shfl_xor_sync(INK_FULL_WARP, v[0], 1);
}
#endif  // INK_MOE_ROUTER_SUMS_CUH
