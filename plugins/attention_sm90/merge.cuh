// Partial results of warpgroups, blocks and clusters become outputs, in one kernel: no fence, counter or grid barrier.
//
// Warpgroups meet in shared memory. In a cluster, head h of every block is pushed to rank h % kCluster,
// counted on the receiver's mbarrier. Across clusters, a rank's rows are spread: each has one merging
// cluster, to which the others hand their partial through global memory. An empty slot there has all bits
// set, a NaN that arithmetic never yields; the reader polls every word and empties the slot again.
// Orders of summation: warpgroup, rank, then clusters k, k + 8, ... per warp and the warps in order.
#pragma once
#include "shape.cuh"
#include "softmax.cuh"
#include "sm90.cuh"

namespace attention {

INK_DEVICE bool is_empty(float x) { return __float_as_uint(x) == 0xFFFFFFFFu; }
INK_DEVICE bool is_empty(float4 x) { return is_empty(x.x) | is_empty(x.y) | is_empty(x.z) | is_empty(x.w); }

struct Merge {
  const Args& args;
  u8* smem;
  u64* received;    // barrier of the pushes of a pass
  int kv_head, rank, cluster;
  int t0;           // token of the step that is the block's token 0
  int ta, tb;       // the block's tokens [ta, tb) of this pass
  int clusters;     // that have pages in this pass
  int warp, lane;

  // Heads rank, rank + kCluster, ... are merged by this block.
  INK_DEVICE int num_heads() const { return (kHeadsPerKv - rank + kCluster - 1) / kCluster; }
  INK_DEVICE int head(int index) const { return kv_head * kHeadsPerKv + rank + index * kCluster; }
  INK_DEVICE u32 bytes_to_receive() const { return kCluster * num_heads() * (tb - ta) * (512 + 8); }
  INK_DEVICE void sync() const { named_barrier(1, kThreads); }
  INK_DEVICE bool is_of_pass(int t) const { return t >= ta && t < tb; }

