// Decode and verify attention for the shapes that attention.cu does not take, and its check on a GPU: plain loads and
// fp32 arithmetic, no tensor cores. One block of 128 threads per (kv head, token), so bits do not depend on T.
//
// Macros: ATTN_KV_HEADS, ATTN_HEADS_PER_KV, ATTN_DIM, ATTN_WINDOW, ATTN_RING_ROWS as in shape.cuh; any head dim that has a
// layout and any number of q heads per kv head. Grid (ATTN_KV_HEADS, T).
//
// With ATTN_RELATIVE 1 it is relative_attention: ATTN_STATES relative states of a head, ATTN_EXTENT distances with a bias,
// ATTN_FIRST_KEY position of the first key that there is, ATTN_HAS_SINKS and ATTN_IS_GATED 0 or 1.
#include "device.cuh"
#include "gate.cuh"
#include "kv_layout.cuh"

#ifndef ATTN_RELATIVE
#define ATTN_RELATIVE 0
#endif

namespace {

constexpr int kHeads = ATTN_HEADS_PER_KV, kDim = ATTN_DIM, kWindow = ATTN_WINDOW, kRingRows = ATTN_RING_ROWS;
constexpr int kThreads = 128, kPage = kv_layout::kPageTokens;
constexpr int kShare = (kHeads * kDim + kThreads - 1) / kThreads;  // outputs of a thread
constexpr float kLog2e = 1.4426950408889634f;
using Tile = kv_layout::Tile<kDim>;

struct Shared {
  float q[kHeads][kDim];
  float scores[kHeads][kPage];  // in powers of two; then probabilities
  float m[kHeads], l[kHeads], rescale[kHeads];
#if ATTN_RELATIVE
  float rel[kHeads][ATTN_STATES];
#endif
};

#if ATTN_RELATIVE
// Of a head and a distance from its token; bank: [distance][state].
INK_DEVICE float relative_bias(const float (&rel)[ATTN_STATES], const bf16* bank, int distance) {
  float sum = 0.f;
  if (distance >= ATTN_EXTENT) return sum;
  for (int i = 0; i < ATTN_STATES; ++i) sum = fmaf(rel[i], to_float(bank[distance * ATTN_STATES + i]), sum);
  return round_bf16(sum);
}
#endif

// Scores of a page; -inf where the token does not see the key. bank: null without a bias.
INK_DEVICE void score(Shared& shared, const u8* k, const bf16* bank, int first_key, int last_key, int key, float scale) {
  const int row = threadIdx.x % kPage;
  const bool is_visible = key + row >= first_key && key + row <= last_key;
  for (int h = threadIdx.x / kPage; h < kHeads; h += kThreads / kPage) {
    float sum = 0.f;
    if (is_visible) {
      for (int chunk = 0; chunk < kDim / 8; ++chunk) {
        const uint4 x = *(const uint4*)(k + Tile::chunk(row, chunk));
        const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum = fmaf(shared.q[h][chunk * 8 + 2 * i], low_float(pairs[i]), sum);
          sum = fmaf(shared.q[h][chunk * 8 + 2 * i + 1], high_float(pairs[i]), sum);
        }
      }
    }
#if ATTN_RELATIVE
    if (is_visible) sum = fmaf(sum, scale, relative_bias(shared.rel[h], bank, last_key - key - row));
    shared.scores[h][row] = is_visible ? sum * kLog2e : -__int_as_float(0x7F800000);
#else
    shared.scores[h][row] = is_visible ? sum * (scale * kLog2e) : -__int_as_float(0x7F800000);
#endif
  }
}

// Probabilities of a page, rounded to bf16; their fp32 sum joins the denominator. A warp per head.
INK_DEVICE void normalize(Shared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int h = warp; h < kHeads; h += kThreads / 32) {
    const float a = shared.scores[h][lane], b = shared.scores[h][lane + 32];
    const float before = shared.m[h], m = fmaxf(before, warp_max(fmaxf(a, b)));
    const float pa = exp2_approx(a - m), pb = exp2_approx(b - m), f = exp2_approx(before - m);
    const float sum = warp_sum(pa + pb);
    shared.scores[h][lane] = round_bf16(pa);
    shared.scores[h][lane + 32] = round_bf16(pb);
    __syncwarp();
    if (lane == 0) {
      shared.m[h] = m;
      shared.l[h] = fmaf(shared.l[h], f, sum);
      shared.rescale[h] = f;
    }
  }
}

}  // namespace

