// Products for many tokens: the tiled counterpart of the kernels for 1..8 tokens, on the same
// chunks.
//
// A block of four warps makes BLOCK_ROWS rows of y = x W^T for up to BLOCK_TOKENS tokens. It walks
// K in steps of a chunk (bf16: half of one), STAGES - 1 of which are on their way to shared memory.
// A warp turns its WARP_TILES row tiles of a step into A operands in registers once and multiplies
// them with all tokens, TOKEN_TILES tiles of eight. Each token is a column of its own, so its bits
// depend neither on which tokens stand beside it nor on where the block begins; they differ from
// those of the kernels for 1..8 tokens, which split K among warps.
//
// Macros: WARP_TILES, TOKEN_TILES, STAGES; ROW_MAJOR for a bf16 matrix [rows, K] that is not
// packed.
#ifndef INK_TILE_CUH
#define INK_TILE_CUH
#include "w4a16.cuh"

#ifndef ROW_MAJOR
#define ROW_MAJOR 0
#endif

constexpr int WARPS = 4, THREADS = WARPS * 32;
constexpr int STEP_K = WEIGHTS ? 128 : 256, STEP_VECTORS = STEP_K / VECTOR_K;
constexpr int ROW_PIECES = STEP_K / 8;  // of 16 bytes
constexpr int BLOCK_TILES = WARPS * WARP_TILES, BLOCK_ROWS = BLOCK_TILES * 16;
constexpr int BLOCK_TOKENS = TOKEN_TILES * 8;
constexpr int ROW_STRIDE = STEP_K + 8;  // values of a row in shared memory: no bank conflicts
// Of a row tile.
constexpr int STEP_BYTES = ROW_MAJOR ? 16 * ROW_STRIDE * 2 : CHUNK_BYTES / 256 * STEP_K;
static_assert(!ROW_MAJOR || WEIGHTS, "a matrix that is not packed is bf16");

struct Stage {
  alignas(128) u8 weights[BLOCK_TILES * STEP_BYTES];
  alignas(16) bf16 x[BLOCK_TOKENS * ROW_STRIDE];
};

typedef float Sums[WARP_TILES][TOKEN_TILES][4];

// The tokens of a block of a step of `num_tokens`.
struct TokenBlock {
  int first, count;  // count: 0 or less for none
  INK_DEVICE int tiles() const { return (count + 7) / 8; }
};
INK_DEVICE TokenBlock token_block(int index, const int* num_tokens) {
  const int first = index * BLOCK_TOKENS;
  return {first, min(load_act_int(num_tokens) - first, BLOCK_TOKENS)};
}

#if ROW_MAJOR
// The A operands of a vector of a row tile.
INK_DEVICE void load_operands(u32 (&a)[4][4], const u8* tile, int vector, uint2, int lane) {
  const int k = vector * VECTOR_K + (lane & 3) * 16;
  const bf16* p = (const bf16*)tile + (lane >> 2) * ROW_STRIDE + k;
  const bf16* q = p + 8 * ROW_STRIDE;
  const uint4 l0 = *(const uint4*)p, l1 = *(const uint4*)(p + 8);
  const uint4 h0 = *(const uint4*)q, h1 = *(const uint4*)(q + 8);
  const u32 low[8] = {l0.x, l0.y, l0.z, l0.w, l1.x, l1.y, l1.z, l1.w};
  const u32 high[8] = {h0.x, h0.y, h0.z, h0.w, h1.x, h1.y, h1.z, h1.w};
#pragma unroll
  for (int m = 0; m < 4; m++) {
    a[m][0] = low[2 * m], a[m][1] = high[2 * m];
    a[m][2] = low[2 * m + 1], a[m][3] = high[2 * m + 1];
  }
}
#elif WEIGHTS
INK_DEVICE void load_operands(u32 (&a)[4][4], const u8* tile, int vector, uint2, int lane) {
#pragma unroll
  for (int m = 0; m < 4; m++) {
    const uint4 w = *(const uint4*)(tile + vector * CODE_BYTES + m * 512 + lane * 16);
    a[m][0] = w.x, a[m][1] = w.y, a[m][2] = w.z, a[m][3] = w.w;
  }
}
#else
INK_DEVICE void load_operands(u32 (&a)[4][4], const u8* tile, int vector, uint2 scales, int lane) {
  const uint4 w = *(const uint4*)(tile + vector * CODE_BYTES + lane * 16);
  const u32 codes[4] = {w.x, w.y, w.z, w.w};
  const u32 bytes = vector & 2 ? scales.y : scales.x;
  const Scales s = vector & 1 ? scales_of<1>(bytes) : scales_of<0>(bytes);
#pragma unroll
  for (int m = 0; m < 4; m++) dequantize(a[m], codes[m], s);
}
#endif

