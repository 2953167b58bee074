// Residual add, RMSNorm, query/key/value projection, RMSNorm of query and key heads, rotary
// positions, and the write of keys and values into the cache. T = 1..8 tokens; hidden size at most
// 2048.
//
// The row tiles are dealt out evenly to BLOCKS blocks. A tile holds rows 8i.. and 64+8i.. of a
// head, so rotary pairs meet in one thread, and the blocks of a head exchange nothing but sums of
// squares: through words of device memory that hold a sum and the number of the launch. So all
// blocks must fit the GPU at once, which under programmatic launch they do: blocks of a later
// kernel start only when all of these have.
//
// Of a block's tiles STAGED come to shared memory and EARLY to registers before the wait, the
// others after the norm: all are staged in NVFP4; in bf16 a tile is large, so one token has one in
// either place, such that a block fits beside one of `down`, and more tokens take all of them late.
// Nothing else is computed before the wait: a block often starts less than a microsecond in front
// of it, and a warp that still works then keeps all from the norm.
//
// A cache page is 64 tokens of one head: [half of the head][token][64 values], the 16-byte piece c
// of a row at c ^ (token & 7); see docs/kernels.md. A ring of RING rows is RING / 64 pages of a
// slot; without (RING = 0) `where` is the page table.
#include "sin_cos.cuh"
#include "w4a16.cuh"

constexpr int HEAD = 128, HEAD_TILES = HEAD / 16, PAGE = 64, PAGE_BYTES = PAGE * HEAD * 2;
constexpr int WARPS = 16, THREADS = WARPS * 32;
constexpr int ROW_TILES = (HEADS + 2 * KV_HEADS) * HEAD_TILES;
constexpr int TILES = (ROW_TILES + BLOCKS - 1) / BLOCKS;  // of a block, at most
constexpr int NV = vectors_per_warp(HIDDEN, WARPS), LIVE_WARPS = HIDDEN / VECTOR_K / NV;
constexpr int TILE_BYTES = tile_bytes(HIDDEN);
constexpr int LATE = TILES - STAGED - EARLY;
static_assert(LATE >= 0, "more tiles before the wait than there are");
static_assert(TILES * 64 <= THREADS, "a thread for each pair of rows and token");
using InputNorm = Norm<HIDDEN, THREADS, HAS_DELTA>;

struct Shared {
#if STAGED
  alignas(128) u8 weights[STAGED * TILE_BYTES];
#endif
  InputNorm::Memory norm;
  alignas(16) float partial[TILES * LIVE_WARPS * TILE_SUMS];
  u64 bar;
};

#if ROPE
__constant__ float INVERSE_FREQUENCIES[HEAD / 2] = {INV_FREQ};
#endif

// This warp's share of staged tiles. A loop: code has to be fetched, and warps hide each other's
// latency.
INK_DEVICE void project_staged(int count, const Activations<NV>& b, const u8* tiles, float* partial,
                               int warp, int lane) {
#pragma unroll 1
  for (int d = 0; d < count; d++) {
    Tile tile = zero_tile();
    multiply_shared<NV>(tile, tiles + d * TILE_BYTES, b, warp * NV, lane);
    store_tile(partial + (d * LIVE_WARPS + warp) * TILE_SUMS, tile, lane);
  }
}
// That of N tiles of which nothing is on its way yet, at most three at a time: registers end there.
template <int N>
INK_DEVICE void project(const Activations<NV>& b, const u8* tiles, float* partial, int warp,
                        int lane) {
  if constexpr (N > 3) {
    constexpr int HALF = N / 2;
    project<HALF>(b, tiles, partial, warp, lane);
    project<N - HALF>(b, tiles + HALF * TILE_BYTES, partial + HALF * LIVE_WARPS * TILE_SUMS, warp,
                      lane);
  } else if constexpr (N > 0) {
    Tile tile[N];
#pragma unroll
    for (int d = 0; d < N; d++) {
      Fragment<NV> w;
      load_fragment<NV>(w, tiles + d * TILE_BYTES, warp * NV, lane);
      tile[d] = zero_tile();
      multiply_fragment<NV>(tile[d], w, b);
    }
#pragma unroll
    for (int d = 0; d < N; d++)
      store_tile(partial + (d * LIVE_WARPS + warp) * TILE_SUMS, tile[d], lane);
  }
}
// The same where the last of at most N tiles may be missing.
template <int N>
INK_DEVICE void project_some(int count, const Activations<NV>& b, const u8* tiles, float* partial,
                             int warp, int lane) {
  if (count == N)
    project<N>(b, tiles, partial, warp, lane);
  else
    project<(N > 1 ? N - 1 : 0)>(b, tiles, partial, warp, lane);
}

