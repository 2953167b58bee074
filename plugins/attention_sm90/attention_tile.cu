// Attention of a wide step: a block takes 64 tokens of BLOCK_HEADS query heads of one kv head, a
// warp 16 tokens of one head. It walks the pages that any of its tokens sees, ATTN_STAGES - 1 ahead
// in shared memory, with scores, probabilities and results in registers (the online softmax of
// FlashAttention-2, on mma.sync). The step's own keys and values are in the cache.
//
// Macros:
//   ATTN_CHUNK          T, rows of the step
//   ATTN_BLOCK_HEADS    query heads of a block, 1 or 2; divides ATTN_HEADS_PER_KV
//   ATTN_STAGES         pages in shared memory
//   ATTN_KV_HEADS, ATTN_HEADS_PER_KV, ATTN_WINDOW, ATTN_RING_ROWS as in shape.cuh
#include "device.cuh"
#include "kv_layout.cuh"

namespace {

constexpr int kDim = 128, kPage = kv_layout::kPageTokens, kTokens = 64;
constexpr int kHeads = ATTN_KV_HEADS * ATTN_HEADS_PER_KV, kThreads = 128 * ATTN_BLOCK_HEADS;
constexpr int kTokenBlocks = (ATTN_CHUNK + kTokens - 1) / kTokens, kStages = ATTN_STAGES;
constexpr int kSteps = kDim / 16, kKeyTiles = kPage / 8, kDimTiles = kDim / 8;  // of mma operands
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNoKey = -1e30f;  // maximum before the first key; finite, so no difference is NaN
using Tile = kv_layout::Tile<kDim>;
static_assert(ATTN_HEADS_PER_KV % ATTN_BLOCK_HEADS == 0, "a block's heads share a kv head");
static_assert(!ATTN_RING_ROWS || ATTN_RING_ROWS >= ATTN_WINDOW - 1 + ATTN_CHUNK, "ring rows");

struct Shared {
  alignas(1024) u8 k[kStages][Tile::kBytes];
  alignas(1024) u8 v[kStages][Tile::kBytes];
  u64 bars[kStages];   // a page is there
  u64 empty[kStages];  // all warps are done with it
};

// Zeros in the rows of V that no token of the block sees. Their probabilities are zero, but what a
// recycled page left there may be NaN.
INK_DEVICE void clear_rows(u8* v, int first, int end) {
#pragma unroll 1
  for (int c = threadIdx.x; c < kPage * (kDim / 8); c += kThreads) {
    const int row = c / (kDim / 8);
    if (row < first || row >= end)
      *(uint4*)(v + Tile::chunk(row, c % (kDim / 8))) = make_uint4(0, 0, 0, 0);
  }
  fence_async();  // a bulk copy may come here next
}

// Results of a warp: 16 tokens, of which a lane has g and g + 8.
struct Rows {
  float o[kDimTiles][4];
  float m[2], l[2];  // maximum of the scores, and this lane's part of the denominator
};

// Scores of 16 tokens and the keys of a page.
INK_DEVICE void score(float (&s)[kKeyTiles][4], const u32 (&q)[kSteps][4], const u8* k, int lane) {
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[j][i] = 0.f;
#pragma unroll
  for (int step = 0; step < kSteps; step += 2) {
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
      u32 b[4];  // operands of two steps
      load_matrices(b, k + Tile::chunk(8 * j + lane % 8, 2 * step + lane / 8));
      mma_bf16(s[j], q[step], b[0], b[1]);
      mma_bf16(s[j], q[step + 1], b[2], b[3]);
    }
  }
}

// Takes out the keys that a token does not see; `distance` from the lane's first token to its first
// key.
INK_DEVICE void hide(float (&s)[kKeyTiles][4], int distance) {
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int d = distance + i / 2 * 8 - 8 * j - i % 2;
      if (d < 0 || (ATTN_WINDOW && d >= ATTN_WINDOW)) s[j][i] = -__int_as_float(0x7F800000);
    }
}

// Scores become probabilities that refer to the new maximum of each row; what is there so far is
// scaled to it. `scale`: of scores in powers of two.
INK_DEVICE void weigh(float (&s)[kKeyTiles][4], Rows& rows, float scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float m = rows.m[half];
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) m = fmaxf(m, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
    m = fmaxf(m, __shfl_xor_sync(INK_FULL_WARP, m, 1));
    m = fmaxf(m, __shfl_xor_sync(INK_FULL_WARP, m, 2));
    const float f = exp2_approx((rows.m[half] - m) * scale), shift = m * scale;
    rows.m[half] = m;
    rows.l[half] *= f;
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        s[j][i] = exp2_approx(fmaf(s[j][i], scale, -shift));
        rows.l[half] += s[j][i];
      }
#pragma unroll
    for (int j = 0; j < kDimTiles; ++j) {
      rows.o[j][2 * half] *= f;
      rows.o[j][2 * half + 1] *= f;
    }
  }
}

INK_DEVICE void add_values(Rows& rows, const float (&p)[kKeyTiles][4], const u8* v, int lane) {
#pragma unroll
  for (int step = 0; step < kPage / 16; ++step) {
    u32 a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = p[2 * step + i / 2] + i % 2 * 2;
      a[i] = pack_bf16(pair[0], pair[1]);
    }
#pragma unroll
    for (int j = 0; j < kDimTiles; j += 2) {
      u32 b[4];  // operands of two tiles of dims
      load_matrices_transposed(b, v + Tile::chunk(16 * step + lane % 16, j + lane / 16));
      mma_bf16(rows.o[j], a, b[0], b[1]);
      mma_bf16(rows.o[j + 1], a, b[2], b[3]);
    }
  }
}

}  // namespace

