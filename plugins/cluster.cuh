// Stores to the shared memory of other blocks of a cluster, which sees them behind the next
// cluster_arrive() and cluster_wait() of device.cuh. Every block must be known to run: such a pair
// comes before the first store too.
#ifndef INK_CLUSTER_CUH
#define INK_CLUSTER_CUH
#include "device.cuh"

// Where `here` of this block stands in block `rank` of the cluster.
INK_DEVICE u32 cluster_address(const void* here, int rank) {
  u32 r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(smem_address(here)), "r"(rank));
  return r;
}
INK_DEVICE void cluster_store(u32 to, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}

#endif  // INK_CLUSTER_CUH