// entries: the page table int32 [max_pages], or the slot int32 [1] of a ring. q, gate, out: [T, H, d]; sinks: [T, H] if
// relative, else [H]; rel: [T, H, ATTN_STATES]; bank: [ATTN_EXTENT, ATTN_STATES].
#if ATTN_RELATIVE
extern "C" __global__ void __launch_bounds__(kThreads)
    simple_relative_attention(const bf16* q, const bf16* rel, const bf16* bank, const bf16* sinks, const bf16* gate,
                              const u8* k_cache, const u8* v_cache, const int* entries, const int* position,
                              const int* num_tokens, bf16* out, float scale) {
#else
extern "C" __global__ void __launch_bounds__(kThreads)
    simple_sink_attention(const bf16* q, const float* sinks, const u8* k_cache, const u8* v_cache, const int* entries,
                          const int* position, const int* num_tokens, bf16* out, float scale) {
  const bf16* const bank = nullptr;
#endif
  __shared__ Shared shared;
  const int thread = threadIdx.x, kv_head = blockIdx.x, t = blockIdx.y;
  if (thread == 0) pdl_trigger();
  pdl_wait();
  const size_t row = ((size_t)t * ATTN_KV_HEADS + kv_head) * kHeads * kDim;  // of q and out
  if (t >= load_act_int(num_tokens)) {
    for (int i = thread; i < kHeads * kDim; i += kThreads) out[row + i] = 0;
    return;
  }
#if ATTN_RELATIVE
  const int last_key = load_act_int(position) + t;
  const int first_key = max(ATTN_FIRST_KEY, kWindow ? last_key - kWindow + 1 : 0);
  if (first_key > last_key) {  // no key
    for (int i = thread; i < kHeads * kDim; i += kThreads) out[row + i] = 0;
    return;
  }
  for (int i = thread; i < kHeads * ATTN_STATES; i += kThreads)
    shared.rel[i / ATTN_STATES][i % ATTN_STATES] =
        to_float(rel[((size_t)t * ATTN_KV_HEADS + kv_head) * kHeads * ATTN_STATES + i]);
#else
  const int last_key = load_act_int(position) + t, first_key = kWindow ? max(0, last_key - kWindow + 1) : 0;
#endif
  for (int i = thread; i < kHeads * kDim; i += kThreads) shared.q[i / kDim][i % kDim] = to_float(q[row + i]);
  for (int h = thread; h < kHeads; h += kThreads) {
    shared.m[h] = -1e30f;
    shared.l[h] = 0.f;
  }
  __syncthreads();

  float sums[kShare];
#pragma unroll
  for (int i = 0; i < kShare; ++i) sums[i] = 0.f;
  for (int key = first_key / kPage * kPage; key <= last_key; key += kPage) {
    const int page = kRingRows ? kv_layout::page_of(key, nullptr, load_act_int(entries), kRingRows ? kRingRows : kPage)
                               : kv_layout::page_of(key, entries, 0, kPage);
    const long long tile = Tile::begin(page, ATTN_KV_HEADS, kv_head);
    score(shared, k_cache + tile, bank, first_key, last_key, key, scale);
    __syncthreads();
    normalize(shared);
    __syncthreads();
    const int begin = max(0, first_key - key), end = min(kPage, last_key + 1 - key);
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int output = thread + i * kThreads, h = output / kDim, dim = output % kDim;
      if (output >= kHeads * kDim) break;
      float sum = sums[i] * shared.rescale[h];
      for (int r = begin; r < end; ++r)
        sum = fmaf(shared.scores[h][r], to_float(*(const bf16*)(v_cache + tile + Tile::dim(r, dim))), sum);
      sums[i] = sum;
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int output = thread + i * kThreads, h = output / kDim;
    if (output >= kHeads * kDim) break;
#if ATTN_RELATIVE
    float l = shared.l[h];
    if (ATTN_HAS_SINKS) {
      const size_t head = ((size_t)t * ATTN_KV_HEADS + kv_head) * kHeads + h;
      l += exp2_approx(fmaf(load_act_bf16(sinks, head), kLog2e, -shared.m[h]));
    }
    const bf16 result = to_bf16(sums[i] / l);
    out[row + output] =
        ATTN_IS_GATED ? to_bf16(apply_gate(to_float(result), load_act_bf16(gate, row + output))) : result;
#else
    const float sink = exp2_approx(fmaf(sinks[kv_head * kHeads + h], kLog2e, -shared.m[h]));
    out[row + output] = to_bf16(sums[i] / (shared.l[h] + sink));
#endif
  }
}
