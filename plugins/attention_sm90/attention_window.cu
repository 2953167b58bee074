// relative_attention of up to eight tokens with a window, head dim 128: the kernel of least latency.
//
// Eight blocks serve a token and a kv head, each an eighth of the keys, counted from the token: a key's block, warp and
// lane follow from its distance alone, so no token's bits depend on the step, and no block has more keys than another.
// K and V stand in registers before the wait, as operands; shared memory is so little that a block finds room beside a
// linear_group's. Behind the wait lie one latency of the L2 and three phases:
//   S^T [16 keys x 8 heads]  = K   (A) x Q^T (B, from global memory)      a warp has kTiles * 16 keys
//   O^T [32 dims x 8 heads] += V^T (A) x P^T (B, through shared memory)   a warp has all keys of the block
//   a block adds up 16 dims of all blocks: the fragments of block b, in the order of b
// Reference points of exponents are whole powers of two, one per warp and head, so a change of them costs no rounding.
//
// Macros: ATTN_TOKENS, ATTN_KV_HEADS, ATTN_HEADS_PER_KV, ATTN_WINDOW, ATTN_RING_ROWS as in shape.cuh, and
//   ATTN_EXTENT     distances that have a bias, from 0 on
//   ATTN_IN_MEMORY  0: blocks are a cluster and exchange in shared memory; 1: no cluster, through global memory. An
//                   empty slot there has all bits set, and all blocks must be resident. The bits are the same.
// Grid (8, ATTN_KV_HEADS, ATTN_TOKENS). Rows of `out` from num_tokens on are left as they are.
#include "device.cuh"
#include "latency.cuh"
#include "sm90.cuh"
#include "window.cuh"

using namespace window;

namespace {

// What a block receives of block b: the fragment of its 16 dims, of a lane {dim g, heads 2 t and 2 t + 1}, {dim g + 8,
// likewise}; and for a pair of heads the block's reference points and denominators.
constexpr int kSlots = kBlocks * (32 + 4);
INK_DEVICE u32 fragment_slot(u32 b, u32 lane) { return b * 32 + lane; }
INK_DEVICE u32 sums_slot(u32 b, u32 t) { return kBlocks * 32 + b * 4 + t; }

struct Shared {
  alignas(16) u32 p[kKeys][4];  // bf16 pairs of heads
  float4 warp_sums[kWarps][4];  // [warp][pair of heads]: reference point and denominator of either
  float4 received[kSlots];      // of the blocks
  u64 has_received;
};

#if ATTN_IN_MEMORY
INK_DEVICE bool is_empty(float4 x) {
  return (__float_as_uint(x.x) == 0xFFFFFFFFu) | (__float_as_uint(x.y) == 0xFFFFFFFFu) |
         (__float_as_uint(x.z) == 0xFFFFFFFFu) | (__float_as_uint(x.w) == 0xFFFFFFFFu);
}
INK_DEVICE bool is_used(u32 slot) { return slot % 4 < kPairs; }
// What all blocks have for this one, to shared memory; the slots are empty again. All threads.
INK_DEVICE void receive(Shared& sm, float4* slots, int* error, u32 thread) {
  constexpr int kShare = (kSlots + kThreads - 1) / kThreads;
  float4 v[kShare];
  bool is_complete = false;
  for (u32 spins = 0; !is_complete; ++spins) {
    is_complete = true;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const u32 slot = thread + i * kThreads;
      v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (slot < kSlots && is_used(slot)) sm90::load_relaxed(slots + slot, v[i]);
    }
#pragma unroll
    for (int i = 0; i < kShare; ++i) is_complete &= !is_empty(v[i]);
    if (!is_complete && spins == INK_SPIN_LIMIT / 4) {
      report_error(error, ERROR_SENTINEL);
      break;
    }
  }
  const float empty = __uint_as_float(0xFFFFFFFFu);
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const u32 slot = thread + i * kThreads;
    if (slot >= kSlots) break;
    sm.received[slot] = v[i];
    if (is_used(slot)) sm90::store_relaxed(slots + slot, make_float4(empty, empty, empty, empty));
  }
  __syncthreads();
}
#endif

}  // namespace

