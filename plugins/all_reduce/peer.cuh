// Accesses to memory that another GPU reads or writes.
#ifndef INK_PEER_CUH
#define INK_PEER_CUH
#include "device.cuh"

// Of a word that nobody has written yet, as a float and as two bf16 values: no arithmetic yields it.
constexpr u32 EMPTY = 0xFFFFFFFFu;

INK_DEVICE uint4 load_inbox16(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
INK_DEVICE void store_inbox16(void* p, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
INK_DEVICE void store_inbox4(void* p, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// What this thread stores later is seen by no GPU before this.
INK_DEVICE void store_error(int* p, int code) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;\n\tfence.acq_rel.sys;" ::"l"(p), "r"(code)
               : "memory");
}

// Nanoseconds modulo 2^32, 4.3 s, of a clock that all multiprocessors share.
INK_DEVICE u32 clock_ns() {
  u32 now;
  asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(now)::"memory");
  return now;
}

#endif  // INK_PEER_CUH
