// Attention of one token inside the launch of a run of layers: attention_sm90 with the pages, the
// window and the kind of cache known at run time, so that all layers share one copy of the code.
// The bits are those of attention_sm90/attention.cuh:
//   without a window  blocks take runs of pages, as its clusters of one block do;
//   with a window     page j is of block j % WINDOW_BLOCKS and of warpgroup j / WINDOW_BLOCKS %
//                     2, as in its cluster of that many blocks. Their partials are added up in the
//                     same order, through device memory instead of the cluster's.
//
// Pages of older positions are copied ahead of time. The step's own key and value come from the
// exchange, go into the page in shared memory, and from there to the cache.
#pragma once
#include "share.cuh"
#include "attention_sm90/merge.cuh"
#include "exchange.cuh"
#include "w4a16/w4a16.cuh"

namespace attention {

// A head of the step: RMSNorm and rotation of one row of pairs (d, d + 64). Lane l holds pairs 2 l
// and 2 l + 1.
struct Head {
  float low[2], high[2];
};
INK_DEVICE Head unpack(uint2 words) {
  return {{low_float(words.x), low_float(words.y)}, {high_float(words.x), high_float(words.y)}};
}
INK_DEVICE uint2 low_and_high(const Head& h) {
  return make_uint2(pack_bf16(h.low[0], h.low[1]), pack_bf16(h.high[0], h.high[1]));
}
struct Rotation {
  const float* sine;  // of 64 pairs, or null for none
  const float* cosine;
};
INK_DEVICE void norm_and_rotate(Head& h, u32 norm_low, u32 norm_high, float eps, Rotation rotation,
                                int lane) {
  const float first = fmaf(h.high[0], h.high[0], h.low[0] * h.low[0]);
  const float second = fmaf(h.high[1], h.high[1], h.low[1] * h.low[1]);
  const float r = inverse_rms(tree_sum(first + second), 1.f / kDim, eps);
  h.low[0] = round_bf16(h.low[0] * r * low_float(norm_low));
  h.low[1] = round_bf16(h.low[1] * r * high_float(norm_low));
  h.high[0] = round_bf16(h.high[0] * r * low_float(norm_high));
  h.high[1] = round_bf16(h.high[1] * r * high_float(norm_high));
  if (!rotation.sine) return;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float sine = rotation.sine[2 * lane + i], cosine = rotation.cosine[2 * lane + i];
    const float low = __fsub_rn(__fmul_rn(h.low[i], cosine), __fmul_rn(h.high[i], sine));
    h.high[i] = __fadd_rn(__fmul_rn(h.high[i], cosine), __fmul_rn(h.low[i], sine));
    h.low[i] = low;
  }
}

// A layer's attention as a block's first eleven warps see it: warps 0-7 attend; warp 8 makes the
// step's key and warp 9 its value where the newest page is this block's; with a window, warp 10
// merges the blocks' partials of one head.
//   words    of the exchange, q, k and v: [head][64] pairs (row d, row d + 64) of bf16
//   ring     shared memory as `Smem` lays it out, of which pages below EARLY_STAGES were prefetched
//   row      shared memory, 512 bytes: the step's key and value, if their page is not among the
//            ring's first
struct OneToken {
  const Pages& pages;
  const Args& args;
  const u32* words;
  const bf16* q_norm;
  const bf16* k_norm;
  Rotation rotation;
  float eps;
  u8* ring;
  u64* bars;
  u8* row;