// entries: the page table int32 [max_pages], or the slot int32 [1] of a ring. q, gate, out: [T, H, 128]; rel: [T, H, 16];
// bank: [ATTN_EXTENT, 16]; sinks: [T, H]. position, num_tokens and entries are stable while the step runs. partials:
// [T, KV, 8 blocks, kSlots], all bits set between launches.
extern "C" __global__ void __maxnreg__(176)  // beside a block of linear_group, and one of qkv_post
    window_relative_attention(const bf16* q, const bf16* rel, const bf16* bank, const bf16* sinks, const bf16* gate,
                              const u8* k_cache, const u8* v_cache, const int* entries, const int* position,
                              const int* num_tokens, bf16* out,
#if ATTN_IN_MEMORY
                              float4* partials,
#endif
                              int* error, float scale) {
  Shared& sm = *(Shared*)dynamic_smem();
  const u32 thread = threadIdx.x, lane = thread % 32, t = lane % 4;
  const int warp = thread / 32, g = lane / 4;
  const int rank = blockIdx.x, kv_head = blockIdx.y, token = blockIdx.z;
  const int start = load_act_int(position), count = load_act_int(num_tokens), entry = load_act_int(entries);
  if (thread == 0) {
    pdl_trigger();
    mbar_init(&sm.has_received, 1);
    if (!ATTN_IN_MEMORY) mbar_expect(&sm.has_received, kBlocks * 8 * kPairs * 16 + kBlocks * kPairs * 16);
  }
  __syncwarp();
  if (!ATTN_IN_MEMORY) cluster_arrive();  // this block runs, and its barrier can be counted on
  // Of the warp's keys, tile i has rows g and g + 8 in a lane; the last key of the last block is the token's own.
  const int to_warp = kBlocks * kKeys - 1 - rank * kKeys - warp * kWarpKeys;  // distance of the warp's first key
  u32 a_bank[kTiles][4];
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int distance = to_warp - 16 * i - 8 * half - g;
      uint2 x = make_uint2(0, 0);
      if (distance < kExtent) x = load_weight8(bank + distance * kStates + 4 * t);
      a_bank[i][half] = x.x, a_bank[i][half + 2] = x.y;
    }

  if (token >= count) {  // all blocks of the token
    if (!ATTN_IN_MEMORY) cluster_wait_aligned();
    return;
  }
  const int p = start + token, key0 = p - (kBlocks * kKeys - 1) + rank * kKeys;
  const Rows rows(entries, entry, kv_head, key0);
  // A lane has every eighth key, and every eighth pair of values: their chunks stand at the same places of their rows.
  const int key_offset = warp * kWarpKeys + g, value_offset = 2 * t;
  u32 key_chunks[4];
  const u8* value_begin[2];
#pragma unroll
  for (u32 i = 0; i < 4; ++i) key_chunks[i] = in_row(key0 + key_offset, 4 * i + t);
