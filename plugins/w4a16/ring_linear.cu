// y = x W^T of one or several bf16 matrices of one width, as one stream of row tiles; T = 1..8.
//
// Block b of a grid of at most one block a multiprocessor takes the row tiles b, b + blocks, ... of
// all matrices one behind the other. Each warp owns VECTORS / NUM_WARPS vectors of K of every tile,
// which lie together, and a ring of STAGES stages in shared memory that bulk copies of its own
// fill: behind its first stages no warp waits for another but to add up a tile. A sum depends on
// K's split alone, and the split on K: it is that of linear.cu.
//
// Up to 192 KB a multiprocessor are asked for before the wait. All at once they would be 5.5 us of
// what the memory gives, and what is asked for meanwhile, activations and code of other kernels,
// would come behind them. So PACE stages of the block are on their way at once, about as many as
// keep the memory busy.
//
// Macros: MATRICES, ROWS (of each), INPUT_OF (the x of each; equal ones should be neighbors), DIM_K
// (K before padding, x8), NUM_WARPS (divides the vectors), STAGE_VECTORS (divides a warp's),
// STAGES, PACE (0: no bound); and what becomes of a product:
//   RESULT 0  y bf16
//   RESULT 1  y float32
//   RESULT 2  logits float32: the product, rounded to bf16 with ROUNDED, then with CAPPED
//             cap tanh(. / cap); and the block's largest and its lowest row, per token, for
//             `sample`
//   RESULT 3  y float32 to all ranks at once, see push.cuh; y0 is a table of peers
#include "choice.cuh"
#include "row_tiles.cuh"
#if RESULT == 3
#include "all_reduce/push.cuh"
static_assert(MATRICES == 1 && TRIGGER == 1, "see push.cuh");
#endif

static_assert(WEIGHTS == 1, "bf16 weights");
constexpr int THREADS = NUM_WARPS * 32;
constexpr int TILE_BYTES = VECTORS * CODE_BYTES, STAGE_BYTES = STAGE_VECTORS * CODE_BYTES;
constexpr int PARTS = NV / STAGE_VECTORS;  // stages of a warp's share of a tile
constexpr int HEAD_WARPS = 4;              // that have outputs
static_assert(NV % STAGE_VECTORS == 0, "whole stages");
static_assert(NUM_WARPS >= HEAD_WARPS, "128 outputs of a tile");

// What a tile belongs to. Of several matrices a table in shared memory: chosen by comparisons of a
// tile's number, which compile to branches or jumps, it delayed every request.
struct Matrix {
  const u8* weights;
  const bf16* x;
  void* y;
  int rows, first_tile;
};
struct Shared {
  alignas(128) u8 ring[NUM_WARPS * STAGES * STAGE_BYTES];
  // Of two tiles, so one barrier a tile is enough.
  alignas(16) float partial[2][NUM_WARPS * TILE_SUMS];
  u64 bars[NUM_WARPS * STAGES];
  u64 started;  // all warps have asked for their first stages
#if MATRICES > 1
  Matrix matrices[MATRICES];
#endif
#if RESULT == 2
  float best[HEAD_WARPS][MAX_TOKENS];
  int best_row[HEAD_WARPS][MAX_TOKENS];
#endif
#if RESULT == 3
  Push push;
#endif
};

// Templates, as loops over constant expressions were left to run time.
template <int M = 1>
INK_DEVICE int matrices_before(int tile) {
  if constexpr (M < MATRICES) {
    constexpr int first = first_tile(M);
    return (tile >= first) + matrices_before<M + 1>(tile);
  } else {
    return 0;
  }
}
#if MATRICES > 1
template <int M = 0>
INK_DEVICE void write_table(Shared& sm, const u8* const (&weights)[8], const bf16* const (&xs)[4],
                            void* const (&ys)[8]) {
  if constexpr (M < MATRICES) {
    constexpr int input = input_of(M), rows = rows_of(M), first = first_tile(M);
    if (threadIdx.x == M) sm.matrices[M] = {weights[M], xs[input], ys[M], rows, first};
    write_table<M + 1>(sm, weights, xs, ys);
  }
}
#endif
INK_DEVICE Matrix matrix_of(const Shared& sm, const Matrix& only, int tile) {
#if MATRICES > 1
  return sm.matrices[matrices_before(tile)];
#else
  return only;
#endif
}

// A warp's stages. All lanes call everything in the same order.
struct Stream {
  Shared& sm;
  const Matrix& only;  // if there is one
  u8* ring;
  u64* bars;
  int warp, lane;
  // The stage to be requested next: part `part` of tile `tile`.
  int tile = blockIdx.x, part = 0;
  const u8* source = nullptr;
  int slot = 0;  // that is used next
  u32 parity = 0;

