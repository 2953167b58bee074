// PTX of a kernel whose instructions behind its wait count one by one.
#ifndef INK_LATENCY_CUH
#define INK_LATENCY_CUH
#include "device.cuh"

// The address, worked out here and not where it is used.
template <class T>
INK_DEVICE const T* worked_out(const T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// The values, which nothing uses before this place.
INK_DEVICE void used_from_here(u32 (&x)[4]) {
  asm volatile("" : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])::"memory");
}

// A barrier of a cluster that says only that its blocks run and how far they are: unlike `cluster_arrive` it orders no
// memory, which on sm_90 is a MEMBAR.GPU behind everything that the thread has stored. Whole warps arrive and wait.
INK_DEVICE void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
INK_DEVICE void cluster_wait_aligned() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

#endif