#pragma unroll
  for (u32 i = 0; i < 2; ++i)  // dims 32 warp + 4 g to 32 warp + 4 g + 3
    value_begin[i] = v_cache + in_row(key0 + value_offset + i, 4 * warp + g / 2) + g % 2 * 8;
  // All rows, also those that the token does not see and those that the step has yet to write.
  uint4 k[kTiles][2][4];
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      load_key(k[i][half], row_of(k_cache, rows[key_offset + 16 * i + 8 * half]), key_chunks);
  uint2 v[kSteps][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      v[step][j] = load_act8(row_of(value_begin[j % 2], rows[value_offset + 16 * step + 8 * (j / 2) + j % 2]));
  // Keys that the token does not see have no probability, but what stands in their place may be NaN.
  const int num_unseen = max(0, p - kWindow + 1) - key0;
  if (num_unseen > 0) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (value_offset + 16 * step + 8 * (j / 2) + j % 2 < num_unseen) v[step][j] = make_uint2(0, 0);
  }

  // Whatever can be known of addresses is worked out before the wait.
  const size_t row = (size_t)token * kHeads + kv_head * kHeadsPerKv;  // head 0
  const int column = min(g, kHeadsPerKv - 1);  // a head; columns behind the last have its scores, which nobody takes
  const bf16* const q_at = worked_out(q + (row + column) * kDim + 8 * t);
  const bf16* const rel_at = worked_out(rel + (row + column) * kStates + 4 * t);
  // The step's own rows are among the last eight.
  const int own_key = key_offset + kWarpKeys - kOwn, own_value = value_offset + kKeys - kOwn;
  const bool is_last = rank == kBlocks - 1, has_own_key = is_last && warp == kWarps - 1 && key0 + own_key >= start;
  const u8* const own_key_at = worked_out(row_of(k_cache, has_own_key ? rows[own_key] : 0));
  const u8* own_value_at[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const bool has_own = is_last && key0 + own_value + j >= start;
    own_value_at[j] = worked_out(has_own ? row_of(value_begin[j], rows[own_value + j]) : nullptr);
  }
  // The thread's output: element `thread` of the fragments.
  const int pair = thread / 4 % 4, head = 2 * pair + (int)(thread % 2);
  const int dim = 32 * (rank / 2) + 2 * (rank % 2) + (int)(thread / 16 * 4 + thread % 4 / 2);
  const bool is_output = head < kHeadsPerKv;
  const u32* const sink_at = worked_out((const u32*)sinks + (row + head) / 2);
  const u32* const gate_at = worked_out((const u32*)gate + ((row + head) * kDim + dim) / 2);

  // ptxas moves nothing over a loop, so this one, which ends at once, keeps the order in which things are written here: it
  // would ask for the queries last, and put off what nothing needs before the results until no latency hides it.
  auto keep_order = [&] {
    mbar_wait(&sm.has_received, 1, error);
    __syncwarp();
  };

  if (ATTN_IN_MEMORY)
    __syncthreads();
  else
    cluster_wait_aligned();
  pdl_wait();
  uint4 b_q[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) b_q[i] = load_act16(q_at + 32 * i);
  const uint2 b_rel = load_act8(rel_at);
  if (has_own_key) load_key(k[kTiles - 1][1], own_key_at, key_chunks);
#pragma unroll
  for (int j = 0; j < 2; ++j)
    if (own_value_at[j]) v[kSteps - 1][2 + j] = load_act8(own_value_at[j]);
  keep_order();
  u32 sink = 0, opening = 0;  // pairs, of which the thread has one half
  if (is_output) {
    sink = load_act4(sink_at);
    opening = load_act4(gate_at);
  }

  // V becomes operands while the queries are on their way.
  u32 a_values[kSteps][2][4];
#pragma unroll
  for (int step = 0; step + 1 < kSteps; ++step) {
    transpose_values(a_values[step], v[step]);
#pragma unroll
    for (int i = 0; i < 2; ++i) used_from_here(a_values[step][i]);
  }
  keep_order();

  // Scores: two sums each of four products, one behind the other.
  float s[kTiles][4];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    float even[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f}, bias[4] = {0.f, 0.f, 0.f, 0.f};
    mma_bf16(bias, a_bank[i], b_rel.x, b_rel.y);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 x = k[i][0][j], y = k[i][1][j];
      const u32 low[4] = {x.x, y.x, x.y, y.y}, high[4] = {x.z, y.z, x.w, y.w};
      mma_bf16(even, low, b_q[j].x, b_q[j].y);
      mma_bf16(odd, high, b_q[j].z, b_q[j].w);
    }
    const u32 rounded[2] = {pack_bf16(bias[0], bias[1]), pack_bf16(bias[2], bias[3])};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int distance = to_warp - 16 * i - e / 2 * 8 - g;
      const float x = fmaf(even[e] + odd[e], scale, e % 2 ? high_float(rounded[e / 2]) : low_float(rounded[e / 2]));
      s[i][e] = distance < kWindow && distance <= p ? x : -__int_as_float(0x7F800000);
    }
  }
  // Probabilities of the warp's keys and heads 2 t and 2 t + 1, and their sums.
  float m[2], l[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top = fmaxf(s[0][h], s[0][h + 2]);
    if (kTiles == 2) top = fmaxf(top, fmaxf(s[kTiles - 1][h], s[kTiles - 1][h + 2]));
    m[h] = round_to_whole(fmaxf(max_over_keys(top) * kLog2e, kNoKey));
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[i][e] = exp2_approx(fmaf(s[i][e], kLog2e, -m[e % 2]));
#pragma unroll
    for (int half = 0; half < 2; ++half)
      sm.p[warp * kWarpKeys + 16 * i + 8 * half + g][t] = pack_bf16(s[i][2 * half], s[i][2 * half + 1]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    l[h] = s[0][h] + s[0][h + 2];
    if (kTiles == 2) l[h] += s[kTiles - 1][h] + s[kTiles - 1][h + 2];
    l[h] = sum_over_keys(l[h]);
  }
  if (g == 0) sm.warp_sums[warp][t] = make_float4(m[0], l[0], m[1], l[1]);
  __syncthreads();

  // Results: 32 dims of all keys of the block, of each warp's keys by themselves and then together.
  transpose_values(a_values[kSteps - 1], v[kSteps - 1]);
  float o[kWarps][2][4];
#pragma unroll
  for (int step = 0; step < kSteps; step += 2) {
    u32 b[4];  // of two steps
    load_matrices_transposed(b, sm.p[16 * step + lane]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float(&sums)[2][4] = o[(step + j) / kTiles];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if ((step + j) % kTiles == 0)
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[i][e] = 0.f;
        mma_bf16(sums[i], a_values[step + j][i], b[2 * j], b[2 * j + 1]);
      }
    }
  }
  float4 of_warp[kWarps];
  float4 sums = make_float4(kNoKey, 0.f, kNoKey, 0.f);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    of_warp[w] = sm.warp_sums[w][t];
    sums.x = fmaxf(sums.x, of_warp[w].x);
    sums.z = fmaxf(sums.z, of_warp[w].z);
  }
  float4 result[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) result[i] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float x = power_of_two(of_warp[w].x - sums.x), y = power_of_two(of_warp[w].z - sums.z);
    sums.y = fmaf(of_warp[w].y, x, sums.y);
    sums.w = fmaf(of_warp[w].w, y, sums.w);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      result[i].x = fmaf(o[w][i][0], x, result[i].x);
      result[i].y = fmaf(o[w][i][1], y, result[i].y);
      result[i].z = fmaf(o[w][i][2], x, result[i].z);
      result[i].w = fmaf(o[w][i][3], y, result[i].w);
    }
  }

  // Tile i to block 2 warp + i.
