// What one warp of experts.cu does: which pieces of which tiles, in which order, and where their
// weights are.
//
// The block's tiles of gate and up rows are b + BLOCKS t. Of those below `own` the warp takes
// t = warp, warp + WARPS, ... whole; of those from `own` on, up to `end`, one slice of every
// TILES_AT_ONCE. Then come units of the output, of number warp, warp + WARPS, ...: (row tile,
// distinct expert, part), and behind the block's own ones those that are shared. Row tiles are
// counted from the last block, as the first ones have more tiles. All of it follows from the number
// of distinct experts (`count`), and where weights are also from which these are.
#ifndef INK_MOE_WORK_CUH
#define INK_MOE_WORK_CUH
#include "stages.cuh"
#include "top_k.cuh"

constexpr int THREADS = WARPS * 32, SLICE = 3, PART = 9;
constexpr int GATE_VECTORS = HIDDEN / VECTOR_K, TILE_BYTES = GATE_VECTORS * VECTOR_BYTES;
constexpr int SLICES = (GATE_VECTORS + SLICE - 1) / SLICE, EXPERT_TILES = WIDTH / 8;
constexpr int DOWN_VECTORS = (WIDTH + VECTOR_K - 1) / VECTOR_K;
constexpr int JOB_BYTES = DOWN_VECTORS * VECTOR_BYTES, PARTS = (DOWN_VECTORS + PART - 1) / PART;
constexpr int ROW_TILES = HIDDEN / 16, MOST_ROW_TILES = (ROW_TILES + BLOCKS - 1) / BLOCKS;
constexpr int STAGE_BYTES = STAGE_VECTORS * VECTOR_BYTES;
static_assert(HIDDEN % VECTOR_K == 0 && WIDTH % 16 == 0, "whole vectors, whole lanes");
static_assert(SLICE % STAGE_VECTORS == 0 && PART % SLICE == 0, "whole stages, whole slices");
static_assert(SLICES <= WARPS, "a warp for each slice");
static_assert(OWN_EXPERTS <= THREADS, "a thread for each expert");

// Shared tiles between two barriers: so many at once, TURNS times.
constexpr int TILES_AT_ONCE = WARPS / SLICES;
// With the other one ptxas spills.
#if SHARE_ROWS
using RowTile = int;
#else
using RowTile = size_t;
#endif
constexpr int WHOLE_ROUNDS = ROW_TILES / BLOCKS;
constexpr int LEFT_TILES = SHARE_ROWS ? ROW_TILES % BLOCKS : 0;
static_assert(!SHARE_ROWS || !ONE_TOKEN, "of several tokens only");
// With more tiles left than this, a whole one for each of most warps takes less time.
constexpr int MOST_SHARED = TILES_AT_ONCE * (WARPS * 5 / 6);

// Whether a block can have more tiles than are worth sharing: one token's are fewer.
constexpr int MOST_EXPERTS = TOKENS * TOP_K < OWN_EXPERTS ? TOKENS * TOP_K : OWN_EXPERTS;
constexpr int MOST_TILES = (MOST_EXPERTS * EXPERT_TILES + BLOCKS - 1) / BLOCKS;
constexpr bool HAS_OWN = MOST_TILES > MOST_SHARED || MOST_TILES >= WARPS;
constexpr int ROUND_TILES = TURNS * TILES_AT_ONCE;
// One token's sums of a round that is the only one need no second place.
constexpr int SUM_BUFFERS = ONE_TOKEN && MOST_TILES <= ROUND_TILES ? 1 : 2;

// A slice's sums, [row 16][token], of tokens in pairs where they are narrow.
constexpr int SUM_COLUMNS = ONE_TOKEN || !NARROW ? TOKEN_COLUMNS : (TOKENS + 1) / 2 * 2;
constexpr int SLICE_SUMS = 16 * SUM_COLUMNS;
INK_DEVICE void store_slice(float* p, const Tile& t, int lane) {
  if (SUM_COLUMNS == TOKEN_COLUMNS) return store_tile(p, t, lane);
  const int token = (lane & 3) * 2;
  float* const to = p + (lane >> 2) * SUM_COLUMNS + token;
  if (token >= SUM_COLUMNS) return;
  *(float2*)to = make_float2(t.c[0][0] + t.c[1][0], t.c[0][1] + t.c[1][1]);
  *(float2*)(to + 8 * SUM_COLUMNS) = make_float2(t.c[0][2] + t.c[1][2], t.c[0][3] + t.c[1][3]);
}

// Stages of a slice and of a unit; the last ones are shorter, or empty, where K is.
constexpr int SLICE_STAGES = SLICE / STAGE_VECTORS, TILE_STAGES = SLICES * SLICE_STAGES;
constexpr int MOST_PART = DOWN_VECTORS < PART ? DOWN_VECTORS : PART;
constexpr int UNIT_STAGES = (MOST_PART + STAGE_VECTORS - 1) / STAGE_VECTORS;
constexpr bool SHORT_SLICES = GATE_VECTORS % SLICE != 0;
constexpr bool SHORT_UNITS = DOWN_VECTORS % MOST_PART != 0 || MOST_PART % STAGE_VECTORS != 0;
// Whether a warp can ask for more than 32 of them, up to STAGES behind the last one among them.
constexpr int MOST_UNITS = (MOST_ROW_TILES * MOST_EXPERTS * PARTS + WARPS - 1) / WARPS;
constexpr bool MANY_STAGES =
    HAS_OWN || (MOST_TILES + TILES_AT_ONCE - 1) / TILES_AT_ONCE * SLICE_STAGES +
                       MOST_UNITS * UNIT_STAGES + STAGES > 32;

INK_DEVICE int part_vectors(int part) { return min(PART, DOWN_VECTORS - part * PART); }

