// A warp's weights on their way through shared memory. Not through registers: the compiler has one
// scoreboard for all loads in flight that a loop refills, so a use would wait for the last request.
#ifndef INK_RING_CUH
#define INK_RING_CUH
#include "w4a16.cuh"

// A stage is what lies together in a tile: a chunk of NVFP4, a vector of bf16.
constexpr int STAGE_VECTORS = WEIGHTS ? 1 : CHUNK_VECTORS;
constexpr int STAGE_BYTES = CHUNK_BYTES / CHUNK_VECTORS * STAGE_VECTORS;

// The warp's stages are used in turn: all lanes call `request_first` STAGES times, then, for each
// stage in order, `wait`, use what it gives, and `request` the one STAGES later.
constexpr int FIRST_BARS = STAGES / 2;
struct Ring {
  u8* memory;  // of this warp, shared, STAGES * STAGE_BYTES
  u64* first;  // FIRST_BARS barriers of two arrivals, initialized
  int lane;
  int requested = 0, used = 0;

  // source: of STAGE_BYTES in device memory, or null where no more is to come. The first stages
  // come by bulk copies: for cp.async every lane must ask, which takes longer.
  INK_DEVICE void request_first(const u8* source) {
    u64* const bar = first + requested / 2;
    if (lane == 0) {
      mbar_expect(bar, source ? STAGE_BYTES : 0);
      if (source) bulk_load(memory + requested * STAGE_BYTES, source, STAGE_BYTES, bar);
    }
    requested++;
    copy_async_commit();
  }
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
  INK_DEVICE const u8* wait(int* error) {
    if (used < STAGES) mbar_wait(first + used / 2, 0, error);
    copy_async_wait_but<STAGES - 1>();
    __syncwarp();
    return memory + used++ % STAGES * STAGE_BYTES;
  }
};

#endif  // INK_RING_CUH
