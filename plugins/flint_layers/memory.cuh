// Sizes, the table of addresses, the slots of the exchange and the shared memory of layers.cu, and
// who requests which weights when.
#ifndef INK_FLINT_LAYERS_MEMORY_CUH
#define INK_FLINT_LAYERS_MEMORY_CUH
#include "attend.cuh"
#include "w4a16/w4a16.cuh"

constexpr int WARPS = 16, THREADS = WARPS * 32;
constexpr int HEAD = 128, OWNERS = HIDDEN / 16;
constexpr int ROW_TILES = (HEADS + 2 * KV_HEADS) * HEAD / 16;
constexpr int QKV_TILES = (ROW_TILES + BLOCKS - 1) / BLOCKS,
              READY_TILES = QKV_TILES < 2 ? QKV_TILES : 2;
constexpr int TILE_BYTES = tile_bytes(HIDDEN), O_BYTES = tile_bytes(HEADS * HEAD);
constexpr int JOB_BYTES = tile_bytes(WIDTH), SHARED_JOBS = SHARED_WIDTH / WIDTH;
constexpr int ROUTER_ROWS = (EXPERTS + OWNERS - 1) / OWNERS;
constexpr int EXPERT_TILES = WIDTH / 8, EXPERT_SLOTS = TOP_K * EXPERT_TILES / OWNERS;
constexpr int VECTORS = HIDDEN / VECTOR_K / WARPS;          // of a warp, of K = HIDDEN
constexpr int O_VECTORS = HEADS * HEAD / VECTOR_K / WARPS;  // of K = all heads
constexpr int DOWN_VECTORS = WIDTH / VECTOR_K / 2;          // of half a job
static_assert(HIDDEN == 2048 && O_VECTORS == 4 && VECTORS == 2,
              "a warp's slice is 16 bytes a lane");
static_assert(OWNERS <= BLOCKS && SHARED_WIDTH == 8 * OWNERS, "a shared tile for each owner");
static_assert(2 * (TOP_K + SHARED_JOBS) == WARPS && WIDTH == 512, "two warps for each down job");
static_assert(TOP_K * EXPERT_TILES % OWNERS == 0 && EXPERT_SLOTS <= 3, "expert tiles");
static_assert(ROUTER_ROWS <= 2 && QKV_TILES <= 3, "rows of a block");
// Row tiles are dealt out evenly; router rows one after the other, none past the owners.
INK_DEVICE int first_tile_of(int block) { return block * ROW_TILES / BLOCKS; }
INK_DEVICE int router_rows_of(int block) {
  return max(0, min(ROUTER_ROWS, EXPERTS - block * ROUTER_ROWS));
}

__constant__ int HAS_WINDOW[LAYERS] = {WINDOWED};
__constant__ int HAS_ROPE[LAYERS] = {ROPES};
__constant__ float INVERSE_FREQUENCIES[HEAD / 2] = {INV_FREQ};

// Columns of the table of addresses, a row a layer.
// clang-format off
enum Column {
  INPUT_NORM, QKV, QKV_SCALE, Q_NORM, K_NORM, SINKS, K_CACHE, V_CACHE, O, O_SCALE, MLP_NORM, ROUTER,
  SHARED_GATE_UP, SHARED_GATE_UP_SCALE, GATE_UP, GATE_UP_SCALE, DOWN, DOWN_SCALE, SHARED_DOWN,
  SHARED_DOWN_SCALE, COLUMNS
};
// clang-format on
enum Unit { QKV_UNIT, O_UNIT, SHARED_GATE_UP_UNIT, SHARED_DOWN_UNIT, UNITS };
INK_DEVICE int unit_of_column(int column) {
  return column == QKV_SCALE              ? QKV_UNIT
         : column == O_SCALE              ? O_UNIT
         : column == SHARED_GATE_UP_SCALE ? SHARED_GATE_UP_UNIT
         : column == SHARED_DOWN_SCALE    ? SHARED_DOWN_UNIT
                                          : -1;
}

// A slot: the words of one layer's handoffs, see exchange.cuh.
//
// The L2 is slow to show a sector of 32 bytes that several blocks write parts of while others poll
// it (measured: 0.5 us a handoff), so every block's words fill sectors of their own, with copies.
// Many readers of few lines also wait for each other: logits, which every block reads whole, have
// copies in other lines too.
constexpr int SECTOR = 8, LOGIT_COPIES = 32 / SECTOR;  // words
struct Slot {
  float before_attention[HIDDEN];
  u32 heads[ROW_TILES * 8];  // [head][pair]: rows d and d + 64
  bf16 attended[HEADS * HEAD];
  float before_experts[HIDDEN];
  u32 logits[LOGIT_COPIES][OWNERS][SECTOR];  // of a block's router rows
  u32 shared[SHARED_WIDTH / 8][SECTOR];      // eight elements a tile
  u32 hidden[TOP_K * EXPERT_TILES][SECTOR];
};
// NUM_SLOTS are used in turn, from launch to launch. A slot is emptied two layers before it is
// filled: late, so that it lies in the L2 when it is polled, but before any block can poll it.
// Blocks that own no rows run ahead into the next layer; its stream tells them that all owners are
// past what they published and emptied in this one. What the slot held two layers ago has been read
// by then, as every block's heads of the layer before went into the stream of this one.
constexpr int EMPTIED_AHEAD = 2;
static_assert(EMPTIED_AHEAD <= NUM_SLOTS - 2, "see above");
constexpr int PIECES_OF_BLOCK = sizeof(Slot) / 16 / OWNERS;
static_assert(sizeof(Slot) % (16 * OWNERS) == 0, "a slot is emptied in equal shares");
static_assert(sizeof(Slot) == SLOT_BYTES, "tactics.py and memory.cuh disagree on a slot");

