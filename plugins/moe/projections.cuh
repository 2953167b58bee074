// The input projections of what follows, in the launch of the experts: once a block is done with
// its experts, its shared memory fills with their bf16 weights, while `conv_mix_ranks`, the launch
// behind this one, makes their inputs and hands them over as words (words.cuh). Neither the end of
// the experts nor the start of another kernel stands in between, and the memory never idles.
//
// The tiles of all matrices are one list, as in w4a16/ring_linear.cu, of which a block has some in a
// row. Of WARPS warps, sets of NUM_WARPS take a tile each and split its K as there, so bits are the
// same. A warp's weights come vector by vector through RING_SLOTS of its own, where its stages were.
//
//   soon     One word: the number of the launch whose inputs will be there within a microsecond or
//            two. A warp polls it by one lane and the words themselves only then, as experts of
//            other blocks and the exchange of ranks still need the L2.
//   turn     The experts' (words.cuh), whose parity says which of two buffers of words is used, is
//            told here by block 0 when it has its inputs: all that hand over have read it by then.
//   pace     As in ring_linear.cu; PACE counts vectors.
//
// The launch behind must be able to run beside this one, or neither ends.
//
// Macros: those of row_tiles.cuh; INPUT_OF counts the mix's queries, of which there are
// MIXED_QUERIES; FIRST_ROWS (of each matrix, in the result, which is [TOKENS][rows] of all matrices,
// one after the other); PACE, RING_SLOTS.
#ifndef INK_MOE_PROJECTIONS_CUH
#define INK_MOE_PROJECTIONS_CUH
#include "all_reduce/push.cuh"
#include "rows.cuh"
#include "stages.cuh"
#include "w4a16/row_tiles.cuh"

__device__ constexpr int first_row(int matrix) { return pick(matrix, FIRST_ROWS); }
constexpr int BF16_VECTOR_BYTES = 2048, SETS = WARPS / NUM_WARPS;
constexpr int X_STRIDE = VECTORS * VECTOR_K + 8;
static_assert(SETS > 0, "a set of warps");

struct ProjectionMemory {
  u64 bars[WARPS][RING_SLOTS];
  u64 started;  // all warps have asked for their first vectors

  INK_DEVICE void init() {  // in front of a barrier of the block
    const int lane = threadIdx.x & 31;
    if (lane < RING_SLOTS) mbar_init(&bars[threadIdx.x >> 5][lane], 1);
    if (threadIdx.x == 0) mbar_init(&started, WARPS);
  }
};

struct Projections {
  const u8* const (&weights)[8];
  bf16* y;
  ProjectionMemory& sm;
  u8* slots;  // of this warp
  int b, warp, lane, set, first, count;
  // The vector to be requested next: `vector` of this warp's share of tile `tile`.
  int tile, vector = 0;
  const u8* source = nullptr;

  INK_DEVICE Projections(const u8* const (&weights)[8], bf16* y, ProjectionMemory& sm, u8* slots,
                         int b, int warp, int lane)
      : weights(weights), y(y), sm(sm), slots(slots), b(b), warp(warp), lane(lane) {
    constexpr int EACH = NUM_TILES / BLOCKS, MORE = NUM_TILES % BLOCKS;
    first = EACH * b + min(b, MORE);
    count = EACH + (b < MORE);
    set = warp / NUM_WARPS;
    tile = set < SETS ? set : count;
  }

  // Of a tile of the block.
  struct Place {
    const u8* weights;
    bf16* y;
    int query, rows, first;  // rows of the matrix; the tile's first
  };
  INK_DEVICE Place place_of(int number) const {
    const int t = first + number;
    Place place = {weights[0], y + first_row(0) * TOKENS, input_of(0), rows_of(0), t};
#pragma unroll
    for (int m = 1; m < MATRICES; m++)
      if (t >= first_tile(m))
        place = {weights[m], y + first_row(m) * TOKENS, input_of(m), rows_of(m),
                 t - first_tile(m)};
    place.weights += (size_t)place.first * VECTORS * BF16_VECTOR_BYTES;
    place.first *= 16;
    return place;
  }
  INK_DEVICE void request(int slot, bool is_again, int* error) {
    if (tile >= count) return;
    if (vector == 0)
      source = place_of(tile).weights + warp % NUM_WARPS * NV * BF16_VECTOR_BYTES;
    if (lane == 0) {
      // Whoever waits for a first vector must not find that its barrier is two vectors on.
      if (is_again) mbar_wait(&sm.started, 0, error);
      fence_async();  // others have read what was there
      u64* const bar = &sm.bars[warp][slot];
      mbar_expect(bar, BF16_VECTOR_BYTES);
      u8* const to = slots + slot * BF16_VECTOR_BYTES;
      if (ONE_TOKEN)
        bulk_load_once(to, source, BF16_VECTOR_BYTES, bar);
      else
        bulk_load(to, source, BF16_VECTOR_BYTES, bar);
    }
    source += BF16_VECTOR_BYTES;
    if (++vector == NV) vector = 0, tile += SETS;
  }
  // The first vectors, as those before them come. A warp that has used its last stage; who sends the
  // experts' sums does so first.
  INK_DEVICE void begin(int* error) {
    __syncwarp();
#pragma unroll 1
    for (int slot = 0; slot < RING_SLOTS && tile < count; slot++) {
      const int before = slot * WARPS + warp - PACE, other = before % WARPS;
      if (lane == 0 && before >= 0 && before / WARPS < num_vectors(other / NUM_WARPS))
        mbar_wait(&sm.bars[other][before / WARPS], 0, error);
      request(slot, false, error);
    }
    if (lane == 0) mbar_arrive(&sm.started);
    __syncwarp();
  }
  // Of a warp of a set.
  INK_DEVICE int num_vectors(int of_set) const {
    return of_set < SETS ? (max(count - of_set, 0) + SETS - 1) / SETS * NV : 0;
  }