// entries: the page table int32 [max_pages], or the slot int32 [1] of a ring. q, out: [T, H, 128];
// rows of out from num_tokens on become zero.
extern "C" __global__ void __launch_bounds__(kThreads)
    tile_sink_attention(const bf16* q, const float* sinks, const u8* k_cache, const u8* v_cache,
                        const int* entries, const int* position, const int* num_tokens, bf16* out,
                        int* error, float scale) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int g = lane / 4, t = lane % 4;
  // The latest tokens, which see the most keys, come first.
  const int first_token = (kTokenBlocks - 1 - (int)blockIdx.x % kTokenBlocks) * kTokens;
  const int head = (int)blockIdx.x / kTokenBlocks * ATTN_BLOCK_HEADS + warp / 4;
  const int kv_head = head / ATTN_HEADS_PER_KV;
  if (thread == 0)
    for (int stage = 0; stage < kStages; ++stage) {
      mbar_init(&sm.bars[stage], 1);
      mbar_init(&sm.empty[stage], kThreads / 32);
    }
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  const int count = min(load_act_int(num_tokens) - first_token, kTokens);
  const int token = first_token + warp % 4 * 16 + g;  // and token + 8
  bf16* const row = out + ((size_t)token * kHeads + head) * kDim + 2 * t;
  constexpr int kEight = 8 * kHeads * kDim;  // values from a token to the one eight on

  if (count <= 0) {
    for (int half = 0; half < 2; ++half)
      for (int j = 0; j < kDimTiles; ++j)
        if (token + 8 * half < ATTN_CHUNK) *(u32*)(row + half * kEight + 8 * j) = 0;
    return;
  }
  const int start = load_act_int(position) + first_token, last_key = start + count - 1;
  const int first_key = ATTN_WINDOW ? max(0, start - ATTN_WINDOW + 1) : 0;
  const int first_page = first_key / kPage, num_pages = last_key / kPage - first_page + 1;

  auto load = [&](int i) {
    const int key = (first_page + i) * kPage, stage = i % kStages;
    if (i >= kStages) mbar_wait(&sm.empty[stage], i / kStages - 1 & 1, error);
    const int page = ATTN_RING_ROWS ? kv_layout::page_of(key, nullptr, load_act_int(entries),
                                                         ATTN_RING_ROWS ? ATTN_RING_ROWS : kPage)
                                    : kv_layout::page_of(key, entries, 0, kPage);
    const long long tile = Tile::begin(page, ATTN_KV_HEADS, kv_head);
    mbar_expect(&sm.bars[stage], 2 * Tile::kBytes);
    bulk_load(sm.k[stage], k_cache + tile, Tile::kBytes, &sm.bars[stage]);
    bulk_load(sm.v[stage], v_cache + tile, Tile::kBytes, &sm.bars[stage]);
  };
  if (thread == 0)
#pragma unroll 1
    for (int i = 0; i < min(kStages - 1, num_pages); ++i) load(i);

  u32 operands[kSteps][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool is_real = token + i % 2 * 8 < first_token + count;
      const bf16* p = q + ((size_t)token * kHeads + head) * kDim + i % 2 * kEight + step * 16 +
                      i / 2 * 8 + 2 * t;
      operands[step][i] = is_real ? load_act4(p) : 0;
    }
  Rows rows;
#pragma unroll
  for (int j = 0; j < kDimTiles; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) rows.o[j][i] = 0.f;
  rows.m[0] = rows.m[1] = kNoKey;
  rows.l[0] = rows.l[1] = 0.f;
  const int own = start + warp % 4 * 16 + g;  // position of `token`

#pragma unroll 1
  for (int i = 0; i < num_pages; ++i) {
    const int stage = i % kStages, key = (first_page + i) * kPage;
    mbar_wait(&sm.bars[stage], i / kStages & 1, error);
    if (key < first_key || key + kPage > last_key + 1) {
      clear_rows(sm.v[stage], first_key - key, last_key + 1 - key);
      __syncthreads();
    }
    float s[kKeyTiles][4];
    score(s, operands, sm.k[stage], lane);
    // Here rather than first: by now the other warps are done with the page before.
    if (thread == 0 && i + kStages - 1 < num_pages) load(i + kStages - 1);
    const bool is_whole =  // every token sees every key
        key + kPage - 1 <= start && (!ATTN_WINDOW || key >= last_key - ATTN_WINDOW + 1);
    if (!is_whole) hide(s, own - key - 2 * t);
    weigh(s, rows, scale * kLog2e);
    add_values(rows, s, sm.v[stage], lane);
    // Not a barrier: a warp may go on, so that the tensor cores work during another one's softmax.
    __syncwarp();
    if (lane == 0) mbar_arrive(&sm.empty[stage]);
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float l = rows.l[half];
    l += __shfl_xor_sync(INK_FULL_WARP, l, 1);
    l += __shfl_xor_sync(INK_FULL_WARP, l, 2);
    l += exp2_approx(fmaf(sinks[head], kLog2e, -rows.m[half] * (scale * kLog2e)));
    const int here = token + 8 * half;
    const bool is_real = here < first_token + count;
    if (here >= ATTN_CHUNK) continue;
#pragma unroll
    for (int j = 0; j < kDimTiles; ++j) {
      const float* o = rows.o[j] + 2 * half;
      *(u32*)(row + half * kEight + 8 * j) = is_real ? pack_bf16(o[0] / l, o[1] / l) : 0;
    }
  }
}
