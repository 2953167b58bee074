// The last rows of a step into the ring of a convolution's inputs, for steps that may take the
// places of the positions before them: all rows have been convolved when this runs. A thread has
// four channels of a place.
#include "short_conv.cuh"

extern "C" __global__ void __launch_bounds__(128)
    ring_write(const bf16* x, bf16* ring, const int* position, const int* num_tokens,
               const int* slot) {
  pdl_trigger();
  const short_conv::Step step = short_conv::load_step(position, num_tokens, slot);
  pdl_wait();
  const int i = blockIdx.x * 128 + threadIdx.x, channel = i % (CHANNELS / 4) * 4;
  const int row = max(step.num_tokens - RING, 0) + i / (CHANNELS / 4);
  if (i >= RING * (CHANNELS / 4) || row >= step.num_tokens) return;
  const size_t to = short_conv::ring_at<RING, CHANNELS>(step, step.position + row, channel);
  *(uint2*)(ring + to) = load_act8(x + (size_t)row * CHANNELS + channel);
}
