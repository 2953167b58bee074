// short_conv: a thread has four channels of a row. Rows from num_tokens on are left as they are.
#include "short_conv.cuh"

using namespace short_conv;

extern "C" __global__ void __launch_bounds__(128)
    short_conv_rows(const bf16* x, const float* weight, bf16* ring, const int* position,
                    const int* num_tokens, const int* slot, bf16* out, int num_rows) {
  pdl_trigger();
  const int i = blockIdx.x * 128 + threadIdx.x;
  const int row = i / (CHANNELS / 4), channel = i % (CHANNELS / 4) * 4;
  const bool is_live = row < num_rows;
  Step step = load_step(position, num_tokens, slot);
  if (!REMEMBERS) step.num_tokens = num_rows;
  Taps taps;
  uint2 past[PAST];
  if (is_live) taps.load(weight, channel);
  if (is_live && RING_IS_WIDE) load_past<RING, CHANNELS>(past, ring, step, row, channel);
  pdl_wait();
  if (!is_live || row >= step.num_tokens) return;
  if (!RING_IS_WIDE) load_past<RING, CHANNELS>(past, ring, step, row, channel);
  Four inputs[TAPS];
  load_inputs(inputs, past, Rows<CHANNELS>{x}, row, channel);
  store_four<false>(out, (size_t)row * CHANNELS + channel, convolve<SCALED>(inputs, taps));
  if (RING_IS_WIDE && REMEMBERS)
    store_four<false>(ring, ring_at<RING, CHANNELS>(step, step.position + row, channel),
                      inputs[PAST]);
}