#if ATTN_IN_MEMORY
  float4* const of_token = partials + ((size_t)token * ATTN_KV_HEADS + kv_head) * kBlocks * kSlots;
  if (t < kPairs) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float4* const to = of_token + (2 * warp + i) * kSlots;
      sm90::store_relaxed(to + fragment_slot(rank, lane), result[i]);
      if (g == i) sm90::store_relaxed(to + sums_slot(rank, t), sums);
    }
  }
#else
  if (t < kPairs) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 bar = sm90::address_at(&sm.has_received, 2 * warp + i);
      sm90::push(sm90::address_at(sm.received + fragment_slot(rank, lane), 2 * warp + i), result[i], bar);
      if (g == i) sm90::push(sm90::address_at(sm.received + sums_slot(rank, t), 2 * warp + i), sums, bar);
    }
  }
  __syncwarp();
  cluster_arrive_relaxed();  // waited for at the end: every block stays until all pushes were issued
#endif
  const float sink_logit = half_of(sink, (row + head) % 2);
  const float opened = rcp_approx(1.f + exp2_approx(-half_of(opening, dim % 2) * kLog2e));
#if ATTN_IN_MEMORY
  receive(sm, of_token + rank * kSlots, error, thread);
#else
  sm90::mbar_wait_cluster(&sm.has_received, 0, error);
#endif

  float2 ml[kBlocks];
  float of_block[kBlocks], top = kNoKey, o_sum = 0.f, l_sum = 0.f;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    ml[b] = ((const float2*)(sm.received + sums_slot(b, pair)))[head % 2];
    of_block[b] = ((const float*)(sm.received + fragment_slot(b, 0)))[thread];
    top = fmaxf(top, ml[b].x);
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const float f = power_of_two(ml[b].x - top);
    l_sum = fmaf(ml[b].y, f, l_sum);
    o_sum = fmaf(of_block[b], f, o_sum);
  }
  // The sink enters the denominator once, here.
  const float x = round_bf16(o_sum * rcp_approx(l_sum + exp2_approx(fmaf(sink_logit, kLog2e, -top))));
  if (is_output) out[(row + head) * kDim + dim] = to_bf16(x * opened);
#if !ATTN_IN_MEMORY
  __syncwarp();
  cluster_wait_aligned();
#endif
}
