// A warp's weights on their way through shared memory. Not through registers: the compiler has one
// scoreboard for all loads in flight that a loop refills, so a use would wait for the last request.
#ifndef INK_RING_CUH
#define INK_RING_CUH
#include "w4a16.cuh"

// A stage is what lies together in a tile: a chunk of NVFP4, a vector of bf16.
constexpr int STAGE_VECTORS = WEIGHTS ? 1 : CHUNK_VECTORS;
constexpr int STAGE_BYTES = CHUNK_BYTES / CHUNK_VECTORS * STAGE_VECTORS;

// The warp's stages are used in turn: all lanes call `request` STAGES times, then, for each stage
// in order, `wait`, use what it gives, and `request` the one STAGES later.
struct Ring {
  u8* memory;  // of this warp, shared, STAGES * STAGE_BYTES
  int lane;
  int requested = 0, used = 0;

  // source: of STAGE_BYTES in device memory, or null where no more is to come.
  INK_DEVICE void request(const u8* source) {
    __syncwarp();  // all lanes are done with the stage
    u8* const stage = memory + requested++ % STAGES * STAGE_BYTES;
    if (source)
#pragma unroll
      for (int i = 0; i < STAGE_BYTES; i += 512)
        if (i + 512 <= STAGE_BYTES || lane * 16 < STAGE_BYTES - i)
          copy_async16(stage + i + lane * 16, source + i + lane * 16);
    copy_async_commit();
  }
  INK_DEVICE const u8* wait() {
    copy_async_wait_but<STAGES - 1>();
    __syncwarp();
    return memory + used++ % STAGES * STAGE_BYTES;
  }
};

#endif  // INK_RING_CUH
