// y = x W^T of one or several matrices of one width, quantized or bf16, as one stream of row tiles;
// T = 1..8.
//
// The stream of ring_linear.cu for weights in the vectors of moe/weights.cuh: the same split of K
// over warps and the same order of additions, so bits depend neither on T nor on the ring. All
// quantized matrices have one FORMAT; others may be bf16, in the chunks of ring_linear.cu. A bf16
// tile has up to 3.6 times the bytes: such matrices come first in the list, and the blocks that have
// a tile more than others are counted from the last one.
//
// Macros: FORMAT, MATRICES, ROWS (of each), IS_PLAIN (1 for each that is bf16), INPUTS, INPUT_OF
// (the x of each), DIM_K (K before padding, x8), BLOCKS, NUM_WARPS (divides the vectors),
// STAGE_VECTORS and PLAIN_VECTORS (of a stage of a quantized and of a bf16 tile; divide a warp's
// share; no bf16: PLAIN_VECTORS 0), STAGES, FLOAT_RESULT.
#include "moe/weights.cuh"
#include "row_tiles.cuh"

static_assert(FORMAT != FORMAT_BF16, "that is ring_linear.cu");
constexpr int PLAIN_BYTES = 2048;  // of a bf16 vector
constexpr int STAGE_BYTES = STAGE_VECTORS * VECTOR_BYTES;
constexpr int PLAIN_STAGE_BYTES = PLAIN_VECTORS * PLAIN_BYTES;
constexpr int SLOT_BYTES = STAGE_BYTES > PLAIN_STAGE_BYTES ? STAGE_BYTES : PLAIN_STAGE_BYTES;
// Stages of a warp's share of a tile.
constexpr int PARTS = NV / STAGE_VECTORS;
constexpr int PLAIN_PARTS = PLAIN_VECTORS ? NV / (PLAIN_VECTORS ? PLAIN_VECTORS : 1) : 0;
static_assert(PARTS * STAGE_VECTORS == NV, "whole shares");
static_assert(PLAIN_PARTS * PLAIN_VECTORS == (PLAIN_VECTORS ? NV : 0), "whole shares");
static_assert(NUM_WARPS >= 4, "128 outputs of a tile");

__device__ constexpr bool is_plain(int matrix) { return PLAIN_VECTORS && pick(matrix, IS_PLAIN); }
constexpr int REST_TILES = NUM_TILES % BLOCKS, FULL_TILES = NUM_TILES - REST_TILES;

// The block's tile behind `tile`; NUM_TILES or more: none. The last REST_TILES blocks share what is
// left of whole rounds.
INK_DEVICE int next_tile(int tile) {
  tile += BLOCKS;
  if (REST_TILES == 0 || tile < FULL_TILES || tile >= FULL_TILES + BLOCKS) return tile;
  tile -= BLOCKS - REST_TILES;
  return tile < FULL_TILES ? NUM_TILES : tile;
}

struct Shared {
  alignas(128) u8 ring[NUM_WARPS * STAGES * SLOT_BYTES];
  // Of two tiles, so one barrier a tile is enough.
  alignas(16) float partial[2][NUM_WARPS * TILE_SUMS];
  u64 bars[NUM_WARPS * STAGES];
};

struct Pointers {
  const u8* weights[8];
  const float* scales[8];
  const bf16* x[4];
  void* y[8];
};
// What a tile belongs to.
struct Place {
  const u8* weights;  // of the tile
  const float* scale;
  void* y;
  int input, rows, first;  // rows of the matrix; the tile's first
  bool plain;
};
INK_DEVICE Place place_of(const Pointers& p, int tile) {
  Place place = {p.weights[0], p.scales[0], p.y[0], input_of(0), rows_of(0), tile, is_plain(0)};
#pragma unroll
  for (int m = 1; m < MATRICES; m++)
    if (tile >= first_tile(m))
      place = {p.weights[m], p.scales[m],          p.y[m],     input_of(m),
               rows_of(m),   tile - first_tile(m), is_plain(m)};
  place.weights += (size_t)place.first * VECTORS * (place.plain ? PLAIN_BYTES : VECTOR_BYTES);
  place.first *= 16;
  return place;
}
// What the tile's sums are multiplied by.
INK_DEVICE float unit_of(const Place& place) {
  if (place.plain) return 1.f;
  return FORMAT == FORMAT_NVFP4 ? load_weight_float(place.scale) * UNIT : UNIT;
}

// Walks over the stages of a warp's shares of the block's tiles.
struct Cursor {
  int tile = blockIdx.x, part = 0;
  const u8* source = nullptr;
  bool plain = false;

  // Gives false at the end.
  INK_DEVICE bool next(const Pointers& pointers, int warp, const u8*& from, u32& size) {
    if (tile >= NUM_TILES) return false;
    if (part == 0) {
      const Place place = place_of(pointers, tile);
      plain = place.plain;
      source = place.weights + warp * NV * (plain ? PLAIN_BYTES : VECTOR_BYTES);
    }
    from = source, size = plain ? PLAIN_STAGE_BYTES : STAGE_BYTES;
    source += size;
    if (++part == (plain ? PLAIN_PARTS : PARTS)) part = 0, tile = next_tile(tile);
    return true;
  }
};

