// A launch that does nothing but depend on the one before, of as many blocks and threads as one
// token's `allreduce_conv_mix`, which stands between two layers' experts.
#include "device.cuh"

extern "C" __global__ void spacer(float* out) {
  pdl_trigger();
  pdl_wait();
  if (threadIdx.x == 0) *(volatile float*)(out + blockIdx.x) = 0;
}
