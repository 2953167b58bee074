// A warp's weights on their way through shared memory. Not through registers: the compiler has one
// scoreboard for all loads in flight that a loop refills, so a use would wait for the last request.
#ifndef INK_RING_CUH
#define INK_RING_CUH
#include "w4a16.cuh"

// A stage is a slice of a tile: NVFP4, two vectors of a chunk or one, and its scales, of which the
// words of four bytes hold those of two vectors; bf16, a vector.
template <int VECTORS_OF_SLICE>
struct Slice {
  static constexpr int VECTORS = VECTORS_OF_SLICE;
  static constexpr int BYTES = VECTORS * CODE_BYTES + (WEIGHTS ? 0 : 128);
  static_assert(WEIGHTS ? VECTORS == 1 : VECTORS <= 2, "see above");

  // All lanes; `first` is a multiple of VECTORS.
  static INK_DEVICE void request(u8* stage, const u8* tile, int first, int lane) {
    const u8* const codes = vector_codes(tile, first, lane);
#pragma unroll
    for (int i = 0; i < VECTORS * CODE_BYTES; i += 512)
      copy_async16(stage + i + lane * 16, codes + i);
#if WEIGHTS == 0
    copy_async4(stage + VECTORS * CODE_BYTES + lane * 4, vector_scales(tile, first & ~1, lane));
#endif
  }
  // tile += vectors `first`.. by tokens b.
  static INK_DEVICE void multiply(Tile& tile, const u8* stage, int first,
                                  const Activations<VECTORS>& b, int lane) {
    Scales s = {0, 0};
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      Codes codes;
#if WEIGHTS == 0
      const u32 scales = *(const u32*)(stage + VECTORS * CODE_BYTES + lane * 4);
      s = VECTORS == 2 ? (i ? scales_of<1>(scales) : scales_of<0>(scales))
                       : scales_of<0>(scales >> (first & 1) * 16);
      codes.w = *(const uint4*)(stage + i * CODE_BYTES + lane * 16);
#else
#pragma unroll
      for (int m = 0; m < 4; m++) codes.w[m] = *(const uint4*)(stage + m * 512 + lane * 16);
#endif
      ::multiply(tile, codes, s, b.v[i]);
    }
  }
};

// The warp's stages are used in turn: all lanes call `request` STAGES times, then, for each slice
// in order, `wait`, use what it gives, and `request` the one STAGES later.
template <class SLICE>
struct Ring {
  u8* memory;  // of this warp, shared, STAGES slices
  int lane;
  int requested = 0, used = 0;

  // tile: in device memory, or null where no more is to come.
  INK_DEVICE void request(const u8* tile, int first) {
    __syncwarp();  // all lanes are done with the stage
    u8* const stage = memory + requested++ % STAGES * SLICE::BYTES;
    if (tile) SLICE::request(stage, tile, first, lane);
    copy_async_commit();
  }
  INK_DEVICE const u8* wait() {
    copy_async_wait_but<STAGES - 1>();
    __syncwarp();
    return memory + used++ % STAGES * SLICE::BYTES;
  }
};

#endif  // INK_RING_CUH