// A piece of the weights, of expert 0, and which of the distinct experts it is wanted of.
struct Piece {
  const u8* from;
  u32 expert_bytes, num_bytes;
  int u;
  INK_DEVICE Source of(int expert) const {
    return {from + (u64)(u32)expert * expert_bytes, num_bytes};
  }
};

struct Work {
  const u8 *gate_up, *down;
  const Route& choice;
  int b, warp;
  int my_tile, my_slice, my_vectors;  // of the shared ones: number, and vectors from the slice on
  int first_row_tile, row_tiles;
  // By the number of distinct experts:
  int end, own;              // tiles of the block
  int row_tile_units;
  int from_left, num_units;  // shared units from `from_left` on; own and shared ones

  INK_DEVICE Work(const u8* gate_up, const u8* down, const Route& choice, int b, int warp)
      : gate_up(gate_up), down(down), choice(choice), b(b), warp(warp) {
    my_tile = warp / SLICES;
    my_slice = warp % SLICES * SLICE;
    my_vectors = my_tile < TILES_AT_ONCE ? min(SLICE, GATE_VECTORS - my_slice) : 0;
    first_row_tile = BLOCKS - 1 - b;
    row_tiles =
        SHARE_ROWS ? WHOLE_ROUNDS : (max(ROW_TILES - first_row_tile, 0) + BLOCKS - 1) / BLOCKS;
    if (IS_KNOWN) count(TOP_K);
  }
  INK_DEVICE void count(int num_experts) {
    const int num_tiles = num_experts * EXPERT_TILES;
    end = (u32)(max(num_tiles - b, 0) + BLOCKS - 1) / BLOCKS;
    const int rest = (u32)end % WARPS;
    own = !HAS_OWN ? 0 : rest <= MOST_SHARED ? end - rest : end;
    row_tile_units = num_experts * PARTS;
    from_left = (u32)(LEFT_TILES * row_tile_units * b) / BLOCKS;
    const int num_left = (u32)(LEFT_TILES * row_tile_units * (b + 1)) / BLOCKS - from_left;
    num_units = row_tiles * row_tile_units + num_left;
  }

  // Row tile, and the unit's number in it: expert x PARTS + part; r is the number of the block's
  // own row tile, or row_tiles.
  struct Place {
    RowTile row_tile;
    int of_tile, r;
  };
  INK_DEVICE Place place(int unit) const {
    if (SHARE_ROWS && unit >= row_tiles * row_tile_units) {
      // A block's units are of two row tiles at most, of which the first is from_left / units.
      const int number = from_left + unit - row_tiles * row_tile_units;
      int tile = (u32)(LEFT_TILES * b) / BLOCKS, of_tile = number - tile * row_tile_units;
      if (of_tile >= row_tile_units) tile++, of_tile -= row_tile_units;
      return {(RowTile)(BLOCKS * WHOLE_ROUNDS + tile), of_tile, row_tiles};
    }
    int r = 0;
    if (IS_KNOWN || MOST_ROW_TILES > 4) {
      r = (u32)unit / (u32)row_tile_units;
    } else {  // a division takes longer
#pragma unroll
      for (int k = 1; k < MOST_ROW_TILES; k++) r += unit >= k * row_tile_units;
    }
    return {(RowTile)first_row_tile + BLOCKS * r, unit - r * row_tile_units, r};
  }

  // Of stage n of the warp; empty behind the last one.
  INK_DEVICE Piece piece(int n) const {
    const int own_stages =
        HAS_OWN ? (u32)(max(own - warp, 0) + WARPS - 1) / WARPS * TILE_STAGES : 0;
    int t, at, vectors;
    if (HAS_OWN && n < own_stages) {
      t = warp + (u32)n / TILE_STAGES * WARPS;
      at = (u32)n % TILE_STAGES * STAGE_VECTORS;
      vectors = GATE_VECTORS - at;
    } else {
      n -= own_stages;
      t = own + my_tile + (u32)n / SLICE_STAGES * TILES_AT_ONCE;
      at = my_slice + (u32)n % SLICE_STAGES * STAGE_VECTORS;
      vectors = my_slice + my_vectors - at;
      if (t >= end || my_vectors == 0) {
        const int shared =
            my_vectors == 0
                ? 0
                : (u32)(max(end - own - my_tile, 0) + TILES_AT_ONCE - 1) / TILES_AT_ONCE;
        n -= shared * SLICE_STAGES;
        const int unit = warp + (u32)n / UNIT_STAGES * WARPS;
        if (unit >= num_units) return {down, 0, 0, 0};
        const Place p = place(unit);
        const int part = (u32)p.of_tile % PARTS, of_part = (u32)n % UNIT_STAGES * STAGE_VECTORS;
        return {down + (u32)p.row_tile * JOB_BYTES + (part * PART + of_part) * VECTOR_BYTES,
                (u32)ROW_TILES * JOB_BYTES, bytes(part_vectors(part) - of_part),
                (int)((u32)p.of_tile / PARTS)};
      }
    }
    const u32 i = b + BLOCKS * t;
    return {gate_up + i % EXPERT_TILES * TILE_BYTES + at * VECTOR_BYTES,
            (u32)EXPERT_TILES * TILE_BYTES, bytes(vectors), (int)(i / EXPERT_TILES)};
  }
  // The same once the route is there.
  INK_DEVICE Source source(int n) const {
    const Piece p = piece(n);
    return p.of(choice.expert[p.u]);
  }
  static INK_DEVICE u32 bytes(int vectors) {
    return max(min(STAGE_VECTORS, vectors), 0) * VECTOR_BYTES;
  }
};
#endif  // INK_MOE_WORK_CUH