struct Layer {
  const u8* at[COLUMNS];
  float unit[UNITS];
};

struct Shared {
  // Attention's ring and operands lie over these three, which are free when it runs.
  alignas(1024) u8 gate_up[EXPERT_SLOTS * TILE_BYTES];
  u8 down[TOP_K * JOB_BYTES];
  u8 qkv[QKV_TILES * TILE_BYTES];
  u8 o[O_BYTES];
  u8 shared_gate_up[TILE_BYTES];
  bf16 router[ROUTER_ROWS * HIDDEN];
  float gate_up_scale[EXPERTS], down_scale[EXPERTS];
  u8 shared_down[SHARED_JOBS * JOB_BYTES];
  alignas(16) bf16 x[WARPS][256];  // each warp's slice of the activations
  // Partial sums [tile][warp][row 16]. Phases that share a page have a block barrier in between.
  alignas(16) float wide[3 * WARPS * 16];
  alignas(16) float narrow[WARPS * 16];
  alignas(16) float gated[WARPS * 16];
  float logits[WARPS * 2], squares[2][WARPS];
  alignas(8) uint2 all_logits[OWNERS];
  float sine[HEAD / 2], cosine[HEAD / 2];
  alignas(16) u8 row[512];
  Layer layer[2];
  int position, ring_slot;    // here, not in registers, of which there are none to spare
  u32 first_slot;             // of the exchange, for layer 0
  attention::Share share[2];  // without and with a window
  float routing_weight[8], gate_up_unit[8], down_unit[8];
  u64 bar_qkv, bar_o, bar_shared_gate_up, bar_router, bar_shared_down, bar_down, bar_gate_up[3][2];
  u64 bar_pages[2 * ATTN_STAGES];
};
constexpr int RING_BYTES = EXPERT_SLOTS * TILE_BYTES + TOP_K * JOB_BYTES + QKV_TILES * TILE_BYTES;
static_assert(attention::Smem::kBars <= RING_BYTES, "attention's memory");
static_assert(attention::EARLY_STAGES * attention::kStageBytes <=
                  EXPERT_SLOTS * TILE_BYTES + TOP_K * JOB_BYTES,
              "early pages");
static_assert(sizeof(Shared) <= SMEM_BYTES, "shared memory");

// ---- requests of a layer's weights, a piece a warp ----
// Issuing a bulk copy takes a quarter of a microsecond, so every piece has a warp of its own:
// pieces 0..2 are qkv tiles, 3..4 halves of o, then shared gate/up, the router with the experts'
// scales, and the shared down.
constexpr int PIECES = 8, FIRST_WARP = WARPS - PIECES;
// Where in a layer they may be made; `schedule` has four bits for each piece.
enum Point { AFTER_O, AFTER_ROUTER, BEHIND_EXPERTS, AFTER_GATE_UP, AFTER_DOWN, POINTS };

// One thread.
__device__ __noinline__ void request(Shared& sm, const Layer& l, int piece) {
  const int b = blockIdx.x, first_tile = first_tile_of(b);
  const int num_tiles = first_tile_of(b + 1) - first_tile;
  const u8* from;
  u8* to;
  u32 num_bytes = TILE_BYTES, expected = 0;
  u64* bar;
  if (piece < 3) {
    bar = &sm.bar_qkv;
    if (piece == 0) expected = num_tiles * TILE_BYTES;
    to = sm.qkv + piece * TILE_BYTES, from = l.at[QKV] + (size_t)(first_tile + piece) * TILE_BYTES;
    if (piece >= num_tiles) return;
  } else if (b >= OWNERS) {
    return;
  } else if (piece < 5) {
    bar = &sm.bar_o, num_bytes = O_BYTES / 2;
    if (piece == 3) expected = O_BYTES;
    to = sm.o + (piece - 3) * num_bytes, from = l.at[O] + (2 * (size_t)b + piece - 3) * num_bytes;
  } else if (piece == 5) {
    bar = &sm.bar_shared_gate_up, expected = num_bytes;
    to = sm.shared_gate_up, from = l.at[SHARED_GATE_UP] + (size_t)b * num_bytes;
  } else if (piece == 6) {
    const int rows = router_rows_of(b);
    bar = &sm.bar_router, expected = rows * HIDDEN * 2 + 8 * EXPERTS, num_bytes = rows * HIDDEN * 2;
    to = (u8*)sm.router, from = l.at[ROUTER] + (size_t)b * ROUTER_ROWS * HIDDEN * 2;
  } else {
    bar = &sm.bar_shared_down, expected = num_bytes = SHARED_JOBS * JOB_BYTES;
    to = sm.shared_down, from = l.at[SHARED_DOWN] + (size_t)b * num_bytes;
  }
  if (expected) mbar_expect(bar, expected);
  if (num_bytes) bulk_load_once(to, from, num_bytes, bar);
  if (piece == 6) {
    bulk_load(sm.gate_up_scale, l.at[GATE_UP_SCALE], 4 * EXPERTS, bar);
    bulk_load(sm.down_scale, l.at[DOWN_SCALE], 4 * EXPERTS, bar);
  }
}

#endif  // INK_FLINT_LAYERS_MEMORY_CUH
