// Constants of a decode attention kernel, its arguments and its map of shared memory.
//
// Macros, all set by tactics.py:
//   ATTN_TOKENS         T, rows of the step, 1..8
//   ATTN_GROUP          tokens that one block serves; blockIdx.z counts groups
//   ATTN_KV_HEADS       kv heads of this rank; blockIdx.y counts them
//   ATTN_HEADS_PER_KV   q heads of a kv head, 1..8
//   ATTN_WINDOW         keys that a row sees, itself included; 0: all
//   ATTN_RING_ROWS      rows of a slot's ring; 0: the cache is paged
//   ATTN_CLUSTER        blocks of a cluster
//   ATTN_CLUSTERS       clusters of a kv head; 1 with a window. Above 1 all blocks must be resident.
//   ATTN_MIN_PAGES      least pages that a block takes, without a window
//   ATTN_STAGES         pages of the ring in shared memory
//   ATTN_RELATIVE       1: Inkling-2's relative bias, sink per token and output gate
// A token's bits depend on its position and on ATTN_WINDOW, CLUSTER, CLUSTERS and MIN_PAGES; tactics
// of one layer that differ in T must agree on these.
#pragma once
#include "device.cuh"
#include "kv_layout.cuh"

namespace attention {

constexpr int kTokens = ATTN_TOKENS, kGroup = ATTN_GROUP;
constexpr int kKvHeads = ATTN_KV_HEADS, kHeadsPerKv = ATTN_HEADS_PER_KV, kHeads = kKvHeads * kHeadsPerKv;
constexpr int kWindow = ATTN_WINDOW, kRingRows = ATTN_RING_ROWS;
constexpr int kCluster = ATTN_CLUSTER, kClusters = ATTN_CLUSTERS, kMinPages = ATTN_MIN_PAGES;
constexpr int kStages = ATTN_STAGES;
constexpr bool kRelative = ATTN_RELATIVE;

constexpr int kDim = 128;
constexpr int kPage = kv_layout::kPageTokens;
using Tile = kv_layout::Tile<kDim>;
constexpr int kStageBytes = 2 * Tile::kBytes;  // K, then V
constexpr int kWarpgroups = 2, kWarps = 4 * kWarpgroups, kThreads = 32 * kWarps;
constexpr int kRows = 8 * kGroup;  // row 8 t + h is q head h of token t; heads from kHeadsPerKv on are zero
constexpr int kHeadsPerRank = (8 + kCluster - 1) / kCluster;  // heads that a block of a cluster merges
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNoKey = -1e30f;  // reference exponent before the first key; finite, so differences are no NaN
constexpr u32 kNoKeyBf16x2 = 0xFF80FF80u;  // -inf twice

static_assert(kTokens >= 1 && kTokens <= 8 && kGroup >= 1 && kGroup <= kTokens, "tokens");
static_assert(kHeadsPerKv >= 1 && kHeadsPerKv <= 8, "q heads per kv head");
static_assert(kWindow ? kClusters == 1 : kRingRows == 0, "without a window the cache is paged");
static_assert(kRingRows % kPage == 0 && (!kRingRows || kRingRows >= kWindow - 1 + kTokens), "ring rows");
// Pages that one block may meet: a deeper queue than stages needs two stages per warpgroup.
constexpr int kWindowPages = kWindow ? (kWindow + kTokens - 3) / kPage + 2 : 1 << 20;
constexpr bool kAllPagesFit = kWindow && (kWindowPages + kCluster - 1) / kCluster <= kStages;
static_assert(kStages % kWarpgroups == 0 && (kAllPagesFit || kStages >= 2 * kWarpgroups), "stages");

struct Args {
  const bf16* q;           // [T, H, 128]
  const void* sinks;       // float [H]; relative: bf16 [T, H]
  const u8* k_cache;       // kv_layout.cuh
  const u8* v_cache;
  const int* page_table;   // null for rings
  const int* position;     // [1]; this and the next two are stable while the step runs
  const int* num_tokens;   // [1]
  const int* slot;         // [1], null for pages
  const bf16* rel;         // relative: [T, H, 16]
  const bf16* bank;        // relative: [1024 distances, 16]
  const bf16* gate;        // relative: [T, H, 128], before the sigmoid
  bf16* out;               // [T, H, 128]
  float4* partials;        // [KV, 8, clusters, T, 32]: all bits set between launches
  float2* partial_sums;    // [KV, 8, clusters, T]: likewise
  int* error;              // [1]
  float scale;
};

// Shared memory. The ring serves as buffers of the merge when its pages are consumed.
struct Smem {
  static constexpr int kRow = 132;  // floats of a row of `transposed`: 128 and padding against bank conflicts
  static constexpr int kTransposed = 0;                                          // [warpgroup][row][132]
  static constexpr int kSums = kTransposed + kWarpgroups * kRows * kRow * 4;     // [warpgroup][warp][row]
  static constexpr int kMaxima = kSums + kWarps * kRows * 4;                     // [warpgroup][row]
  static constexpr int kWarpOut = kMaxima + kWarpgroups * kRows * 4;             // [2][warp][32] float4
  static constexpr int kWarpSums = kWarpOut + 2 * kWarps * 512;                  // [2][warp] float2
  static constexpr int kMergeBytes = (kWarpSums + 2 * kWarps * 8 + 1023) & ~1023;
  static constexpr int kRingBytes = kStages * kStageBytes;

  static constexpr int kQ = kRingBytes > kMergeBytes ? kRingBytes : kMergeBytes;  // [half][row][64]
  static constexpr int kP = kQ + kRows * kDim * 2;                                // [warpgroup][row][64]
  static constexpr int kReceived = kP + kWarpgroups * kRows * kPage * 2;          // [rank][head][t][32] float4
  static constexpr int kSlots = kCluster > 1 ? kCluster * kHeadsPerRank * kGroup : 0;
  static constexpr int kReceivedSums = kReceived + kSlots * 512;                  // [rank][head][t] float2
  static constexpr int kPageMaxima = kReceivedSums + ((kSlots * 8 + 15) & ~15);   // [warpgroup][t][4][warp] bf16x2
  static constexpr int kBars = kPageMaxima + kWarpgroups * kGroup * 64;           // K, V of each stage; received
  static constexpr int kBytes = kBars + (2 * kStages + 1) * 8;
};
static_assert(Smem::kBytes <= 232448, "shared memory");
#ifdef ATTN_SMEM_BYTES
static_assert(Smem::kBytes == ATTN_SMEM_BYTES, "tactics.py and shape.cuh disagree on shared memory");
#endif

// Reference point, denominator and output of some keys of one row; four dims per lane.
struct Partial {
  float4 o;
  float m, l;
};
INK_DEVICE Partial no_keys() { return {make_float4(0.f, 0.f, 0.f, 0.f), kNoKey, 0.f}; }
INK_DEVICE void add_scaled(Partial& to, float4 o, float l, float f) {
  to.l = fmaf(l, f, to.l);
  to.o.x = fmaf(o.x, f, to.o.x);
  to.o.y = fmaf(o.y, f, to.o.y);
  to.o.z = fmaf(o.z, f, to.o.z);
  to.o.w = fmaf(o.w, f, to.o.w);
}

}  // namespace attention