// One step of a warp; IS_FULL: all token tiles, else the first `tiles`.
template <bool IS_FULL>
INK_DEVICE void multiply_step(Sums& c, const Stage& stage, int tiles) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u8* weights = stage.weights + warp * WARP_TILES * STEP_BYTES;
  const bf16* x = stage.x + (lane >> 2) * ROW_STRIDE + (lane & 3) * 16;
  uint2 scales[WARP_TILES];
#pragma unroll
  for (int r = 0; r < WARP_TILES; r++)
    scales[r] =
        WEIGHTS ? make_uint2(0, 0) : *(const uint2*)(weights + r * STEP_BYTES + 2048 + lane * 8);
#pragma unroll
  for (int v = 0; v < STEP_VECTORS; v++) {
    u32 a[WARP_TILES][4][4];
#pragma unroll
    for (int r = 0; r < WARP_TILES; r++)
      load_operands(a[r], weights + r * STEP_BYTES, v, scales[r], lane);
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
      if (!IS_FULL && n >= tiles) break;
      const bf16* p = x + n * 8 * ROW_STRIDE + v * VECTOR_K;
      const uint4 lo = *(const uint4*)p, hi = *(const uint4*)(p + 8);
      const u32 b[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
      for (int m = 0; m < 4; m++)
#pragma unroll
        for (int r = 0; r < WARP_TILES; r++) mma_bf16(c[r][n], a[r][m], b[2 * m], b[2 * m + 1]);
    }
  }
}

// A block's rows of a matrix of NUM_ROWS rows of K values.
template <int NUM_ROWS, int K>
struct Product {
  static constexpr int STEPS = K / STEP_K, NUM_TILES = (NUM_ROWS + 15) / 16;
  static_assert(K % 256 == 0, "whole chunks");
  const u8* matrix;
  int first_tile;

  INK_DEVICE void load_weights(Stage& stage, int step) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int r = 0; r < WARP_TILES; r++) {
      const int i = warp * WARP_TILES + r;
      const int tile = min(first_tile + i, NUM_TILES - 1);  // what is past the end is not stored
      u8* to = stage.weights + i * STEP_BYTES;
#if ROW_MAJOR
#pragma unroll 4
      for (int p = lane; p < 16 * ROW_PIECES; p += 32) {
        const int row = p / ROW_PIECES, k = p % ROW_PIECES * 8;
        const bf16* from = (const bf16*)matrix + (size_t)min(tile * 16 + row, NUM_ROWS - 1) * K;
        copy_async16(to + (row * ROW_STRIDE + k) * 2, from + step * STEP_K + k);
      }
#else
      const u8* from = matrix + (size_t)tile * tile_bytes(K) + step * STEP_BYTES;
#pragma unroll
      for (int at = lane * 16; at < STEP_BYTES; at += 512) copy_async16(to + at, from + at);
#endif
    }
  }
  // Where this thread's pieces of 16 bytes of a step of x come from, in values.
  struct Sources {
    static constexpr int COUNT = BLOCK_TOKENS * ROW_PIECES / THREADS, APART = THREADS / ROW_PIECES;
    static constexpr u32 NONE = ~0u;
    u32 at[COUNT];

    INK_DEVICE explicit Sources(const int* rows) {
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        const int row = rows[threadIdx.x / ROW_PIECES + i * APART];
        at[i] = row < 0 ? NONE : (u32)row * K + threadIdx.x % ROW_PIECES * 8;
      }
    }
    INK_DEVICE void load(Stage& stage, const bf16* x, int step) const {
      bf16* to = stage.x + threadIdx.x / ROW_PIECES * ROW_STRIDE + threadIdx.x % ROW_PIECES * 8;
#pragma unroll
      for (int i = 0; i < COUNT; i++)
        if (at[i] != NONE) copy_async16(to + i * APART * ROW_STRIDE, x + at[i] + step * STEP_K);
    }
  };
  // The first weights, which may be requested before the wait.
  INK_DEVICE void start(Stage* stages) const {
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
      if (s < STEPS) load_weights(stages[s], s);
  }
  // After `start` and a barrier behind the writes of `rows`, which are those of x for each of the
  // block's tokens, below 0 for none. Ends with a barrier: then `stages` are free.
  INK_DEVICE void run(Sums& c, Stage* stages, const bf16* x, const int* rows, int tiles) const {
#pragma unroll
    for (int r = 0; r < WARP_TILES; r++)
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[r][n][i] = 0.f;
    const Sources sources(rows);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
      if (s < STEPS) sources.load(stages[s], x, s);
      copy_async_commit();
    }
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
      copy_async_wait_but<STAGES - 2>();
      __syncthreads();
      const int next = step + STAGES - 1;
      if (next < STEPS) {
        load_weights(stages[next % STAGES], next);
        sources.load(stages[next % STAGES], x, next);
      }
      copy_async_commit();
      if (tiles == TOKEN_TILES)
        multiply_step<true>(c, stages[step % STAGES], tiles);
      else
        multiply_step<false>(c, stages[step % STAGES], tiles);
    }
    __syncthreads();
  }
};

