// How the blocks of one launch hand vectors to each other: every word of a slot is written once and
// is its own flag.
//
// A slot is one layer's exchange. Its words are EMPTY before they are written, a bit pattern that
// no arithmetic yields (the NaN of the hardware is 0x7FFFFFFF, of two bf16 0x7FFF7FFF). A reader
// polls the very words it needs, so there is no flag, fence or counter, and no second round trip.
// Slots are emptied before they are used again, see memory.cuh.
#ifndef INK_EXCHANGE_CUH
#define INK_EXCHANGE_CUH
#include "device.cuh"

// TRACE events a layer: block b's warps write the clock at event e to trace[layer][b][e].
#ifndef TRACE
#define TRACE 0
#endif
#if TRACE
#define MARK(event) \
  if (lane == 0 && warp == 0) patience.trace[event] = clock64()
#else
#define MARK(event)
#endif

constexpr u32 EMPTY = 0xFFFFFFFFu;

INK_DEVICE uint4 poll16(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
INK_DEVICE uint2 poll8(const void* p) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(p)
               : "memory");
  return v;
}
INK_DEVICE void publish4(void* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
INK_DEVICE void empty16(void* p) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%1,%1,%1};" ::"l"(p), "r"(EMPTY) : "memory");
}
INK_DEVICE bool has_empty(uint4 v) { return max(max(v.x, v.y), max(v.z, v.w)) == EMPTY; }
INK_DEVICE bool has_empty(uint2 v) { return max(v.x, v.y) == EMPTY; }

// Bounds every wait of a warp, whose lanes wait together; after the first that gives up, it waits
// no more.
struct Patience {
  int* error;
  u32 limit = INK_SPIN_LIMIT;
#if TRACE
  long long* trace;  // of this block and layer
#endif
  INK_DEVICE bool is_over(u32 spins, int code = ERROR_SENTINEL) {
    if (spins < limit) return false;
    if (limit) report_error(error, code);
    limit = 0;
    return true;
  }
};

// As mbar_wait.
INK_DEVICE void wait(u64* bar, u32 parity, Patience& patience) {
#pragma unroll 1
  for (u32 spins = 0; !mbar_test(bar, parity) && !patience.is_over(spins, ERROR_MBARRIER);
       spins++) {
  }
  patience.limit = __reduce_min_sync(INK_FULL_WARP, patience.limit);  // lanes give up together
}

// The words of each lane of a warp.
template <class WORDS, WORDS (*POLL)(const void*)>
INK_DEVICE WORDS receive(const void* words, Patience& patience) {
  WORDS v;
  for (u32 spins = 0;; spins++) {
    v = POLL(words);
    if (!__any_sync(INK_FULL_WARP, has_empty(v)) || patience.is_over(spins)) break;
  }
  __syncwarp();
  return v;
}
INK_DEVICE uint4 receive16(const void* words, Patience& patience) {
  return receive<uint4, poll16>(words, patience);
}
INK_DEVICE uint2 receive8(const void* words, Patience& patience) {
  return receive<uint2, poll8>(words, patience);
}

#endif  // INK_EXCHANGE_CUH
