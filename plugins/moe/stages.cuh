// A warp's weights on their way through shared memory, in stages of at most BYTES: w4a16/ring.cuh
// for stages that may be shorter, and of any number.
#ifndef INK_MOE_STAGES_CUH
#define INK_MOE_STAGES_CUH
#include "weights.cuh"

// num_bytes of device memory, a multiple of 16; 0 for a stage that is empty.
struct Source {
  const u8* from;
  u32 num_bytes;
};

// All lanes call `begin`, then, for each stage in order, `wait`, use what it gives, and `request`,
// which fills the same place with the stage COUNT later. Work: `source(n)` is where stage n comes
// from; of 32 stages in a row every lane finds one, all lanes at once, so that a request is a few
// instructions. MANY: of more than 32 requests. The first stages come by bulk copies, which the lane
// asks for that knows the stage, as for cp.async every lane must ask, which takes longer.
template <int COUNT, int BYTES, bool MANY, class Work>
struct Stages {
  static_assert(COUNT <= 32, "a lane for each of the first stages");
  u8* memory;  // of this warp, shared, COUNT * BYTES
  u64* first;  // COUNT barriers of one arrival, initialized
  int lane;
  const Work& work;
  Source held = {nullptr, 0};
  int holder = COUNT;  // the lane that knows the next stage to be requested
  int number = 0;      // of the stages that lanes know now, the first one's
  int current = 0, num_first = 0;  // num_first: first stages that have been used

  // Asks for the first stages. source: of stage `lane`; where that is known of those below COUNT
  // only, `know(COUNT)` must follow.
  INK_DEVICE void begin(const Source& source) {
    held = source;
    if (lane < COUNT) load(lane);
    for (int i = 0; i < COUNT; i++) copy_async_commit();
  }
  // Stages from `from` on, which is the next one to be requested.
  INK_DEVICE void know(int from) {
    number = from;
    held = work.source(from + lane);
    holder = 0;
  }
  INK_DEVICE const u8* wait(int* error) {
    if (num_first < COUNT) mbar_wait(first + num_first++, 0, error);
    copy_async_wait_but<COUNT - 1>();
    __syncwarp();
    return memory + current * BYTES;
  }
  INK_DEVICE void request() {
    __syncwarp();  // all lanes are done with the stage
    if (MANY && holder == 32) know(number + 32);
    const u64 from = __shfl_sync(INK_FULL_WARP, (u64)held.from, holder) + lane * 16;
    const int num_bytes = (int)__shfl_sync(INK_FULL_WARP, held.num_bytes, holder) - lane * 16;
    u8* const stage = memory + current * BYTES + lane * 16;
#pragma unroll
    for (int i = 0; i < BYTES; i += 512)
      if (i < num_bytes) copy_async16(stage + i, (const u8*)from + i);
    copy_async_commit();
    holder++;
    if (++current == COUNT) current = 0;
  }
  // One lane.
  INK_DEVICE void load(int place) {
    mbar_expect(first + place, held.num_bytes);
    if (held.num_bytes)
      bulk_load(memory + place * BYTES, held.from, held.num_bytes, first + place);
  }
};
#endif  // INK_MOE_STAGES_CUH