// A warp's stages. All lanes call everything in the same order.
struct Stream {
  const Pointers& pointers;
  u8* ring;
  u64* bars;
  int warp, lane;
  Cursor cursor = {};  // of the stage to be requested next
  int slot = 0;        // that is used next
  u32 parity = 0;

  INK_DEVICE void request(int to) {
    const u8* from;
    u32 size;
    if (cursor.next(pointers, warp, from, size) && lane == 0) {
      mbar_expect(bars + to, size);
      if (ONE_TOKEN)  // weights are the first to leave the L2
        bulk_load_once(ring + to * SLOT_BYTES, from, size, bars + to);
      else
        bulk_load(ring + to * SLOT_BYTES, from, size, bars + to);
    }
  }
  INK_DEVICE void start() {
    if (lane == 0)
#pragma unroll
      for (int s = 0; s < STAGES; s++) mbar_init(bars + s, 1);
#pragma unroll 1
    for (int s = 0; s < STAGES; s++) request(s);
    __syncwarp();  // all lanes see the barriers
  }
  INK_DEVICE const u8* wait(int* error) {
    mbar_wait(bars + slot, parity, error);
    return ring + slot * SLOT_BYTES;
  }
  INK_DEVICE void refill() {
    __syncwarp();  // all lanes are done with the stage
    request(slot);
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
  INK_DEVICE void multiply(Tile& sum, const Activations<NV>& b, int* error) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const u8* stage = wait(error);
#pragma unroll
      for (int v = 0; v < STAGE_VECTORS; v++)
        multiply_vector(sum, stage + v * VECTOR_BYTES, b.v[p * STAGE_VECTORS + v], lane);
      refill();
    }
  }
  INK_DEVICE void multiply_plain(Tile& sum, const Activations<NV>& b, int* error) {
#pragma unroll
    for (int p = 0; p < PLAIN_PARTS; p++) {
      const u8* stage = wait(error) + lane * 16;
#pragma unroll
      for (int v = 0; v < PLAIN_VECTORS; v++) {
        const Tokens& t = b.v[p * PLAIN_VECTORS + v];
        const u32 x[8] = {t.lo.x, t.lo.y, t.lo.z, t.lo.w, t.hi.x, t.hi.y, t.hi.z, t.hi.w};
#pragma unroll
        for (int m = 0; m < 4; m++) {
          const uint4 w = *(const uint4*)(stage + v * PLAIN_BYTES + m * 512);
          const u32 a[4] = {w.x, w.y, w.z, w.w};
          mma_bf16(sum.c[m & 1], a, x[2 * m], x[2 * m + 1]);
        }
      }
      refill();
    }
  }
};

constexpr int REGISTERS = NV <= 4 ? 64 : NUM_WARPS <= 12 ? 104 : 96;

// Parameters of places that there are not, and scales but those of NVFP4: any pointer.
extern "C" __global__ void __maxnreg__(REGISTERS)
    ring_quant(const u8* w0, const u8* w1, const u8* w2, const u8* w3, const u8* w4, const u8* w5,
               const u8* w6, const u8* w7, const float* s0, const float* s1, const float* s2,
               const float* s3, const float* s4, const float* s5, const float* s6, const float* s7,
               const bf16* x0, const bf16* x1, const bf16* x2, const bf16* x3, void* y0, void* y1,
               void* y2, void* y3, void* y4, void* y5, void* y6, void* y7, int* error,
               int num_rows) {
  const int T = ONE_TOKEN ? 1 : num_rows;
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const Pointers pointers = {{w0, w1, w2, w3, w4, w5, w6, w7},
                             {s0, s1, s2, s3, s4, s5, s6, s7},
                             {x0, x1, x2, x3},
                             {y0, y1, y2, y3, y4, y5, y6, y7}};
  trigger_first();
  // In front of the weights, behind which it would come.
  float unit = unit_of(place_of(pointers, blockIdx.x));
  Stream stream = {pointers, sm.ring + warp * STAGES * SLOT_BYTES, sm.bars + warp * STAGES, warp,
                   lane};
  stream.start();
  wait_and_trigger();

  Activations<NV> b;
  int input = -1, round = 0;
  const int token = tid & 7;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < NUM_TILES; round ^= 1) {
    const Place place = place_of(pointers, tile);
    if (place.input != input) {
      input = place.input;
      const bf16* x = pointers.x[0];
#pragma unroll
      for (int i = 1; i < INPUTS; i++)
        if (input == i) x = pointers.x[i];
      load_rows(b, x, warp * NV, lane, T);
    }
    tile = next_tile(tile);
    const float next_unit = tile < NUM_TILES ? unit_of(place_of(pointers, tile)) : 0.f;
    Tile sum = zero_tile();
    if (place.plain)
      stream.multiply_plain(sum, b, error);
    else
      stream.multiply(sum, b, error);
    float* partial = sm.partial[round];
    store_tile(partial + warp * TILE_SUMS, sum, lane);
    __syncthreads();
    const int row = place.first + (tid >> 3);
    if (tid < 128 && token < T && row < place.rows) {
      const float* sums = partial + (tid >> 3) * TOKEN_COLUMNS + token;
      const float y = strided_sum<NUM_WARPS>(sums, TILE_SUMS) * unit;
      const size_t at = (size_t)token * place.rows + row;
#if FLOAT_RESULT
      ((float*)place.y)[at] = y;
#else
      ((bf16*)place.y)[at] = to_bf16(y);
#endif
    }
    unit = next_unit;
  }
}
