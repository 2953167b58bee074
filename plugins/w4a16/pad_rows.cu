// out [T, PADDED] = x [T, WIDTH] with zeros behind: a block a token. Both are multiples of 8.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(128) pad_rows(const bf16* x, bf16* out) {
  pdl_trigger();
  pdl_wait();
  x += (size_t)blockIdx.x * WIDTH;
  out += (size_t)blockIdx.x * PADDED;
  for (int k = threadIdx.x * 8; k < PADDED; k += 128 * 8)
    *(uint4*)(out + k) = k < WIDTH ? load_act16(x + k) : make_uint4(0, 0, 0, 0);
}
