// The largest value and the lowest row that has it. NaN is larger than any number, as argmax of the
// reference has it.
#ifndef INK_CHOICE_CUH
#define INK_CHOICE_CUH
#include "device.cuh"

struct Choice {
  float value;
  int row;
};
INK_DEVICE Choice least_choice(int row) {
  return {__uint_as_float(0xFF800000u), row};  // -infinity
}
INK_DEVICE void keep_better(Choice& best, float value, int row) {
  const bool wins = value != value ? best.value == best.value || row < best.row
                                   : value > best.value || (value == best.value && row < best.row);
  if (wins) best = {value, row};
}
// Over the lanes of a warp whose numbers are equal modulo FIRST.
template <int FIRST>
INK_DEVICE void keep_best_of_warp(Choice& best) {
#pragma unroll
  for (int o = FIRST; o < 32; o <<= 1) {
    const float value = __shfl_xor_sync(INK_FULL_WARP, best.value, o);
    keep_better(best, value, __shfl_xor_sync(INK_FULL_WARP, best.row, o));
  }
}

// The best of `count` candidates, for every thread of a block of WARPS warps.
template <int WARPS>
struct BestOf {
  float value[WARPS];
  int row[WARPS];

  INK_DEVICE Choice run(const float* values, const int* rows, int count) {
    const int tid = threadIdx.x;
    Choice best = least_choice(0x7FFFFFFF);
    for (int i = tid; i < count; i += WARPS * 32)
      keep_better(best, load_act_float(values + i), load_act_int(rows + i));
    keep_best_of_warp<1>(best);
    if ((tid & 31) == 0) value[tid >> 5] = best.value, row[tid >> 5] = best.row;
    __syncthreads();
#pragma unroll
    for (int q = 0; q < WARPS; q++) keep_better(best, value[q], row[q]);
    return best;
  }
};

#endif  // INK_CHOICE_CUH
