// Decode and verify attention for sm_90a: up to eight query tokens of one sequence over a bf16 cache, head dim 128.
//
// A block takes some pages of one kv head; of a page, transposed products on wgmma:
//   S^T [64 keys x 8 T rows]   = K   (A, shared, K-major)  x  Q^T (B, shared)
//   O^T [128 dims x 8 T rows] += V^T (A, shared, M-major)  x  P^T (B, shared)
// Row 8 t + h is q head h of token t: accumulator column group t is token t, so more tokens only add column
// groups, and the order of every reduction follows from the token's position alone: T-invariant bits.
//
// The step's own rows stand in the cache when the kernel before has ended; rows of older positions are
// copied before that. position, num_tokens, slot and the page table must not change while the step runs.
#pragma once
#include "merge.cuh"
#include "pages.cuh"
#include "shape.cuh"
#include "sm90.cuh"
#include "softmax.cuh"
#if ATTN_RELATIVE
#include "relative.cuh"
#endif

namespace attention {

// q rows of the kv head as the B operand: [half][row][64 dims], 128-byte swizzle. Rows that are no head or
// no valid token are zero. All loads first, then all stores: in turn each would wait for the one before.
// All threads.
INK_DEVICE void load_q(const Args& args, u8* to, int kv_head, int valid_tokens, int thread) {
  constexpr int kPieces = kRows * 16, kShare = (kPieces + kThreads - 1) / kThreads;
  uint4 v[kShare];
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int c = thread + i * kThreads, row = c / 16, chunk = c % 16, t = row / 8, h = row % 8;
    v[i] = make_uint4(0, 0, 0, 0);
    if (c < kPieces && h < kHeadsPerKv && t < valid_tokens)
      v[i] = load_act16(args.q + ((size_t)(blockIdx.z * kGroup + t) * kHeads + kv_head * kHeadsPerKv + h) * kDim + chunk * 8);
  }
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int c = thread + i * kThreads, row = c / 16, chunk = c % 16;
    if (c < kPieces) *(uint4*)(to + chunk / 8 * (kRows * 128) + row * 128 + ((chunk % 8 ^ row % 8) * 16)) = v[i];
  }
}

