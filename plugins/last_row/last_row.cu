// out = row num_tokens - 1 of x [T, HIDDEN]: one block of 256 threads.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(256)
    last_row(const bf16* x, const int* num_tokens, bf16* out) {
  pdl_trigger();
  pdl_wait();
  const bf16* row = x + (size_t)(load_act_int(num_tokens) - 1) * HIDDEN;
  for (int i = threadIdx.x * 8; i < HIDDEN; i += 256 * 8) *(uint4*)(out + i) = load_act16(row + i);
}