// ---- results, as bf16 [token][row of the block] in shared memory ----
template <int ROWS>
struct Staged {
  static constexpr int STRIDE = ROWS + 8;
  alignas(16) bf16 y[BLOCK_TOKENS * STRIDE];

  // bf16(c unit); ends with a barrier, as the others do.
  INK_DEVICE void plain(const Sums& c, float unit, int tiles) {
    fill(c, tiles, [&](const float (&v)[4], int tile, int token, int g) {
      bf16* p = y + token * STRIDE + tile * 16 + g;
      p[0] = to_bf16(v[0] * unit), p[STRIDE] = to_bf16(v[1] * unit);
      p[8] = to_bf16(v[2] * unit), p[STRIDE + 8] = to_bf16(v[3] * unit);
    });
  }
  // bf16(silu(gate) up) of tiles of eight gate and eight up rows. IS_ROUNDED: gate and up are
  // rounded, and the activation is exact; else neither.
  template <bool IS_ROUNDED>
  INK_DEVICE void gated(const Sums& c, float unit, int tiles) {
    fill(c, tiles, [&](const float (&v)[4], int tile, int token, int g) {
      bf16* p = y + token * STRIDE + tile * 8 + g;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float gate = v[i] * unit, up = v[2 + i] * unit;
        p[i * STRIDE] = IS_ROUNDED ? to_bf16(silu_exact(round_bf16(gate)) * round_bf16(up))
                                   : to_bf16(silu_approx(gate) * up);
      }
    });
  }
  INK_DEVICE uint4 piece(int token, int i) const {
    return *(const uint4*)(y + token * STRIDE + i * 8);
  }

 private:
  template <class F>
  INK_DEVICE void fill(const Sums& c, int tiles, F put) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int r = 0; r < WARP_TILES; r++)
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++)
        if (n < tiles) put(c[r][n], warp * WARP_TILES + r, n * 8 + (lane & 3) * 2, lane >> 2);
    __syncthreads();
  }
};

// What comes before the product of a block's tokens: its first weights are requested, its rows are
// listed (-1: none), and the kernels before have ended. Gives the tensor's unit, see `tensor_unit`.
template <class PRODUCT>
INK_DEVICE float begin(const PRODUCT& product, const TokenBlock& tokens, Stage* stages, int* rows,
                       const float* scale) {
  const int tid = threadIdx.x;
  if (tokens.count > 0) product.start(stages);
  const float unit = ROW_MAJOR ? 1.f : tensor_unit(scale);
  if (tid < BLOCK_TOKENS) rows[tid] = tid < tokens.count ? tokens.first + tid : -1;
  __syncthreads();
  wait_and_trigger();
  return unit;
}

#endif  // INK_TILE_CUH
