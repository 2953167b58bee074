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
// With ATTN_RELATIVE 1 it is relative_attention with 16 relative states and sinks:
//   ATTN_EXTENT         distances with a bias
//   ATTN_IS_GATED       whether there is a gate
#include "device.cuh"
#include "gate.cuh"
#include "kv_layout.cuh"

#ifndef ATTN_RELATIVE
#define ATTN_RELATIVE 0
#endif

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

#if ATTN_RELATIVE
// Of a warp's 16 tokens and a page: column c is of the distance that the warp's first token has to the page's last key,
// and c more.
constexpr int kBiasTiles = (16 + kPage) / 8, kBiasColumns = 8 * kBiasTiles + 8;  // 8 against bank conflicts
#endif

struct Shared {
  alignas(1024) u8 k[kStages][Tile::kBytes];
  alignas(1024) u8 v[kStages][Tile::kBytes];
  u64 bars[kStages];   // a page is there
  u64 empty[kStages];  // all warps are done with it
#if ATTN_RELATIVE
  alignas(16) bf16 bias[kThreads / 32][16][kBiasColumns];
  uint4 q[kThreads / 32][kSteps][32];  // matrix operands, of each lane its own
#endif
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

// Matrix operands of 16 tokens. Beside a bias there are no registers for them.
#if ATTN_RELATIVE
using Queries = uint4[kSteps][32];
INK_DEVICE void read_queries(u32 (&q)[4], const Queries& queries, int step, int lane) {
  const uint4 x = queries[step][lane];
  q[0] = x.x, q[1] = x.y, q[2] = x.z, q[3] = x.w;
}
#else
using Queries = u32[kSteps][4];
#endif

// Scores of 16 tokens and the keys of a page.
INK_DEVICE void score(float (&s)[kKeyTiles][4], const Queries& q, const u8* k, int lane) {
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[j][i] = 0.f;
#pragma unroll
  for (int step = 0; step < kSteps; step += 2) {
#if ATTN_RELATIVE
    u32 even[4], odd[4];
    read_queries(even, q, step, lane);
    read_queries(odd, q, step + 1, lane);
#else
    const u32(&even)[4] = q[step], (&odd)[4] = q[step + 1];
#endif
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
      u32 b[4];  // operands of two steps
      load_matrices(b, k + Tile::chunk(8 * j + lane % 8, 2 * step + lane / 8));
      mma_bf16(s[j], even, b[0], b[1]);
      mma_bf16(s[j], odd, b[2], b[3]);
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

#if ATTN_RELATIVE
// Scores in their final unit, with the bias rounded to bf16. rel: A operand of the warp's tokens. to_first: distance
// from the warp's first token to the page's first key.
INK_DEVICE void add_bias(float (&s)[kKeyTiles][4], const u32 (&rel)[4], const bf16* bank,
                         bf16 (&bias)[16][kBiasColumns], int to_first, float scale, int lane) {
  const int g = lane / 4, t = lane % 4, least = to_first - (kPage - 1);
  const bool is_near = least < ATTN_EXTENT;
  if (is_near) {
    __syncwarp();  // the page before is done
#pragma unroll 1
    for (int tile = 0; tile < kBiasTiles; ++tile) {
      const int d = max(0, min(least + 8 * tile + g, ATTN_EXTENT - 1));
      const bf16* row = bank + d * 16 + 2 * t;
      float c[4] = {0.f, 0.f, 0.f, 0.f};
      mma_bf16(c, rel, load_weight4(row), load_weight4(row + 8));
      *(u32*)&bias[g][8 * tile + 2 * t] = pack_bf16(c[0], c[1]);
      *(u32*)&bias[g + 8][8 * tile + 2 * t] = pack_bf16(c[2], c[3]);
    }
    __syncwarp();
  }
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = g + i / 2 * 8, key = 8 * j + 2 * t + i % 2, d = to_first + row - key;
      const bool has_bias = is_near && d >= 0 && d < ATTN_EXTENT;
      s[j][i] = fmaf(s[j][i], scale, has_bias ? to_float(bias[row][row - key + kPage - 1]) : 0.f);
    }
}
#endif

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

// entries: the page table int32 [max_pages], or the slot int32 [1] of a ring. q, gate, out: [T, H, 128];
// sinks: [T, H] if relative, else [H]; rel: [T, H, 16]; bank: [ATTN_EXTENT, 16]. Rows of out from num_tokens
// on become zero.
#if ATTN_RELATIVE
extern "C" __global__ void __launch_bounds__(kThreads)
    tile_relative_attention(const bf16* q, const bf16* rel, const bf16* bank, const bf16* sinks,
                            const bf16* gate, const u8* k_cache, const u8* v_cache,
                            const int* entries, const int* position, const int* num_tokens,
                            bf16* out, int* error, float scale) {
#else
extern "C" __global__ void __launch_bounds__(kThreads)
    tile_sink_attention(const bf16* q, const float* sinks, const u8* k_cache, const u8* v_cache,
                        const int* entries, const int* position, const int* num_tokens, bf16* out,
                        int* error, float scale) {
#endif
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
#if ATTN_RELATIVE
  // As lanes read only what they wrote, no barrier is needed.
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    sm.q[warp][step][lane] =
        make_uint4(operands[step][0], operands[step][1], operands[step][2], operands[step][3]);
  const Queries& queries = sm.q[warp];
  u32 states[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool is_real = token + i % 2 * 8 < first_token + count;
    const bf16* p = rel + ((size_t)(token + i % 2 * 8) * kHeads + head) * 16 + i / 2 * 8 + 2 * t;
    states[i] = is_real ? load_act4(p) : 0;
  }
#else
  const Queries& queries = operands;
#endif
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
    score(s, queries, sm.k[stage], lane);
    // Here rather than first: by now the other warps are done with the page before.
    if (thread == 0 && i + kStages - 1 < num_pages) load(i + kStages - 1);
#if ATTN_RELATIVE
    add_bias(s, states, bank, sm.bias[warp], own - g - key, scale, lane);
#endif
    const bool is_whole =  // every token sees every key
        key + kPage - 1 <= start && (!ATTN_WINDOW || key >= last_key - ATTN_WINDOW + 1);
    if (!is_whole) hide(s, own - key - 2 * t);
    weigh(s, rows, ATTN_RELATIVE ? kLog2e : scale * kLog2e);
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
    const int here = token + 8 * half;
    const bool is_real = here < first_token + count;
#if ATTN_RELATIVE
    const float sink = is_real ? load_act_bf16(sinks, (size_t)here * kHeads + head) : 0.f;
    l += exp2_approx(fmaf(sink, kLog2e, -rows.m[half] * kLog2e));
#else
    l += exp2_approx(fmaf(sinks[head], kLog2e, -rows.m[half] * (scale * kLog2e)));
#endif
    if (here >= ATTN_CHUNK) continue;
#pragma unroll
    for (int j = 0; j < kDimTiles; ++j) {
      const float* o = rows.o[j] + 2 * half;
#if ATTN_RELATIVE
      u32 pair = is_real ? pack_bf16(o[0] / l, o[1] / l) : 0;
      if (ATTN_IS_GATED && is_real) {
        const u32 gates = load_act4(gate + (row - out) + half * kEight + 8 * j);
        pair = pack_bf16(apply_gate(low_float(pair), low_float(gates)),
                         apply_gate(high_float(pair), high_float(gates)));
      }
      *(u32*)(row + half * kEight + 8 * j) = pair;
#else
      *(u32*)(row + half * kEight + 8 * j) = is_real ? pack_bf16(o[0] / l, o[1] / l) : 0;
#endif
    }
  }
}