// `exchange`: [head][token 8][tile 8] words, the launch's number in the upper half.
extern "C" __global__ void __maxnreg__(REGISTERS)
    qkv(const bf16* x, const bf16* delta, const bf16* norm_weight, const u8* weights,
        const float* scale, const bf16* q_norm, const bf16* k_norm, u8* k_cache, u8* v_cache,
        const int* where, const int* position, const int* num_tokens, bf16* q_out, bf16* residual,
        u64* exchange, int* error, int num_rows, float eps) {
  const int T = ONE_TOKEN ? 1 : num_rows;
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int first = blockIdx.x * ROW_TILES / BLOCKS;
  const int count = (blockIdx.x + 1) * ROW_TILES / BLOCKS - first;
  trigger_first();
  const u8* const tiles = weights + (size_t)first * TILE_BYTES;
#if STAGED
  if (tid == 0) {
    const u32 staged_bytes = min(STAGED, count) * TILE_BYTES;
    mbar_init(&sm.bar, 1);
    mbar_expect(&sm.bar, staged_bytes);
    load_weights(sm.weights, tiles, staged_bytes, &sm.bar);
  }
#endif
  InputNorm::load_weight(sm.norm, norm_weight);

  // Behind all loads that are waited for.
#if EARLY
  Fragment<NV> w[EARLY];
#pragma unroll
  for (int d = 0; d < EARLY; d++)
    if (warp < LIVE_WARPS && STAGED + d < count)
      load_fragment<NV>(w[d], tiles + (STAGED + d) * TILE_BYTES, warp * NV, lane);
#endif

  wait_and_trigger();
  InputNorm::run(sm.norm, x, delta, eps, residual, nullptr, T,
                 blockIdx.x < T ? (int)blockIdx.x : -1);
  // Each thread below 64 count finishes one rotary pair of one token: rows `pair` and `pair` + 64.
  // What it needs is on its way while the tiles are multiplied.
  const int piece = tid >> 6, token = tid >> 3 & 7;
  const u32 row_tile = first + piece;  // unsigned: quotients take fewer instructions
  const int head = row_tile / HEAD_TILES, tile = row_tile % HEAD_TILES;
  const int pair = tile * 8 + (tid & 7);
  const bool is_value = head >= HEADS + KV_HEADS, is_query = head < HEADS;
  const bool busy = piece < count && token < T;
  u64* const words = exchange + (head * MAX_TOKENS + token) * HEAD_TILES;
  float unit = 0;
  u32 norm_low = 0, norm_high = 0, p = 0, slot = 0;
  bool is_stored = false;
  if (busy) {
    const bf16* const head_norm = (is_query ? q_norm : k_norm) + pair;
    unit = tensor_unit(scale);
    norm_low = load_weight2(head_norm);
    norm_high = load_weight2(head_norm + HEAD / 2);
    p = load_act_int(position) + token;
    if (!is_query) is_stored = token < load_act_int(num_tokens);
#if RING
    slot = load_act_int(where);
#endif
  }
  // Only this block writes the words of its tiles, so they tell the last launch's number.
  u32 number = 0;
  if (busy && !is_value) number = (u32)(load_relaxed(words + tile) >> 32) + 1;
  if (warp < LIVE_WARPS) {
    Activations<NV> b;
    // Rows without a token fill their own columns only.
    load_tokens_shared<NV>(b, sm.norm.z + (ONE_TOKEN ? 0 : lane >> 2) * InputNorm::STRIDE,
                           warp * NV, lane);
#if EARLY
#pragma unroll
    for (int d = 0; d < EARLY; d++) {
      if (STAGED + d >= count) break;
      Tile tile = zero_tile();
      multiply_fragment<NV>(tile, w[d], b);
      store_tile(sm.partial + ((STAGED + d) * LIVE_WARPS + warp) * TILE_SUMS, tile, lane);
    }
#endif
#if STAGED
    mbar_wait(&sm.bar, 0, error);
    project_staged(STAGED > 1 ? min(STAGED, count) : 1, b, sm.weights, sm.partial, warp, lane);
#endif
    project_some<LATE>(count - STAGED - EARLY, b, tiles + (STAGED + EARLY) * TILE_BYTES,
                       sm.partial + (STAGED + EARLY) * LIVE_WARPS * TILE_SUMS, warp, lane);
  }
  __syncthreads();
  if (piece >= count) return;  // whole warps

  float low = 0, high = 0;
  if (busy) {
    const float* const sums =
        sm.partial + piece * LIVE_WARPS * TILE_SUMS + (tid & 7) * TOKEN_COLUMNS + token;
    low = round_bf16(strided_sum<LIVE_WARPS>(sums, TILE_SUMS) * unit);
    high = round_bf16(strided_sum<LIVE_WARPS>(sums + 8 * TOKEN_COLUMNS, TILE_SUMS) * unit);
  }
  // Where a row of keys or values goes, as a byte offset in the cache.
  auto cache_row = [&]() {
    const int page = RING ? (int)slot * (RING / PAGE) + p % (RING ? RING : 1) / PAGE
                          : load_act_int(where + p / PAGE);
    const int kv = (head - HEADS) % KV_HEADS, r = p % PAGE;
    return ((u64)page * KV_HEADS + kv) * PAGE_BYTES + r * 128 + (((pair >> 3) ^ (r & 7)) << 4) +
           (pair & 7) * 2;
  };
  if (is_value) {
    if (!is_stored) return;
    const u64 row = cache_row();
    *(bf16*)(v_cache + row) = to_bf16(low);
    *(bf16*)(v_cache + row + PAGE_BYTES / 2) = to_bf16(high);
    return;
  }
  float squares = fmaf(high, high, low * low);
#pragma unroll
  for (int o = 1; o < 8; o <<= 1) squares += __shfl_xor_sync(INK_FULL_WARP, squares, o);
  // Lane i of eight gives tile i's sum: the own one, or what its block hands over. That takes a
  // while, in which the angle and the row are found.
  const bool gives = (tid & 7) == tile;
  if (busy && gives) store_relaxed(words + tile, (u64)number << 32 | __float_as_uint(squares));
  float sine = 0, cosine = 1;
#if ROPE
  if (busy) sin_cos(__fmul_rn((float)p, INVERSE_FREQUENCIES[pair]), sine, cosine);
#endif
  const u64 row = is_stored ? cache_row() : 0;
  if (busy && !gives) {
    u64 word = 0;
    u32 spins = 0;
#pragma unroll 1
    while ((u32)((word = load_relaxed(words + (tid & 7))) >> 32) != number)
      if (++spins == INK_SPIN_LIMIT) {
        report_error(error, ERROR_SENTINEL);
        break;
      }
    squares = __uint_as_float((u32)word);
  }
  __syncwarp();
#pragma unroll
  for (int o = 1; o < 8; o <<= 1) squares += __shfl_xor_sync(INK_FULL_WARP, squares, o);
  if (!busy) return;
  const float r = inverse_rms(squares, 1.f / HEAD, eps);
  low = round_bf16(low * r * to_float(norm_low));
  high = round_bf16(high * r * to_float(norm_high));
#if ROPE
  const float a = __fsub_rn(__fmul_rn(low, cosine), __fmul_rn(high, sine));
  high = __fadd_rn(__fmul_rn(high, cosine), __fmul_rn(low, sine));
  low = a;
#endif
  if (is_query) {
    bf16* out = q_out + (size_t)token * HEADS * HEAD + head * HEAD + pair;
    out[0] = to_bf16(low);
    out[HEAD / 2] = to_bf16(high);
  } else if (is_stored) {
    *(bf16*)(k_cache + row) = to_bf16(low);
    *(bf16*)(k_cache + row + PAGE_BYTES / 2) = to_bf16(high);
  }
}
