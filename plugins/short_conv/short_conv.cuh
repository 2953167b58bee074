// Short causal convolutions of four taps, four channels a thread, and the ring of their inputs.
//
// The inputs of a row are the rows before it in the step and, in front of those, the ring's. Where
// T + 3 <= RING, a step's rows take none of the places of the three positions before it. Nothing
// else in a step writes them, so they may be read before the wait, and rows may be stored while
// others still convolve (RING_IS_WIDE). Else a kernel of its own stores them, ring_write.cu.
#ifndef INK_SHORT_CONV_CUH
#define INK_SHORT_CONV_CUH
#include "vector.cuh"

namespace short_conv {

constexpr int TAPS = 4, PAST = TAPS - 1;

// Inputs of a step, written by the host between steps and by the kernel that ends one: constant
// within a step, so they are read before the wait.
struct Step {
  int position, num_tokens, slot;
};
INK_DEVICE Step load_step(const int* position, const int* num_tokens, const int* slot) {
  return Step{load_act_int(position), load_act_int(num_tokens), load_act_int(slot)};
}

// What never changes, asked for in front of the kernel's wait. The compiler may move loads through
// the non-coherent path behind it; these stay.
INK_DEVICE uint2 load_early8(const void* p) {
  return load_act8(p);
}
INK_DEVICE uint4 load_early16(const void* p) {
  return load_act16(p);
}

// Element of a ring [slots][PLACES][COLUMNS] where the channel of a position stands.
template <int PLACES, int COLUMNS>
INK_DEVICE size_t ring_at(const Step& step, int position, int channel) {
  return ((size_t)step.slot * PLACES + position % PLACES) * COLUMNS + channel;
}

// The inputs of `row` that are older than the step: x[i] of position row - 3 + i.
template <int PLACES, int COLUMNS>
INK_DEVICE void load_past(uint2 (&x)[PAST], const bf16* ring, const Step& step, int row,
                          int channel) {
#pragma unroll
  for (int i = 0; i < PAST; i++) {
    const int older = row - PAST + i, p = step.position + older;
    x[i] = make_uint2(0, 0);
    if (older < 0 && p >= 0) x[i] = load_act8(ring + ring_at<PLACES, COLUMNS>(step, p, channel));
  }
}
// All inputs of a row, the oldest first. `source.load(row, channel)` gives those of the step. They
// are loaded whether or not they are wanted, into registers of their own: in those of `past` they
// would wait for what is on its way there.
template <class Source>
INK_DEVICE void load_inputs(Four (&x)[TAPS], const uint2 (&past)[PAST], const Source& source,
                            int row, int channel) {
  uint2 bits[TAPS];
#pragma unroll
  for (int i = 0; i < TAPS; i++) bits[i] = source.load(max(row - PAST + i, 0), channel);
#pragma unroll
  for (int i = 0; i < TAPS; i++)
    x[i] = four_of(i == PAST || row - PAST + i >= 0 ? bits[i] : past[i < PAST ? i : 0]);
}

// Rows [T][COLUMNS] in bf16.
template <int COLUMNS>
struct Rows {
  const bf16* rows;
  INK_DEVICE uint2 load(int row, int channel) const {
    return load_act8(rows + (size_t)row * COLUMNS + channel);
  }
};

// Static taps, float32 [channel][4], the current token last.
struct Taps {
  uint4 w[4];  // of a channel
  template <bool STAYS = true>  // in front of the wait
  INK_DEVICE void load(const float* weight, int channel) {
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const float* const from = weight + (size_t)(channel + c) * TAPS;
      w[c] = STAYS ? load_early16(from) : load_weight16(from);
    }
  }
};
// (sum_j w_j x_j + x) / sqrt(5), or without the quotient; fused in the order of j, not rounded.
template <bool IS_SCALED>
INK_DEVICE Four convolve(const Four (&x)[TAPS], const Taps& taps) {
  Four y;
#pragma unroll
  for (int c = 0; c < 4; c++) {
    const Four w = four_of(taps.w[c]);
    float sum = __fmul_rn(w.v[0], x[0].v[c]);
#pragma unroll
    for (int j = 1; j < TAPS; j++) sum = fmaf(w.v[j], x[j].v[c], sum);
    sum = __fadd_rn(sum, x[PAST].v[c]);
    y.v[c] = IS_SCALED ? sum / 2.23606797749979f : sum;
  }
  return y;
}

// Taps of a token: bf16 [4][COLUMNS] by channel plus bf16 [4] of the token and head; lag 0, the
// current token, first. (sum_lag (w_lag + d_lag) x_lag + x) / 3, not rounded.
struct DynamicTaps {
  uint2 w[TAPS];
  template <int COLUMNS>
  INK_DEVICE void load(const bf16* weight, int channel) {
#pragma unroll
    for (int lag = 0; lag < TAPS; lag++) w[lag] = load_early8(weight + lag * COLUMNS + channel);
  }
};
INK_DEVICE Four convolve(const Four (&x)[TAPS], const DynamicTaps& taps, const Four& own) {
  Four y;
#pragma unroll
  for (int c = 0; c < 4; c++) {
    float sum = 0.f;
#pragma unroll
    for (int lag = 0; lag < TAPS; lag++) {
      const float w = __fadd_rn(four_of(taps.w[lag]).v[c], own.v[lag]);
      const float product = __fmul_rn(w, x[PAST - lag].v[c]);
      sum = lag ? __fadd_rn(sum, product) : product;
    }
    y.v[c] = __fadd_rn(sum, x[PAST].v[c]) / 3.f;
  }
  return y;
}

}  // namespace short_conv

#endif  // INK_SHORT_CONV_CUH
