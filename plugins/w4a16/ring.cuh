// A warp's weights on their way through shared memory. Not through registers: the compiler has one
// scoreboard for all loads in flight that a loop refills, so a use would wait for the last request.
#ifndef INK_RING_CUH
#define INK_RING_CUH
#include "w4a16.cuh"

// A stage is what lies together in a tile: a chunk of NVFP4, a vector of bf16.
constexpr int STAGE_VECTORS = WEIGHTS ? 1 : CHUNK_VECTORS;
constexpr int STAGE_BYTES = CHUNK_BYTES / CHUNK_VECTORS * STAGE_VECTORS;

// The warp's stages are used in turn: `request` STAGES times, then, for each stage in order,
// `wait`, use what it gives, and `request` the one STAGES later.
struct Ring {
  u8* memory;  // of this warp, shared: STAGES * STAGE_BYTES
  u64* full;   // likewise: STAGES barriers of one arrival
  int* error;
  int lane;
  int requested = 0, used = 0;

  // from: of STAGE_BYTES in device memory, or null where no more is to come.
  INK_DEVICE void request(const u8* from) {
    __syncwarp();  // all lanes are done with the stage
    const int stage = requested++ % STAGES;
    if (lane == 0 && from) {
      mbar_expect(full + stage, STAGE_BYTES);
      bulk_load(memory + stage * STAGE_BYTES, from, STAGE_BYTES, full + stage);
    }
  }
  INK_DEVICE const u8* wait() {
    const int stage = used % STAGES;
    mbar_wait(full + stage, used++ / STAGES & 1, error);
    __syncwarp();
    return memory + stage * STAGE_BYTES;
  }
};

#endif  // INK_RING_CUH
