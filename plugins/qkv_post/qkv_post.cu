// qkv_post: queries and relative states are scaled, clipped and grown with the position; keys and
// values convolved, clipped or normed, and stored in the cache (kv_layout.cuh). A head of a token
// is a job of LANES lanes with four values each, so a warp has one or several jobs, all of one
// kind. A job's bits do not depend on where it runs. Rows from num_tokens on are left as they are.
#include "kv_layout.cuh"
#include "short_conv/short_conv.cuh"

using namespace short_conv;

constexpr int WARPS = 4, CHANNELS = KV_HEADS * HEAD;
constexpr int HEAD_LANES = HEAD / 4, REL_LANES = REL / 4;
using Tile = kv_layout::Tile<HEAD>;

// 1 + alpha ln(max((position + 1) / floor, 1))
INK_DEVICE float growth(int position, float log_alpha) {
  const float ratio = fmaxf((float)(position + 1) / (float)(LOG_N_FLOOR > 0 ? LOG_N_FLOOR : 1), 1.f);
  return __fadd_rn(1.f, __fmul_rn(log_alpha, logf(ratio)));
}

// Heads of queries or of relative states: jobs [token][head] from `job` on.
template <int LANES>
INK_DEVICE void finish_queries(int job, int lane, const int* position, const int* num_tokens,
                               int num_rows, const bf16* x, const bf16* scale, bf16* out,
                               float threshold, float log_alpha) {
  const int token = job / HEADS, head = job % HEADS, column = lane % LANES * 4;
  const size_t at = (size_t)job * (4 * LANES) + column;
  const bool is_row = token < num_rows;
  Four y = zero_four(), s = zero_four();
  if (is_row) y = four_of(load_early8(scale + head * (4 * LANES) + column));
  const int first = LOG_N_FLOOR > 0 ? load_act_int(position) : 0, live = load_act_int(num_tokens);
  pdl_wait();
  // Rows behind the last token are there, too: only what is stored waits for the number of tokens.
  if (is_row) s = load_act_four<false>(x, at);
#pragma unroll
  for (int i = 0; i < 4; i++) y.v[i] = __fmul_rn(s.v[i], y.v[i]);
  y = clip_head<LANES>(y, threshold);
  if (LOG_N_FLOOR > 0) {
    const float tau = growth(first + token, log_alpha);
    y = round_four(y);
#pragma unroll
    for (int i = 0; i < 4; i++) y.v[i] = __fmul_rn(y.v[i], tau);
  }
  if (is_row && token < live) store_four<false>(out, at, y);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    qkv_post(const bf16* q, const bf16* k, const bf16* v, const bf16* rel, const bf16* q_scale,
             const bf16* rel_scale, const void* k_conv_weight, const void* v_conv_weight,
             const bf16* k_dynamic, const bf16* v_dynamic, bf16* k_ring, bf16* v_ring, u8* k_cache,
             u8* v_cache, const int* page_table, const int* position, const int* num_tokens,
             const int* slot, bf16* q_out, bf16* k_out, bf16* v_out, bf16* rel_out, int num_rows,
             float qk_threshold, float rel_threshold, float log_alpha, float eps) {
  pdl_trigger();
  const int lane = threadIdx.x & 31;
  int warp = blockIdx.x * WARPS + (threadIdx.x >> 5);
  // Warps of keys and values come first: they have the most to do.
  constexpr int JOBS = 32 / HEAD_LANES, REL_JOBS = 32 / REL_LANES;
  const int kv_warps = (num_rows * KV_HEADS + JOBS - 1) / JOBS;
  const int q_warps = (num_rows * HEADS + JOBS - 1) / JOBS;
  if (warp >= 2 * kv_warps) {
    warp -= 2 * kv_warps;
    if (warp < q_warps)
      finish_queries<HEAD_LANES>(warp * JOBS + lane / HEAD_LANES, lane, position, num_tokens,
                                 num_rows, q, q_scale, q_out, qk_threshold, log_alpha);
    else  // or nothing, in the last block
      finish_queries<REL_LANES>((warp - q_warps) * REL_JOBS + lane / REL_LANES, lane, position,
                                num_tokens, num_rows, rel, rel_scale, rel_out, rel_threshold,
                                log_alpha);
    return;
  }
  const bool is_value = warp >= kv_warps;
  if (is_value) warp -= kv_warps;
  const int job = warp * JOBS + lane / HEAD_LANES, token = job / KV_HEADS, head = job % KV_HEADS;
  const int dim = lane % HEAD_LANES * 4, channel = head * HEAD + dim;
  const bf16* const x = is_value ? v : k;
  const void* const weight = is_value ? v_conv_weight : k_conv_weight;
  bf16* const ring = is_value ? v_ring : k_ring;
  const Step step = load_step(position, num_tokens, slot);
  const int p = step.position + token;
  const bool is_live = token < num_rows && token < step.num_tokens;
  int page = 0;
  uint2 past[PAST];
#if DYNAMIC
  DynamicTaps taps;
#else
  Taps taps;
#endif
  // What depends on the step comes first: the machine cannot tell its arrival from that of loads
  // asked for since. So nothing early is waited for until rows have been asked for.
  if (is_live) {
    page = kv_layout::page_of(p, KV_RING ? nullptr : page_table, step.slot, KV_RING ? KV_RING : 1);
    if (RING_IS_WIDE) load_past<RING, CHANNELS>(past, ring, step, token, channel);
#if DYNAMIC
    taps.load<CHANNELS>((const bf16*)weight, channel);
#else
    taps.load((const float*)weight, channel);
#endif
  }
  pdl_wait();
  Four y = zero_four();
  if (is_live) {
    if (!RING_IS_WIDE) load_past<RING, CHANNELS>(past, ring, step, token, channel);
    Four inputs[TAPS];
    load_inputs(inputs, past, Rows<CHANNELS>{x}, token, channel);
#if DYNAMIC
    const bf16* const own = is_value ? v_dynamic : k_dynamic;
    y = convolve(inputs, taps, load_act_four<false>(own, (size_t)job * TAPS));
#else
    y = convolve<true>(inputs, taps);
#endif
    if (RING_IS_WIDE)
      store_four<false>(ring, ring_at<RING, CHANNELS>(step, p, channel), inputs[PAST]);
  }
  y = round_four(y);
  y = is_value ? norm_head<HEAD_LANES>(y, eps) : clip_head<HEAD_LANES>(y, qk_threshold);
  if (!is_live) return;
  store_four<false>(is_value ? v_out : k_out, (size_t)job * HEAD + dim, y);
  u8* const tile = (is_value ? v_cache : k_cache) + Tile::begin(page, KV_HEADS, head);
  store_four<false>(tile + Tile::dim(p % kv_layout::kPageTokens, dim), 0, y);
}
