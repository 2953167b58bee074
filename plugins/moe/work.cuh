// What one warp of experts.cu does: which pieces of which tiles, in which order, and where their
// weights are.
//
// The block's tiles of gate and up rows are b + BLOCKS t. Of those below `own` the warp takes
// t = warp, warp + WARPS, ... whole; of those from `own` on, up to `end`, one slice of every
// TILES_AT_ONCE. Then come units of the output, of number warp, warp + WARPS, ...: (row tile,
// distinct expert, part), and behind the block's own ones those that are shared. Row tiles are
// counted from the last block, as the first ones have more tiles.
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
static_assert(!SHARE_ROWS || (BY_WORDS && !ONE_TOKEN && PARTS == 1), "a word for each slot");
// With more tiles left than this, a whole one for each of most warps takes less time.
constexpr int MOST_SHARED = TILES_AT_ONCE * (WARPS * 5 / 6);

// Whether a block can have more tiles than are worth sharing: one token's are fewer.
constexpr int MOST_EXPERTS = TOKENS * TOP_K < OWN_EXPERTS ? TOKENS * TOP_K : OWN_EXPERTS;
constexpr int MOST_TILES = (MOST_EXPERTS * EXPERT_TILES + BLOCKS - 1) / BLOCKS;
constexpr bool HAS_OWN = MOST_TILES > MOST_SHARED || MOST_TILES >= WARPS;
constexpr int ROUND_TILES = TURNS * TILES_AT_ONCE;
// One token's sums of a round that is the only one need no second place.
constexpr int SUM_BUFFERS = ONE_TOKEN && MOST_TILES <= ROUND_TILES ? 1 : 2;

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

struct Work {
  const u8 *gate_up, *down;
  const Route& choice;
  int b, warp;
  int end, own;                  // tiles of the block
  int my_tile, my_slice, my_vectors;  // of the shared ones: number, and vectors from the slice on
  int first_row_tile, row_tiles, row_tile_units;
  int from_left, num_units;      // shared units from `from_left` on; own and shared ones

  INK_DEVICE Work(const u8* gate_up, const u8* down, const Route& choice, int b, int warp)
      : gate_up(gate_up), down(down), choice(choice), b(b), warp(warp) {
    const int num_tiles = choice.num_experts * EXPERT_TILES;
    end = (max(num_tiles - b, 0) + BLOCKS - 1) / BLOCKS;
    const int rest = end % WARPS;
    own = !HAS_OWN ? 0 : rest <= MOST_SHARED ? end - rest : end;
    my_tile = warp / SLICES;
    my_slice = warp % SLICES * SLICE;
    my_vectors = my_tile < TILES_AT_ONCE ? min(SLICE, GATE_VECTORS - my_slice) : 0;
    first_row_tile = BLOCKS - 1 - b;
    row_tiles =
        SHARE_ROWS ? WHOLE_ROUNDS : (max(ROW_TILES - first_row_tile, 0) + BLOCKS - 1) / BLOCKS;
    row_tile_units = choice.num_experts * PARTS;
    from_left = LEFT_TILES * row_tile_units * b / BLOCKS;
    const int num_left = LEFT_TILES * row_tile_units * (b + 1) / BLOCKS - from_left;
    num_units = row_tiles * row_tile_units + num_left;
  }

  // Row tile, and the unit's number in it: expert x PARTS + part; r is the number of the block's
  // own row tile, or row_tiles.
  struct Place {
    RowTile row_tile;
    int of_tile, r;
  };
  INK_DEVICE Place place(int unit) const {
    const int r = (u32)unit / (u32)row_tile_units;
    if (!SHARE_ROWS || r < row_tiles)
      return {(RowTile)first_row_tile + BLOCKS * r, unit - r * row_tile_units, r};
    const int number = from_left + unit - row_tiles * row_tile_units;
    const int tile = (u32)number / (u32)row_tile_units;
    return {(RowTile)(BLOCKS * WHOLE_ROUNDS + tile), number - tile * row_tile_units, row_tiles};
  }

  // Of stage n of the warp; empty behind the last one.
  INK_DEVICE Source source(int n) const {
    const int own_stages =
        HAS_OWN ? (max(own - warp, 0) + WARPS - 1) / WARPS * TILE_STAGES : 0;
    int t, at, vectors;
    if (HAS_OWN && n < own_stages) {
      t = warp + n / TILE_STAGES * WARPS;
      at = n % TILE_STAGES * STAGE_VECTORS;
      vectors = GATE_VECTORS - at;
    } else {
      n -= own_stages;
      t = own + my_tile + n / SLICE_STAGES * TILES_AT_ONCE;
      at = my_slice + n % SLICE_STAGES * STAGE_VECTORS;
      vectors = my_slice + my_vectors - at;
      const int shared =
          my_vectors == 0 ? 0
                          : (max(end - own - my_tile, 0) + TILES_AT_ONCE - 1) / TILES_AT_ONCE;
      if (t >= end || my_vectors == 0) {
        n -= shared * SLICE_STAGES;
        const int unit = warp + n / UNIT_STAGES * WARPS;
        if (unit >= num_units) return {down, 0};
        const Place p = place(unit);
        const int part = p.of_tile % PARTS, of_part = n % UNIT_STAGES * STAGE_VECTORS;
        const size_t job = (size_t)choice.expert[p.of_tile / PARTS] * ROW_TILES + p.row_tile;
        return {down + job * JOB_BYTES + (part * PART + of_part) * VECTOR_BYTES,
                bytes(part_vectors(part) - of_part)};
      }
    }
    const int i = b + BLOCKS * t;
    const size_t tile = (size_t)choice.expert[i / EXPERT_TILES] * EXPERT_TILES + i % EXPERT_TILES;
    return {gate_up + tile * TILE_BYTES + at * VECTOR_BYTES, bytes(vectors)};
  }
  static INK_DEVICE u32 bytes(int vectors) {
    return max(min(STAGE_VECTORS, vectors), 0) * VECTOR_BYTES;
  }
};
#endif  // INK_MOE_WORK_CUH