  // x [T][X_STRIDE], sums [WARPS][TILE_SUMS]: shared memory that nobody else uses behind the next
  // barrier of the block. mixed: words of all queries, [query][TOKENS][HIDDEN].
  INK_DEVICE void multiply(bf16* x, float* sums, const bf16* mixed, const u64* soon, u32 number,
                           int T, int* error) {
    int slot = 0, query = -1;
    u32 parity = 0;
    // The first vector waits in registers, so that one more is on its way.
    uint4 codes[4];
    const bool has_any = set < SETS && set < count;
    auto take = [&]() {
      mbar_wait(&sm.bars[warp][slot], parity, error);
      const u8* const from = slots + slot * BF16_VECTOR_BYTES + lane * 16;
#pragma unroll
      for (int m = 0; m < 4; m++) codes[m] = *(const uint4*)(from + m * 512);
      __syncwarp();
      request(slot, true, error);
      if (++slot == RING_SLOTS) slot = 0, parity ^= 1;
    };
    if (has_any) take();
    await(soon, number, T, error);
#pragma unroll 1
    for (int base = 0; base < count; base += SETS) {
      const int mine = base + set;
      const bool has_tile = set < SETS && mine < count;
      Tile sum = zero_tile();
      const int last_query = place_of(min(base + SETS, count) - 1).query;
      const int own_query = has_tile ? place_of(mine).query : -1;
      for (int q = place_of(base).query; q <= last_query; q++) {
        if (q != query) {
          __syncthreads();
          receive(x, mixed + (size_t)q * TOKENS * HIDDEN, T, error);
          __syncthreads();
          query = q;
        }
        if (q != own_query) continue;
        const int g = lane >> 2, k = (warp % NUM_WARPS) * NV * VECTOR_K + (lane & 3) * 16;
        const bf16* const from = x + (ONE_TOKEN ? 0 : min(g, max(T, 1) - 1) * X_STRIDE) + k;
#pragma unroll 1
        for (int v = 0; v < NV; v++) {
          const uint4 lo = *(const uint4*)(from + v * VECTOR_K),
                      hi = *(const uint4*)(from + v * VECTOR_K + 8);
          const u32 z[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
          if (mine >= SETS || v) take();
#pragma unroll
          for (int m = 0; m < 4; m++) {
            const u32 a[4] = {codes[m].x, codes[m].y, codes[m].z, codes[m].w};
            mma_bf16(sum.c[m & 1], a, z[2 * m], z[2 * m + 1]);
          }
        }
      }
      if (base) __syncthreads();  // all have read the sums before
      if (has_tile) store_tile(sums + warp * TILE_SUMS, sum, lane);
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < SETS * TILE_SUMS; i += WARPS * 32) {
        const int of_set = i / TILE_SUMS, row = i % TILE_SUMS / TOKEN_COLUMNS;
        const int token = i % TOKEN_COLUMNS;
        if (base + of_set >= count || token >= T) continue;
        const Place place = place_of(base + of_set);
        if (place.first + row >= place.rows) continue;
        const float* const of_warps = sums + of_set * NUM_WARPS * TILE_SUMS + i % TILE_SUMS;
        place.y[(size_t)token * place.rows + place.first + row] =
            to_bf16(strided_sum<NUM_WARPS>(of_warps, TILE_SUMS));
      }
    }
  }

 private:
  // One lane of a warp looks, until inputs are about to come.
  INK_DEVICE void await(const u64* soon, u32 number, int T, int* error) const {
    // Other ranks may be late by as much as they are waited for.
    constexpr u32 LIMIT = 2u << 22;
    u32 spins = 0;
    if (lane == 0 && T > 0) {
      while (load_relaxed(soon) != number && spins < LIMIT) spins++;
      if (spins == LIMIT) report_error(error, ERROR_SENTINEL);
    }
    __syncwarp();
  }
  // All threads; rows from T on are not read, zeros behind the width.
  static INK_DEVICE void receive(bf16* x, const bf16* words, int T, int* error) {
    Rows<HIDDEN / 8, TOKENS, WARPS * 32> rows;
    rows.receive(words, [&](int row) { return row < T; }, error);
    rows.store(x, X_STRIDE, T);
    constexpr int MORE = VECTORS * VECTOR_K - HIDDEN;
    if constexpr (MORE > 0)
      for (int i = threadIdx.x; i < T * MORE; i += WARPS * 32)
        x[i / MORE * X_STRIDE + HIDDEN + i % MORE] = 0;
  }
};
#endif  // INK_MOE_PROJECTIONS_CUH