  // Warps 8 and 9.
  INK_DEVICE void make_row(int warp, int lane, Patience& patience) const {
    const bool is_v = warp == 9;
    const int p = pages.position, r = p % kPage, item = pages.count - 1;
    u32 norm_low = 0, norm_high = 0;
    if (!is_v) {
      norm_low = *(const u32*)(k_norm + 2 * lane);
      norm_high = *(const u32*)(k_norm + kDim / 2 + 2 * lane);
    }
    u8* const cache = (u8*)(is_v ? pages.v_cache : pages.k_cache) +
                      Tile::begin(pages.locate(p / kPage), kKvHeads, pages.kv_head) +
                      r * Tile::kRowBytes;
    const int head = kHeads + pages.kv_head + (is_v ? kKvHeads : 0);
    Head h = unpack(receive8(words + head * (kDim / 2) + 2 * lane, patience));
    if (!is_v) norm_and_rotate(h, norm_low, norm_high, eps, rotation, lane);
    const uint2 halves = low_and_high(h);
    const int at = ((lane / 4) ^ (r & 7)) * 16 + lane % 4 * 4;
    u8* to = row + is_v * 256;
    int next = 128;
    if (item < kStages) {
      to = ring + item * kStageBytes + is_v * Tile::kBytes + r * Tile::kRowBytes;
      next = Tile::kBlockBytes;
    }
    *(u32*)(to + at) = halves.x;
    *(u32*)(to + next + at) = halves.y;
    *(u32*)(cache + at) = halves.x;
    *(u32*)(cache + Tile::kBlockBytes + at) = halves.y;
  }
  // Warps 0-7: a query head each, as row `warp` of the B operand.
  INK_DEVICE void make_query(int warp, int lane, Patience& patience) const {
    uint2 halves = make_uint2(0, 0);
    if (warp < kHeadsPerKv) {
      const u32 norm_low = *(const u32*)(q_norm + 2 * lane),
                norm_high = *(const u32*)(q_norm + kDim / 2 + 2 * lane);
      const int head = pages.kv_head * kHeadsPerKv + warp;
      Head h = unpack(receive8(words + head * (kDim / 2) + 2 * lane, patience));
      norm_and_rotate(h, norm_low, norm_high, eps, rotation, lane);
      halves = low_and_high(h);
    }
    u8* const to = ring + Smem::kQ + warp * 128 + ((lane / 4) ^ warp) * 16 + lane % 4 * 4;
    *(u32*)to = halves.x;
    *(u32*)(to + kRows * 128) = halves.y;
  }

  // parities: of the ring's barriers.
  INK_DEVICE void run(u32& parities, int warp, int lane, Patience& patience) const {
    const bool has_newest = pages.has_newest();
    const int join = kThreads + (has_newest ? 64 : 0);
    if (warp < kWarps) {
      attend(parities, warp, lane, patience, join);
    } else if (warp < kWarps + 2) {
      if (has_newest) {
        make_row(warp, lane, patience);
        fence_async();
        named_barrier(JOIN_BARRIER, join);
      }
    } else if (warp == kWarps + 2 && pages.window) {
      merge_window(warp, lane, patience);
    }
    // Of every stage, in all threads.
#pragma unroll
    for (int s = 0; s < kStages; ++s)
      if (pages.count > s) parities ^= (((pages.count - s + kStages - 1) / kStages) & 1) << s;
  }

 private:
  INK_DEVICE Merge merge_of(int warp, int lane) const {
    return {args, ring, nullptr, pages.kv_head,  0,    pages.cluster,
            0,    0,    1,       pages.clusters, warp, lane};
  }

  // With a window: this block's partial of every head. Mostly the block has one page, so one
  // warpgroup has it all: straight from its accumulators.
  INK_DEVICE void hand_over(const Merge& merge, const float (&o)[2][1][4], const Softmax& state,
                            int warp, int lane) const {
    const int group = warp / 4, w = warp % 4;
    if (pages.count > 1) {
      merge.transpose(o, state);
      const Partial sum = merge.of_block(warp);
      sm90::store_relaxed(args.partials + merge.slot(warp, pages.cluster, 0) * 32 + lane, sum.o);
      if (lane < SUM_COPIES)
        sm90::store_relaxed(
            args.partial_sums + merge.slot(warp, pages.cluster, 0) * SUM_COPIES + lane,
            make_float2(sum.m, sum.l));
      return;
    }
    if (group != pages.offset) return;
    const int column = (lane & 3) * 2, dim = 16 * w + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        publish4((float*)(args.partials + merge.slot(column + (e & 1), pages.cluster, 0) * 32) +
                     half * 64 + dim + (e >> 1) * 8,
                 __float_as_uint(o[half][0][e]));
    float x = state.l[0][0], y = state.l[0][1];
#pragma unroll
    for (int d = 4; d < 32; d <<= 1) {
      x += __shfl_xor_sync(INK_FULL_WARP, x, d);
      y += __shfl_xor_sync(INK_FULL_WARP, y, d);
    }
    float* const sums = (float*)(ring + Smem::kSums);  // [warp][row]: over keys, which are consumed
    float* const maxima = (float*)(ring + Smem::kMaxima);
    if (lane < 4) {
      *(float2*)(sums + w * kRows + column) = make_float2(x, y);
      if (w == 0) *(float2*)(maxima + column) = make_float2(state.m[0][0], state.m[0][1]);
    }
    named_barrier(2 + group, 128);
    if (w == 0) {
      const int head = lane / SUM_COPIES;
      const float* l = sums + head;
      sm90::store_relaxed(
          args.partial_sums + merge.slot(head, pages.cluster, 0) * SUM_COPIES + lane % SUM_COPIES,
          make_float2(maxima[head], ((l[0] + l[kRows]) + l[2 * kRows]) + l[3 * kRows]));
    }
  }

