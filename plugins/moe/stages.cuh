// A warp's weights on their way through shared memory, in stages of at most BYTES: w4a16/ring.cuh
// for stages that may be shorter, and of any number.
#ifndef INK_MOE_STAGES_CUH
#define INK_MOE_STAGES_CUH
#include "weights.cuh"

// All lanes call `request_first` COUNT times, then, for each stage in order, `wait`, use what it
// gives, and `request` the one COUNT stages later. BULK: those come by bulk copies, too, of one
// lane.
template <int COUNT, int BYTES, bool BULK>
struct Stages {
  u8* memory;  // of this warp, shared, COUNT * BYTES
  u64* first;  // COUNT barriers of one arrival, initialized
  int lane;
  int to_fill = 0, to_use = 0, num_first = 0;  // num_first: first stages that have been used
  u32 parity = 0;

  // source: of num_bytes in device memory; 0 bytes where no more is to come. The first stages come
  // by bulk copies: for cp.async every lane must ask, which takes longer.
  INK_DEVICE void request_first(const u8* source, int num_bytes) {
    if (lane == 0) {
      mbar_expect(first + to_fill, num_bytes);
      if (num_bytes) bulk_load(memory + to_fill * BYTES, source, num_bytes, first + to_fill);
    }
    advance(to_fill);
    if (!BULK) copy_async_commit();
  }
  INK_DEVICE void request(const u8* source, int num_bytes) {
    __syncwarp();  // all lanes are done with the stage
    if (BULK) {
      request_first(source, num_bytes);
      return;
    }
    u8* const stage = memory + to_fill * BYTES;
#pragma unroll
    for (int i = 0; i < BYTES; i += 512)
      if (i + lane * 16 < num_bytes) copy_async16(stage + i + lane * 16, source + i + lane * 16);
    advance(to_fill);
    copy_async_commit();
  }
  INK_DEVICE const u8* wait(int* error) {
    if (BULK) {
      mbar_wait(first + to_use, parity, error);
      if (to_use == COUNT - 1) parity ^= 1;
    } else {
      if (num_first < COUNT) mbar_wait(first + num_first++, 0, error);
      copy_async_wait_but<COUNT - 1>();
    }
    __syncwarp();
    const u8* const stage = memory + to_use * BYTES;
    advance(to_use);
    return stage;
  }
  INK_DEVICE static void advance(int& stage) { stage = stage + 1 == COUNT ? 0 : stage + 1; }
};
#endif  // INK_MOE_STAGES_CUH