  // Accumulators to shared memory, a row's 128 dims side by side. All threads; the ring is consumed.
  INK_DEVICE void transpose(const float (&o)[2][kGroup][4], const Softmax& state) const {
    float* const sums = (float*)(smem + Smem::kSums);
    float* const maxima = (float*)(smem + Smem::kMaxima);
    float* const rows = (float*)(smem + Smem::kTransposed);
    const int g = warp / 4, w = warp % 4, column = (lane & 3) * 2, dim = 16 * w + lane / 4;
    sync();
#pragma unroll
    for (int t = 0; t < kGroup; ++t) {
      float x = state.l[t][0], y = state.l[t][1];
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) {
        x += __shfl_xor_sync(INK_FULL_WARP, x, d);
        y += __shfl_xor_sync(INK_FULL_WARP, y, d);
      }
      if (lane < 4) {
        *(float2*)(sums + warp * kRows + t * 8 + column) = make_float2(x, y);
        if (w == 0) *(float2*)(maxima + g * kRows + t * 8 + column) = make_float2(state.m[t][0], state.m[t][1]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          rows[(g * kRows + t * 8 + column + (e & 1)) * Smem::kRow + half * 64 + dim + (e >> 1) * 8] = o[half][t][e];
    }
    sync();
  }

  // Of one row: the warpgroups' keys.
  INK_DEVICE Partial of_block(int row) const {
    const float* const sums = (const float*)(smem + Smem::kSums) + row;
    const float* const maxima = (const float*)(smem + Smem::kMaxima) + row;
    const float* const rows = (const float*)(smem + Smem::kTransposed) + row * Smem::kRow + lane * 4;
    Partial sum = no_keys();
#pragma unroll
    for (int g = 0; g < kWarpgroups; ++g) sum.m = fmaxf(sum.m, maxima[g * kRows]);
#pragma unroll
    for (int g = 0; g < kWarpgroups; ++g) {
      const float* l = sums + g * 4 * kRows;
      add_scaled(sum, *(const float4*)(rows + g * kRows * Smem::kRow), ((l[0] + l[kRows]) + l[2 * kRows]) + l[3 * kRows],
                 exp2_approx(maxima[g * kRows] - sum.m));
    }
    return sum;
  }

  // All warps: every row to the rank that merges it. A cluster barrier must have shown that ranks run.
  INK_DEVICE void push_rows() const {
#pragma unroll 2
    for (int row = warp; row < kRows; row += kWarps) {
      const int t = row / 8, h = row % 8;
      if (h >= kHeadsPerKv || !is_of_pass(t)) continue;
      const int to = h % kCluster, slot = (rank * kHeadsPerRank + h / kCluster) * kGroup + t;
      const Partial part = of_block(row);
      const u32 bar = sm90::address_at(received, to);
      sm90::push(sm90::address_at(smem + Smem::kReceived + slot * 512 + lane * 16, to), part.o, bar);
      if (lane == 0)
        sm90::push(sm90::address_at(smem + Smem::kReceivedSums + slot * 8, to), make_float2(part.m, part.l), bar);
    }
    __syncwarp();
  }

  // Of one head and token: the cluster's keys.
  INK_DEVICE Partial of_cluster(int head_index, int t) const {
    if (kCluster == 1) return of_block(t * 8 + head_index);
    const float2* const sums = (const float2*)(smem + Smem::kReceivedSums) + head_index * kGroup + t;
    const float4* const rows = (const float4*)(smem + Smem::kReceived) + (head_index * kGroup + t) * 32 + lane;
    constexpr int kNext = kHeadsPerRank * kGroup;
    Partial sum = no_keys();
#pragma unroll
    for (int c = 0; c < kCluster; ++c) sum.m = fmaxf(sum.m, sums[c * kNext].x);
#pragma unroll 4
    for (int c = 0; c < kCluster; ++c) {
      const float2 ml = sums[c * kNext];
      add_scaled(sum, rows[c * kNext * 32], ml.y, exp2_approx(ml.x - sum.m));
    }
    return sum;
  }

  // What finishing a row reads from global memory.
  struct Ending {
    float sink;
    uint2 gate;
  };
  INK_DEVICE Ending ending(int head, int t) const {
    Ending end = {0.f, make_uint2(0, 0)};
    if (kRelative) {
      const size_t row = (size_t)(t0 + t) * kHeads + head;
      end.sink = low_float(((const bf16*)args.sinks)[row]);
      end.gate = load_act8(args.gate + row * kDim + lane * 4);
    } else {
      end.sink = ((const float*)args.sinks)[head];
    }
    return end;
  }
  // The sink enters the denominator once, here.
  INK_DEVICE void finish(int head, int t, const Partial& sum, const Ending& end) const {
    const float inverse = 1.f / (sum.l + exp2_approx(fmaf(end.sink, kLog2e, -sum.m)));
    u32 low = pack_bf16(sum.o.x * inverse, sum.o.y * inverse), high = pack_bf16(sum.o.z * inverse, sum.o.w * inverse);
    if (kRelative) {
      auto gated = [](u32 x, u32 gate) {
        auto sigmoid = [](float x) { return 1.f / (1.f + exp2_approx(-x * kLog2e)); };
        return pack_bf16(low_float(x) * sigmoid(low_float(gate)), high_float(x) * sigmoid(high_float(gate)));
      };
      low = gated(low, end.gate.x);
      high = gated(high, end.gate.y);
    }
    sm90::store_relaxed((uint2*)(args.out + ((size_t)(t0 + t) * kHeads + head) * kDim + lane * 4), make_uint2(low, high));
  }

  INK_DEVICE size_t slot(int head_index, int from_cluster, int t) const {
    return ((size_t)(kv_head * 8 + rank + head_index * kCluster) * kClusters + from_cluster) * kTokens + t0 + t;
  }
  INK_DEVICE int merger(int item) const { return clusters - 1 - item % clusters; }

  // All warps: rows that this cluster can finish alone, or hands to another one. first: ending of item `warp`.
  INK_DEVICE void finish_or_hand_over(Ending first) const {
    for (int item = warp; item < num_heads() * kGroup; item += kWarps) {
      const int index = item / kGroup, t = item % kGroup;
      if (!is_of_pass(t) || (clusters > 1 && merger(item) == cluster)) continue;
      const Partial sum = of_cluster(index, t);
      if (clusters == 1) {
        finish(head(index), t, sum, item == warp ? first : ending(head(index), t));
      } else {
        sm90::store_relaxed(args.partials + slot(index, cluster, t) * 32 + lane, sum.o);
        if (lane == 0) sm90::store_relaxed(args.partial_sums + slot(index, cluster, t), make_float2(sum.m, sum.l));
      }
    }
  }

  // This warp's share of the clusters' partials of one row. Reading them empties their slots.
  INK_DEVICE Partial collect(int index, int t) const {
    constexpr int kInFlight = 36 / kWarps > 4 ? 36 / kWarps : 4;
    const float empty = __uint_as_float(0xFFFFFFFFu);
    const Partial own = of_cluster(index, t);
    Partial sum = no_keys();
    for (int first = warp; first < clusters; first += kInFlight * kWarps) {
      float4 o[kInFlight];
      float2 ml[kInFlight];
      bool is_complete = false;
      for (u32 spins = 0; !is_complete; ++spins) {
        is_complete = true;
#pragma unroll
        for (int b = 0; b < kInFlight; ++b) {
          const int c = first + b * kWarps;
          o[b] = make_float4(0.f, 0.f, 0.f, 0.f);
          ml[b] = make_float2(kNoKey, 0.f);
          if (c < clusters && c != cluster) {
            sm90::load_relaxed(args.partials + slot(index, c, t) * 32 + lane, o[b]);
            sm90::load_relaxed(args.partial_sums + slot(index, c, t), ml[b]);
          }
        }
#pragma unroll
        for (int b = 0; b < kInFlight; ++b)
          if (is_empty(o[b]) | is_empty(ml[b].x) | is_empty(ml[b].y)) is_complete = false;
        if (!is_complete && spins == INK_SPIN_LIMIT / 4) {
          report_error(args.error, ERROR_SENTINEL);
          break;
        }
      }
      __syncwarp();  // every lane has read the sums before lane 0 empties them
      float m = sum.m;
#pragma unroll
      for (int b = 0; b < kInFlight; ++b) {
        const int c = first + b * kWarps;
        if (c == cluster) {
          o[b] = own.o;
          ml[b] = make_float2(own.m, own.l);
        } else if (c < clusters) {
          sm90::store_relaxed(args.partials + slot(index, c, t) * 32 + lane, make_float4(empty, empty, empty, empty));
          if (lane == 0) sm90::store_relaxed(args.partial_sums + slot(index, c, t), make_float2(empty, empty));
        }
        m = fmaxf(m, ml[b].x);
      }
      const float f = exp2_approx(sum.m - m);
      sum = {make_float4(sum.o.x * f, sum.o.y * f, sum.o.z * f, sum.o.w * f), m, sum.l * f};
#pragma unroll
      for (int b = 0; b < kInFlight; ++b) add_scaled(sum, o[b], ml[b].y, exp2_approx(ml[b].x - m));
    }
    return sum;
  }

  // All warps: the rows whose merging cluster this is.
  INK_DEVICE void finish_from_clusters() const {
    int parity = 0, turn = 0;
    for (int item = clusters - 1 - cluster; item < num_heads() * kGroup; item += clusters) {
      const int index = item / kGroup, t = item % kGroup;
      if (!is_of_pass(t)) continue;
      const Ending end = ending(head(index), t);
      const Partial share = collect(index, t);
      float4* const o = (float4*)(smem + Smem::kWarpOut) + parity * kWarps * 32;  // double-buffered: one barrier a row
      float2* const ml = (float2*)(smem + Smem::kWarpSums) + parity * kWarps;
      o[warp * 32 + lane] = share.o;
      if (lane == 0) ml[warp] = make_float2(share.m, share.l);
      sync();
      if (warp == turn) {
        Partial sum = no_keys();
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum.m = fmaxf(sum.m, ml[w].x);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) add_scaled(sum, o[w * 32 + lane], ml[w].y, exp2_approx(ml[w].x - sum.m));
        finish(head(index), t, sum, end);
      }
      parity ^= 1;
      turn = (turn + 1) % kWarps;
    }
  }
};

}  // namespace attention
