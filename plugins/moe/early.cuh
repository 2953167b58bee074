// Experts whose second products begin as soon as their own activations are there: no warp waits for
// the block but where it takes over memory that others read.
//
//   tiles     A tile that all warps share is added up by the warp that is the last one with its
//             slice. A place for sums is free again once they have been added up (`free`).
//   operands  A row of activations is of one expert and token. The warp that has a unit of the
//             block's first row tile receives what that unit multiplies, word by word, and says so
//             (`ready`) to the warps that have the same expert and part of other row tiles.
//   memory    With several tokens activations come where z was, and partial sums where tiles' sums
//             were: once all warps have done their gate and up rows (`done`). One token has both.
//
// Units of a warp rise, and one waits only for activations, which need no unit, and for a unit with
// a lower number. So nobody waits in a circle. What is added, and in which order, is as without it.
#ifndef INK_MOE_EARLY_CUH
#define INK_MOE_EARLY_CUH
#include "words.cuh"
#include "work.cuh"

constexpr int SUM_PLACES = SUM_BUFFERS * TURNS;  // of a warp
constexpr int MOST_SHARED_TILES = !HAS_OWN ? MOST_TILES : MOST_SHARED < WARPS ? MOST_SHARED : WARPS;
// Whether a place is used again.
constexpr bool REUSES_PLACES =
    (MOST_SHARED_TILES + TILES_AT_ONCE - 1) / TILES_AT_ONCE > SUM_PLACES;
constexpr int OPERANDS = MOST_EXPERTS * PARTS;
static_assert(OPERANDS <= THREADS && SUM_PLACES * TILES_AT_ONCE <= THREADS, "a thread for each");

struct Early {
  u64 ready[OPERANDS];
  u64 free[SUM_PLACES][TILES_AT_ONCE];
  u64 done;
  u32 slices[SUM_PLACES][TILES_AT_ONCE];  // that are there, of all tiles so far

  // All threads, in front of a block barrier.
  INK_DEVICE void begin() {
    const int tid = threadIdx.x;
    if (tid < OPERANDS) mbar_init(ready + tid, 1);
    if (tid < SUM_PLACES * TILES_AT_ONCE) {
      mbar_init(&free[0][0] + tid, 1);
      (&slices[0][0])[tid] = 0;
    }
    if (tid == 0) mbar_init(&done, WARPS);
  }

  // Of a warp's n-th shared tile: before its sums are stored in place n % SUM_PLACES.
  INK_DEVICE void wait_for_place(int n, int of_round, int* error) {
    if (REUSES_PLACES && n >= SUM_PLACES)
      mbar_wait(&free[n % SUM_PLACES][of_round], (n / SUM_PLACES - 1) & 1, error);
  }
  // Behind the stores: whether this warp is the last one, and sees those of the others.
  INK_DEVICE bool is_last(int n, int of_round) {
    __syncwarp();
    u32 before = 0;
    if ((threadIdx.x & 31) == 0) {
      __threadfence_block();
      before = atomicAdd(&slices[n % SUM_PLACES][of_round], 1u);
      __threadfence_block();
    }
    return __shfl_sync(INK_FULL_WARP, before, 0) % SLICES == SLICES - 1;
  }
  // By the last one, once it has read all sums.
  INK_DEVICE void give_place(int n, int of_round) {
    __syncwarp();
    if (REUSES_PLACES && (threadIdx.x & 31) == 0) mbar_arrive(&free[n % SUM_PLACES][of_round]);
  }

  // A warp has done its gate and up rows.
  INK_DEVICE void leave_tiles() {
    __syncwarp();
    if (!ONE_TOKEN && (threadIdx.x & 31) == 0) mbar_arrive(&done);
  }
  // Receives what unit `of_tile` multiplies, [token][slot] rows of activations: of part `part` of
  // distinct expert u. All lanes.
  INK_DEVICE void receive(int of_tile, int u, int part, const Route& choice, const bf16* exchange,
                          bf16* hidden, int stride, int* error) {
    constexpr int PIECES = MOST_PART * VECTOR_K / 8, COUNT = (PIECES + 31) / 32;
    const int lane = threadIdx.x & 31, first = part * PART * VECTOR_K / 8;
    const int pieces = part_vectors(part) * (VECTOR_K / 8);
    if (!ONE_TOKEN) mbar_wait(&done, 0, error);
#pragma unroll 1
    for (int token = 0; token < TOKENS; token++) {
      const int slot = choice.slot[u][token];
      if (slot == NO_SLOT) continue;
      const int row = token * TOP_K + slot;
      const bf16* const from = exchange + (size_t)row * WIDTH;
      uint4 piece[COUNT];
#pragma unroll
      for (int n = 0; n < COUNT; n++) {  // beyond the width weights are zero, and values finite
        const int i = lane + n * 32;
        const u32 none = i < pieces && first + i < WIDTH / 8 ? EMPTY : 0;
        piece[n] = make_uint4(none, none, none, none);
      }
      u32 spins = 0;
#pragma unroll 1
      for (bool is_complete = false; !is_complete && spins < INK_SPIN_LIMIT; spins++) {
#pragma unroll
        for (int n = 0; n < COUNT; n++)
          if (has_empty(piece[n])) piece[n] = load_inbox16(from + (first + lane + n * 32) * 8);
        is_complete = true;
#pragma unroll
        for (int n = 0; n < COUNT; n++) is_complete = is_complete && !has_empty(piece[n]);
      }
      if (spins == INK_SPIN_LIMIT) report_error(error, ERROR_SENTINEL);
#pragma unroll
      for (int n = 0; n < COUNT; n++)
        if (lane + n * 32 < pieces)
          *(uint4*)(hidden + row * stride + (first + lane + n * 32) * 8) = piece[n];
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(ready + of_tile);
  }
  INK_DEVICE void wait(int of_tile, int* error) { mbar_wait(ready + of_tile, 0, error); }
};

// Sums of a tile's slices, `p` at the first one's, [row 16][token SUM_COLUMNS]: rows 0 to 7 are the
// gate's. `use(row, token, gate, up)` of every sum. All lanes. One token's even and odd slices are
// different lanes'.
template <class Use>
INK_DEVICE void add_slices(const float* p, Use use) {
  const int lane = threadIdx.x & 31;
  constexpr int ELEMENTS = 8 * SUM_COLUMNS;
#if ONE_TOKEN
  float sum = 0;
#pragma unroll
  for (int i = 0; i < SLICES; i += 2)
    if (i + (lane >> 4) < SLICES) sum += p[(i + (lane >> 4)) * SLICE_SUMS + (lane & 15)];
  sum += __shfl_xor_sync(INK_FULL_WARP, sum, 16);
  const float up = __shfl_xor_sync(INK_FULL_WARP, sum, 8);
  if (lane < ELEMENTS) use(lane, 0, sum, up);
#else
#pragma unroll 1
  for (int i = lane; i < ELEMENTS; i += 32)
    use(i / SUM_COLUMNS, i % SUM_COLUMNS, strided_sum<SLICES>(p + i, SLICE_SUMS),
        strided_sum<SLICES>(p + ELEMENTS + i, SLICE_SUMS));
#endif
}
#endif  // INK_MOE_EARLY_CUH
