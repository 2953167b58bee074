// What kernels of a round need of the device beside device.cuh.
#ifndef INK_ROUND_GRAPH_CUH
#define INK_ROUND_GRAPH_CUH
#include "device.cuh"

// Of libcudadevrt.a, as cuda_device_runtime_api.h declares it: NVRTC comes without that header.
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);

// By one thread, once a launch of the graph.
INK_DEVICE void set_conditional(u64 handle, int value) {
  cudaGraphSetConditional(handle, (u32)value);
}
// Who sees the value, on the host too, sees what this thread has written or seen written before.
INK_DEVICE void store_release_system(u64* p, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

#endif  // INK_ROUND_GRAPH_CUH