  // With a window: block c merges head 7 - c. Reading the partials empties their slots.
  INK_DEVICE void merge_window(int warp, int lane, Patience& patience) const {
    const int index = WINDOW_BLOCKS - 1 - pages.cluster;
    if (index >= kHeadsPerKv) return;
    const Merge merge = merge_of(warp, lane);
    const Merge::Ending ending = merge.ending(merge.head(index), 0);
    float4* const rows = args.partials + merge.slot(index, 0, 0) * 32 + lane;
    float2* const sums = args.partial_sums + merge.slot(index, 0, 0) * SUM_COPIES;
    float4 o[WINDOW_BLOCKS];
    float2 copy;  // a lane each, so that all have come before they are emptied
    for (u32 spins = 0;; spins++) {
#pragma unroll
      for (int c = 0; c < WINDOW_BLOCKS; ++c) sm90::load_relaxed(rows + c * 32, o[c]);
      sm90::load_relaxed(sums + lane, copy);
      bool is_incomplete = is_empty(copy.x) | is_empty(copy.y);
#pragma unroll
      for (int c = 0; c < WINDOW_BLOCKS; ++c) is_incomplete |= is_empty(o[c]);
      if (!__any_sync(INK_FULL_WARP, is_incomplete) || patience.is_over(spins)) break;
    }
    __syncwarp();
    float2 ml[WINDOW_BLOCKS];
    Partial sum = no_keys();
#pragma unroll
    for (int c = 0; c < WINDOW_BLOCKS; ++c) {
      ml[c] = make_float2(__shfl_sync(INK_FULL_WARP, copy.x, c * SUM_COPIES),
                          __shfl_sync(INK_FULL_WARP, copy.y, c * SUM_COPIES));
      sum.m = fmaxf(sum.m, ml[c].x);
    }
#pragma unroll
    for (int c = 0; c < WINDOW_BLOCKS; ++c)
      add_scaled(sum, o[c], ml[c].y, exp2_approx(ml[c].x - sum.m));
    merge.finish(merge.head(index), 0, sum, ending);
    const float empty = __uint_as_float(EMPTY);
#pragma unroll
    for (int c = 0; c < WINDOW_BLOCKS; ++c)
      sm90::store_relaxed(rows + c * 32, make_float4(empty, empty, empty, empty));
    sm90::store_relaxed(sums + lane, make_float2(empty, empty));
  }

