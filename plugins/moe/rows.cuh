// NUM_ROWS rows of PIECES x 8 values on their way to padded rows in shared memory: all loads, then all
// stores. All threads.
#ifndef INK_MOE_ROWS_CUH
#define INK_MOE_ROWS_CUH
#include "words.cuh"

template <int PIECES, int NUM_ROWS, int THREADS>
struct Rows {
  static constexpr int COUNT = (NUM_ROWS * PIECES + THREADS - 1) / THREADS;
  uint4 piece[COUNT];

  INK_DEVICE void load(const bf16* from, int rows) {
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
      const int i = threadIdx.x + n * THREADS;
      if (i < rows * PIECES) piece[n] = load_act16(from + i * 8);
    }
  }
  // Once nobody is to write to them any more (words.cuh). wanted(row): whether it is waited for;
  // others become zeros.
  template <class Wanted>
  INK_DEVICE void receive(const bf16* from, Wanted wanted, int* error) {
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
      const int i = threadIdx.x + n * THREADS;
      const u32 none = i < NUM_ROWS * PIECES && wanted(i / PIECES) ? EMPTY : 0;
      piece[n] = make_uint4(none, none, none, none);
    }
#pragma unroll 1
    for (u32 spins = 0; spins < INK_SPIN_LIMIT; spins++) {
#pragma unroll
      for (int n = 0; n < COUNT; n++)
        if (has_empty(piece[n])) piece[n] = load_inbox16(from + (threadIdx.x + n * THREADS) * 8);
      bool is_complete = true;
#pragma unroll
      for (int n = 0; n < COUNT; n++) is_complete = is_complete && !has_empty(piece[n]);
      if (is_complete) return;
    }
    report_error(error, ERROR_SENTINEL);
  }
  INK_DEVICE void store(bf16* to, int stride, int rows) const {
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
      const int i = threadIdx.x + n * THREADS;
      if (i < rows * PIECES) *(uint4*)(to + i / PIECES * stride + i % PIECES * 8) = piece[n];
    }
  }
};
#endif  // INK_MOE_ROWS_CUH