INK_DEVICE void attend(const Args& args) {
  u8* const smem = dynamic_smem();
  u64* const bars = (u64*)(smem + Smem::kBars);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int group = warp / 4, w = warp % 4, group_thread = thread % 128;
  if (thread == 0) {
    pdl_trigger();
    for (int i = 0; i < 2 * kStages + 1; ++i) mbar_init(bars + i, 1);
  }
  __syncthreads();
  if (kCluster > 1) cluster_arrive();  // waited for before the first push
  bool cluster_runs = kCluster == 1;

  const int rank = kCluster > 1 ? blockIdx.x % kCluster : 0, cluster = blockIdx.x / kCluster, kv_head = blockIdx.y;
  const int t0 = blockIdx.z * kGroup, num_tokens = min(kGroup, kTokens - t0);
  const Step step = read_step(args);
  const Loader loader{args, step, smem, bars, kv_head, kRingRows ? load_act_int(args.slot) : 0};
  const float scale = kRelative ? kLog2e : args.scale * kLog2e;  // powers of two in a unit of the scores
  u32 parities = 0;  // of the next wait, a bit per stage
  int passes = 0;

  // Almost always one pass. Where the tokens straddle a change of split length, one per length, over its tokens.
  const int shortest = kWindow ? 0 : split_length(step.base), longest = kWindow ? 0 : split_length(step.last);
  for (int length = shortest; length <= longest; ++length) {
    int ta = 0, tb = num_tokens;
    if (kGroup > 1 && shortest != longest) {
      while (ta < num_tokens && split_length(step.position(ta)) != length) ++ta;
      tb = ta;
      while (tb < num_tokens && split_length(step.position(tb)) == length) ++tb;
      if (ta == tb) continue;
    }
    const bool is_partial = kGroup > 1 && shortest != longest;
    const Work work = find_work(step, rank, cluster, length, step.position(tb - 1));
    if (cluster >= work.clusters) continue;  // the whole cluster agrees
    if (passes > 0) {  // ring and buffers are reused
      fence_async();
      if (kCluster > 1) {
        cluster_arrive();
        cluster_wait();
      } else {
        __syncthreads();
      }
    }
    const Merge merge{args, smem, bars + 2 * kStages, kv_head, rank, cluster, t0, ta, tb, work.clusters, warp, lane};
    if (kCluster > 1 && thread == 0 && merge.num_heads() > 0) mbar_expect(merge.received, merge.bytes_to_receive());

    // First pages, one lane of each warpgroup's first warp per stage.
    const int first = work.first_item(group), my_item = first + lane * kWarpgroups;
    const bool loads = w == 0 && lane < kStages / kWarpgroups && my_item < work.count;
    int my_page = 0;
    if (loads) {
      my_page = loader.locate(work.page(my_item));
      for (int is_v = 0; is_v < 2; ++is_v)
        loader.copy(is_v, my_item % kStages, work.key(my_item), my_page, passes ? kAll : kBeforeStep);
    }
    int k_page = 0, v_page = 0;  // physical pages of the next refills, fetched one item ahead
    if (group_thread == 0 && first + kStages < work.count) k_page = loader.locate(work.page(first + kStages));
    for (int i = first; i < work.count && i < kStages; i += kWarpgroups)
      loader.clear_rest(i % kStages, work.key(i), group_thread);

    float o[2][kGroup][4];
#pragma unroll
    for (int t = 0; t < kGroup; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[0][t][e] = o[1][t][e] = 0.f;
    Softmax state;
    state.reset();
    if (passes == 0) {
      pdl_wait();
      if (loads && work.key(my_item) + kPage > step.start)
        for (int is_v = 0; is_v < 2; ++is_v)
          loader.copy(is_v, my_item % kStages, work.key(my_item), my_page, kThisStep);
#if ATTN_RELATIVE
      const RelativeStates states(args, kv_head, step.count - t0, thread);
#endif
      load_q(args, smem + Smem::kQ, kv_head, step.count - t0, thread);
#if ATTN_RELATIVE
      states.store(smem, thread);
#endif
    }
    fence_async();
    named_barrier(1, kThreads);

    u32* const page_maxima = (u32*)(smem + Smem::kPageMaxima) + group * kGroup * 16;
    const u32 p_at = smem_address(smem + Smem::kP) + group * kGroup * 1024;
    const u32 p_row = p_at + (lane >> 4) * 1024 + (lane & 7) * 128 + (((2 * w + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
    const u64 q_tile = sm90::tile_descriptor(smem_address(smem + Smem::kQ)), p_tile = sm90::tile_descriptor(p_at);
    const u64 ring = sm90::tile_descriptor(smem_address(smem));
    int stage = first % kStages;
    for (int i = first; i < work.count; i += kWarpgroups) {
      const int key = work.key(i);
      const u64 k_tile = ring + (u64)(stage * (kStageBytes / 16)), v_tile = k_tile + Tile::kBytes / 16;
      const u32 parity = (parities >> stage) & 1;
      parities ^= 1u << stage;
      mbar_wait(loader.bar(stage, false), parity, args.error);
      __syncwarp();
      float s[kGroup][4];
      sm90::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 8; ++k)
        sm90::wgmma<false>(s, k_tile + (k / 4 * Tile::kBlockBytes + k % 4 * 32) / 16,
                           q_tile + (k / 4 * (kRows * 128) + k % 4 * 32) / 16, k > 0);
      sm90::wgmma_commit();
      const int key_a = key + 16 * w + lane / 4;  // and key_a + 8
#if ATTN_RELATIVE
      u32 bias[kGroup][2];
      relative_bias(bias, step, smem, stage, key, 16 * w, lane);
#endif
      sm90::wgmma_wait_all();
      sm90::pin(s);
#if ATTN_RELATIVE
#pragma unroll
      for (int t = 0; t < kGroup; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[t][e] = fmaf(s[t][e], args.scale, e % 2 ? high_float(bias[t][e / 2]) : low_float(bias[t][e / 2]));
#endif
      if (is_partial || key + kPage - 1 > step.base || (kWindow && key <= step.last - kWindow)) {
#pragma unroll
        for (int t = 0; t < kGroup; ++t) {
          const int p = step.position(t);
          const bool is_of_pass = !is_partial || merge.is_of_pass(t);
          const float hidden = -__int_as_float(0x7F800000);
          if (!(is_of_pass && key_a <= p && (!kWindow || key_a > p - kWindow))) s[t][0] = s[t][1] = hidden;
          if (!(is_of_pass && key_a + 8 <= p && (!kWindow || key_a + 8 > p - kWindow))) s[t][2] = s[t][3] = hidden;
        }
      }
      probabilities(s, o, state, scale, page_maxima, i == first, group, w, lane);
      if (i >= kStages) loader.clear_rest(stage, key, group_thread);
      store_probabilities(s, p_row);
      fence_async();
      named_barrier(2 + group, 128);
      mbar_wait(loader.bar(stage, true), parity, args.error);
      __syncwarp();
      sm90::pin(o[0]);
      sm90::pin(o[1]);
      sm90::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        sm90::wgmma<true>(o[0], v_tile + k * (2048 / 16), p_tile + k * (32 / 16), true);
        sm90::wgmma<true>(o[1], v_tile + (Tile::kBlockBytes + k * 2048) / 16, p_tile + k * (32 / 16), true);
      }
      sm90::wgmma_commit();
      // Every warp is past its scores of this item and its output of the one before: refill while this runs.
      if (group_thread == 0) {
        const int refilled = i - kWarpgroups + kStages;
        if (i != first && refilled < work.count)
          loader.copy(true, refilled % kStages, work.key(refilled), v_page, kAll);
        v_page = k_page;
        if (i + kStages < work.count) loader.copy(false, stage, work.key(i + kStages), k_page, kAll);
        if (i + kWarpgroups + kStages < work.count) k_page = loader.locate(work.page(i + kWarpgroups + kStages));
      }
      sm90::wgmma_wait_all();
      sm90::pin(o[0]);
      sm90::pin(o[1]);
      stage += kWarpgroups;
      if (stage >= kStages) stage -= kStages;
    }

    Merge::Ending ending = {};  // of this warp's first row, on its way during the exchange
    if (work.clusters == 1 && warp < merge.num_heads() * kGroup && warp % kGroup < num_tokens)
      ending = merge.ending(merge.head(warp / kGroup), warp % kGroup);
    merge.transpose(o, state);
    if (kCluster > 1) {
      if (!cluster_runs) cluster_wait();
      cluster_runs = true;
      merge.push_rows();
      // Waited for at the end of the pass: every block stays until all pushes were issued, and one that
      // receives until all has come.
      cluster_arrive();
      if (merge.num_heads() > 0) sm90::mbar_wait_cluster(merge.received, passes & 1, args.error);
    }
    merge.finish_or_hand_over(ending);
    if (work.clusters > 1) merge.finish_from_clusters();
    if (kCluster > 1) {
      __syncwarp();
      cluster_wait();
    }
    ++passes;
  }
  if (!cluster_runs) cluster_wait();
}

}  // namespace attention
