// In front of a kernel's source for perf/stamps.py: every block stamps when it starts, when its
// wait is over, when it releases dependents, and when it ends. The address of a launch's stamps is
// one more parameter of the kernel, INK_STAMPS_PARAM in PTX, which a thread reads from the constant
// bank whenever it stamps: no register holds it in between.
//
// Of a block WORDS words: for each event the last warp's %globaltimer, then its clock of the
// multiprocessor, then the number of that + 1.
#define pdl_wait ink_plain_wait
#define pdl_trigger ink_plain_trigger
#include "device.cuh"
#undef pdl_wait
#undef pdl_trigger

enum InkEvent { INK_START, INK_WAITED, INK_TRIGGERED, INK_ENDED, INK_EVENTS };
constexpr int INK_STAMP_WORDS = 2 * INK_EVENTS + 1;

INK_DEVICE void ink_stamp(int event) {
  const u32 thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  if (thread % 32) return;
  u64 now, cycles, *at;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  asm volatile("ld.param.u64 %0, [" INK_STAMPS_PARAM "];" : "=l"(at));
  at += (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * (u64)blockIdx.z)) * INK_STAMP_WORDS;
  max_relaxed(at + event, now);
  max_relaxed(at + INK_EVENTS + event, cycles);
}
INK_DEVICE void pdl_wait() {
  ink_plain_wait();
  ink_stamp(INK_WAITED);
}
INK_DEVICE void pdl_trigger() {
  ink_stamp(INK_TRIGGERED);
  ink_plain_trigger();
}
// Stands first in the kernel, so it goes last on every way out of it.
struct InkBlock {
  INK_DEVICE InkBlock() {
    ink_stamp(INK_START);
    u32 sm;
    u64* at;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    asm volatile("ld.param.u64 %0, [" INK_STAMPS_PARAM "];" : "=l"(at));
    at += (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * (u64)blockIdx.z)) * INK_STAMP_WORDS;
    if (threadIdx.x + threadIdx.y + threadIdx.z == 0) max_relaxed(at + 2 * INK_EVENTS, sm + 1);
  }
  INK_DEVICE ~InkBlock() { ink_stamp(INK_ENDED); }
};