  INK_DEVICE void attend(u32 parities, int warp, int lane, Patience& patience, int join) const {
    const int group = warp / 4, w = warp % 4, group_thread = w * 32 + lane;
    const int p = pages.position, count = pages.count, first = pages.first_item(group);
    const float scale = args.scale * kLog2e;
    int k_page = 0, v_page = 0;  // physical pages of the next refills, fetched one item ahead
    if (group_thread == 0 && first + kStages < count)
      k_page = pages.locate(pages.page(first + kStages));
    for (int i = first; i < count && i < kStages; i += kWarpgroups)
      pages.clear_rest(i, ring, group_thread);
    make_query(warp, lane, patience);
    fence_async();
    named_barrier(JOIN_BARRIER, join);
    MARK(20);

    float o[2][1][4];
#pragma unroll
    for (int e = 0; e < 4; ++e) o[0][0][e] = o[1][0][e] = 0.f;
    Softmax state;
    state.reset();
    u32* const page_maxima = (u32*)(ring + Smem::kPageMaxima) + group * 16;
    const u32 p_at = smem_address(ring + Smem::kP) + group * 1024;
    const u32 p_row = p_at + (lane >> 4) * 1024 + (lane & 7) * 128 +
                      (((2 * w + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
    const u64 q_tile = sm90::tile_descriptor(smem_address(ring + Smem::kQ)),
              p_tile = sm90::tile_descriptor(p_at);
    const u64 tiles = sm90::tile_descriptor(smem_address(ring));
    for (int i = first; i < count; i += kWarpgroups) {
      const int key = pages.key(i), stage = i % kStages;
      const u64 k_tile = tiles + (u64)(stage * (kStageBytes / 16)),
                v_tile = k_tile + Tile::kBytes / 16;
      const u32 parity = ((parities >> stage) ^ (i / kStages)) & 1;
      wait(bars + 2 * stage, parity, patience);
      __syncwarp();
      if (i == first) MARK(23);
      const bool is_late = i >= kStages && i == count - 1 && key + kPage > p;
      if (is_late) {  // the step's row into a page that came through a refilled stage
        wait(bars + 2 * stage + 1, parity, patience);
        if (group_thread < 32) {
          const int is_v = group_thread / 16, c = group_thread % 16;
          *(uint4*)(ring + stage * kStageBytes + is_v * Tile::kBytes + c / 8 * Tile::kBlockBytes +
                    p % kPage * Tile::kRowBytes + c % 8 * 16) =
              *(const uint4*)(row + is_v * 256 + c * 16);
        }
        pages.clear_rest(i, ring, group_thread);
        fence_async();
        named_barrier(2 + group, 128);
      }
      float s[1][4];
      sm90::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 8; ++k)
        sm90::wgmma<false>(s, k_tile + (k / 4 * Tile::kBlockBytes + k % 4 * 32) / 16,
                           q_tile + (k / 4 * (kRows * 128) + k % 4 * 32) / 16, k > 0);
      sm90::wgmma_commit();
      const int key_a = key + 16 * w + lane / 4;  // and key_a + 8
      sm90::wgmma_wait_all();
      sm90::pin(s);
      if (key + kPage - 1 > p || (pages.window && key <= p - pages.window)) {
        const float hidden = -__int_as_float(0x7F800000);
        const int oldest = pages.window ? p - pages.window : -1;
        if (!(key_a <= p && key_a > oldest)) s[0][0] = s[0][1] = hidden;
        if (!(key_a + 8 <= p && key_a + 8 > oldest)) s[0][2] = s[0][3] = hidden;
      }
      if (i == first) MARK(22);
      probabilities(s, o, state, scale, page_maxima, i == first, group, w, lane);
      store_probabilities(s, p_row);
      fence_async();
      named_barrier(2 + group, 128);
      wait(bars + 2 * stage + 1, parity, patience);
      __syncwarp();
      sm90::pin(o[0]);
      sm90::pin(o[1]);
      sm90::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        sm90::wgmma<true>(o[0], v_tile + k * (2048 / 16), p_tile + k * (32 / 16), true);
        sm90::wgmma<true>(o[1], v_tile + (Tile::kBlockBytes + k * 2048) / 16,
                          p_tile + k * (32 / 16), true);
      }
      sm90::wgmma_commit();
      // Every warp is past its scores of this item and its output of the one before: refill while
      // this runs.
      if (group_thread == 0) {
        const int refilled = i - kWarpgroups + kStages;
        if (i != first && refilled < count) pages.copy(true, refilled, v_page, ring, bars);
        v_page = k_page;
        if (i + kStages < count) pages.copy(false, i + kStages, k_page, ring, bars);
        if (i + kWarpgroups + kStages < count)
          k_page = pages.locate(pages.page(i + kWarpgroups + kStages));
      }
      sm90::wgmma_wait_all();
      sm90::pin(o[0]);
      sm90::pin(o[1]);
    }

    const Merge merge = merge_of(warp, lane);
    MARK(21);
    if (pages.window) {
      hand_over(merge, o, state, warp, lane);
    } else {
      Merge::Ending ending = {};
      if (pages.clusters == 1 && warp < merge.num_heads())
        ending = merge.ending(merge.head(warp), 0);
      merge.transpose(o, state);
      merge.finish_or_hand_over(ending);
      if (pages.clusters > 1) merge.finish_from_clusters();
    }
    fence_async();  // bulk copies come where the merge wrote
  }
};

}  // namespace attention
