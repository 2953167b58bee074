// Sums over a warp's lanes for several tokens.
#ifndef INK_MOE_ROUTER_SUMS_CUH
#define INK_MOE_ROUTER_SUMS_CUH
#include "w4a16/w4a16.cuh"

// The 32 / N lanes from 32 / N t on get the sum over lanes of value t of N, a power of two. The
// order is that of `warp_sum`.
template <int N>
INK_DEVICE float lane_sums(float (&v)[N], int lane) {
#pragma unroll
  for (int half = N / 2, o = 16; half; half >>= 1, o >>= 1) {
    const bool upper = lane & o;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      if (i >= half) break;
      const float keep = upper ? v[i + half] : v[i], give = upper ? v[i] : v[i + half];
      v[i] = keep + __shfl_xor_sync(INK_FULL_WARP, give, o);
    }
  }
#pragma unroll
  for (int o = 16 / N; o; o >>= 1) v[0] += __shfl_xor_sync(INK_FULL_WARP, v[0], o);
  return v[0];
}
#endif  // INK_MOE_ROUTER_SUMS_CUH
