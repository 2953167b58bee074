// Kernels of l2_probe.py, which gives PIECE (bytes), WARPS of a block and NUM_BLOCKS. Piece i is a
// warp's of block i % NUM_BLOCKS, or of one `shift` further on.
#include "device.cuh"

INK_DEVICE u64 now() {
  u64 ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

// Asks the L2 for pieces.
extern "C" __global__ void fetch(const u8* base, int pieces, int is_last) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  if (threadIdx.x % 32) return;
  const int warp = threadIdx.x / 32;
  for (int i = blockIdx.x + warp * NUM_BLOCKS; i < pieces; i += NUM_BLOCKS * WARPS) {
    const u8* from = base + (size_t)i * PIECE;
    if (is_last)
      asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from),
                   "r"(PIECE), "l"(policy)
                   : "memory");
    else
      bulk_prefetch(from, PIECE);
  }
}

// Reads pieces, a stage a warp; times[0] the first start, times[1] the last end.
extern "C" __global__ void stream(const u8* base, int pieces, int shift, int is_once, u64* times) {
  __shared__ alignas(128) u8 stages[WARPS][PIECE];
  __shared__ u64 bars[WARPS];
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32) return;
  mbar_init(bars + warp, 1);
  if (times) atomicMin((unsigned long long*)times, now());
  u32 parity = 0;
  const int block = (blockIdx.x + shift) % NUM_BLOCKS;
  for (int i = block + warp * NUM_BLOCKS; i < pieces; i += NUM_BLOCKS * WARPS, parity ^= 1) {
    const u8* from = base + (size_t)i * PIECE;
    mbar_expect(bars + warp, PIECE);
    if (is_once)
      bulk_load_once(stages[warp], from, PIECE, bars + warp);
    else
      bulk_load(stages[warp], from, PIECE, bars + warp);
    while (!mbar_test(bars + warp, parity)) {
    }
  }
  if (times) atomicMax((unsigned long long*)times + 1, now());
}
// Does nothing for so long.
extern "C" __global__ void idle(int ns) {
  const u64 first = now();
  while (now() - first < (u64)ns) {
  }
}