  INK_DEVICE const u8* next() {  // null: no more
    if (tile >= NUM_TILES) return nullptr;
    if (part == 0) {
      const Matrix matrix = matrix_of(sm, only, tile);
      source = matrix.weights + (size_t)(tile - matrix.first_tile) * TILE_BYTES +
               warp * NV * CODE_BYTES;
    }
    const u8* stage = source;
    source += STAGE_BYTES;
    if (++part == PARTS) part = 0, tile += gridDim.x;
    return stage;
  }
  INK_DEVICE void request(int to, bool is_again, int* error) {
    const u8* from = next();
    if (from && lane == 0) {
      // Whoever waits for a first stage must not find that its barrier is two stages on.
      if (PACE > 0 && is_again) mbar_wait(&sm.started, 0, error);
      mbar_expect(bars + to, STAGE_BYTES);
      load_weights(ring + to * STAGE_BYTES, from, STAGE_BYTES, bars + to);
    }
  }
  // The table is there behind it.
  INK_DEVICE void begin(int* error) {
    if (lane == 0)
#pragma unroll
      for (int s = 0; s < STAGES; s++) mbar_init(bars + s, 1);
    if (threadIdx.x == 0) mbar_init(&sm.started, NUM_WARPS);
    __syncthreads();  // warps wait for each other's stages, and read the table
#pragma unroll 1
    for (int s = 0; s < STAGES; s++) {
      const int before = s * NUM_WARPS + warp - PACE;
      if (PACE > 0 && before >= 0 && tile < NUM_TILES && lane == 0)
        mbar_wait(sm.bars + before % NUM_WARPS * STAGES + before / NUM_WARPS, 0, error);
      request(s, false, error);
    }
    if (lane == 0) mbar_arrive(&sm.started);
    __syncwarp();
  }
  INK_DEVICE void multiply_stage(Tile& sum, const Tokens* b, int* error) {
    mbar_wait(bars + slot, parity, error);
    const u8* stage = ring + slot * STAGE_BYTES + lane * 16;
#pragma unroll
    for (int v = 0; v < STAGE_VECTORS; v++) {
      Codes codes;
#pragma unroll
      for (int m = 0; m < 4; m++)
        codes.w[m] = *(const uint4*)(stage + v * CODE_BYTES + m * 512);
      multiply(sum, codes, Scales{0, 0}, b[v]);
    }
    __syncwarp();  // all lanes are done with the stage
    request(slot, true, error);
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

// Parameters of places that there are not: any pointer. cap, best and best_row are read with
// RESULT 2 only.
extern "C" __global__ void __maxnreg__(NV <= 4 ? 64 : 96)
    ring_linear(const u8* w0, const u8* w1, const u8* w2, const u8* w3, const u8* w4, const u8* w5,
                const u8* w6, const u8* w7, const bf16* x0, const bf16* x1, const bf16* x2,
                const bf16* x3, void* y0, void* y1, void* y2, void* y3, void* y4, void* y5,
                void* y6, void* y7, float* best, int* best_row, int* error, int num_rows,
                float cap
#if RESULT == 3
                ,
                const int* num_tokens
#endif
    ) {
  const int T = ONE_TOKEN ? 1 : num_rows;
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  trigger_first();
  const Matrix only = {w0, x0, y0, rows_of(0), 0};
#if MATRICES > 1
  write_table(sm, {w0, w1, w2, w3, w4, w5, w6, w7}, {x0, x1, x2, x3},
              {y0, y1, y2, y3, y4, y5, y6, y7});
#endif
  Stream stream = {
      sm, only, sm.ring + warp * STAGES * STAGE_BYTES, sm.bars + warp * STAGES, warp, lane};
#if RESULT == 3
  const Peers* const peers = (const Peers*)y0;
  const Push::Asked asked = Push::asked(peers, error, num_tokens);  // in front of large loads
#endif
  stream.begin(error);
#if RESULT == 3
  sm.push.keep(asked);
#endif
  wait_and_trigger();
#if RESULT == 3
  const u32 push_word = Push::word_of(asked);
#endif

  Activations<NV> b;
  const bf16* x = nullptr;
  const int token = tid & 7;
#if RESULT == 2
  Choice largest = least_choice(0x7FFFFFFF);
#endif
  int round = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < NUM_TILES; tile += gridDim.x, round ^= 1) {
    const Matrix matrix = matrix_of(sm, only, tile);
    if (matrix.x != x) {
      x = matrix.x;
      load_rows(b, x, warp * NV, lane, T);
    }
    Tile sum = zero_tile();
#pragma unroll
    for (int p = 0; p < PARTS; p++) stream.multiply_stage(sum, b.v + p * STAGE_VECTORS, error);
    float* partial = sm.partial[round];
    store_tile(partial + warp * TILE_SUMS, sum, lane);
#if RESULT == 3
    if (tile == blockIdx.x) sm.push.keep(push_word, peers);
#endif
    __syncthreads();
    const int row = (tile - matrix.first_tile) * 16 + (tid >> 3);
    if (tid < 128 && token < T && row < matrix.rows) {
      const float* sums = partial + (tid >> 3) * TOKEN_COLUMNS + token;
      const float y = strided_sum<NUM_WARPS>(sums, TILE_SUMS);
      const size_t at = (size_t)token * matrix.rows + row;
#if RESULT == 0
      ((bf16*)matrix.y)[at] = to_bf16(y);
#elif RESULT == 1
      ((float*)matrix.y)[at] = y;
#elif RESULT == 3
      sm.push.send(token, at, y);
#else
      float logit = ROUNDED ? round_bf16(y) : y;
      if (CAPPED) logit = tanhf(logit / cap) * cap;
      ((float*)matrix.y)[at] = logit;
      keep_better(largest, logit, row);
#endif
    }
  }
#if RESULT == 2
  if (warp < HEAD_WARPS) {
    keep_best_of_warp<8>(largest);
    if (lane < 8) {
      sm.best[warp][lane] = largest.value;
      sm.best_row[warp][lane] = largest.row;
    }
  }
  __syncthreads();
  if (tid < T) {
#pragma unroll
    for (int q = 0; q < HEAD_WARPS; q++) keep_better(largest, sm.best[q][tid], sm.best_row[q][tid]);
    best[tid * gridDim.x + blockIdx.x] = largest.value;
    best_row[tid * gridDim.x + blockIdx.x] = largest.row;
  }
#endif
}
