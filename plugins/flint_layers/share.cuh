// Which pages of the cache a block of layers.cu attends to in a layer, and their way into shared
// memory. The ring lies where the experts' and the q/k/v weights are at other times.
#pragma once
#define ATTN_TOKENS 1
#define ATTN_GROUP 1
#define ATTN_KV_HEADS KV_HEADS
#define ATTN_HEADS_PER_KV (HEADS / KV_HEADS)
#define ATTN_WINDOW 0
#define ATTN_RING_ROWS 0
#define ATTN_CLUSTER 1
#define ATTN_CLUSTERS (BLOCKS / KV_HEADS)
#define ATTN_MIN_PAGES 1
#define ATTN_STAGES 4
#define ATTN_RELATIVE 0
#include "attention_sm90/shape.cuh"

namespace attention {

constexpr int WINDOW_BLOCKS = 8;
constexpr int EARLY_STAGES = 2;  // of the ring lie where nothing else is at the end of a layer
// Pages of a layer without a window that each of the layers before requests for the L2.
constexpr int L2_LAYERS = 3, L2_PAGES = 2;
constexpr int JOIN_BARRIER = 6;
// SUM_COPIES of a reference point and denominator fill a sector of the L2, see memory.cuh.
static_assert(SUM_COPIES * WINDOW_BLOCKS == 32, "a copy a lane");

// Rows of a tile, which arm the barrier with their bytes. Not inlined, as all that only requests
// data: the code of a layer should stay in the instruction cache.
__device__ __noinline__ void copy_rows(u8* tile, const u8* source, int first, int count,
                                       u64* full) {
  mbar_expect(full, count * 2 * Tile::kRowBytes);
  const bool is_whole = count == kPage;
  if (count == 0) return;
#pragma unroll 1
  for (int block = 0; block < (is_whole ? 1 : Tile::kBlocks); block++) {
    const int at = block * Tile::kBlockBytes + first * Tile::kRowBytes;
    bulk_load_once(tile + at, source + at, is_whole ? Tile::kBytes : count * Tile::kRowBytes, full);
  }
}

// Which pages a block has, in layers with a window and in layers without.
struct Share {
  int first, count, stride, offset;
  int cluster, clusters, kv_head, window;

  INK_DEVICE bool takes_part() const { return cluster < clusters; }

  // One warp, `distance` layers before a layer without a window: some of this block's pages of it
  // on their way to the L2, the first ones first, but for those that come early anyway.
  INK_DEVICE void prefetch_to_l2(const u8* k_cache, const u8* v_cache, const int* table,
                                 int distance, int lane) const {
    const int item = EARLY_STAGES + max(L2_LAYERS - distance, 0) * L2_PAGES + lane / 2;
    if (lane < 2 * L2_PAGES && distance <= L2_LAYERS && item < count)
      bulk_prefetch((lane & 1 ? v_cache : k_cache) +
                        Tile::begin(table[first + item * stride], kKvHeads, kv_head),
                    Tile::kBytes);
    __syncwarp();
  }
};
INK_DEVICE Share find_share(int block, int position, int window) {
  Share p;
  p.window = window;
  const int blocks = window ? WINDOW_BLOCKS : kClusters;
  p.kv_head = block / blocks;
  p.cluster = p.kv_head < kKvHeads ? block % blocks : 1 << 20;
  if (window) {
    const int oldest = max(position - window + 1, 0) / kPage, newest = position / kPage;
    p.first = oldest + (p.cluster + WINDOW_BLOCKS - oldest % WINDOW_BLOCKS) % WINDOW_BLOCKS;
    p.count =
        p.cluster >= WINDOW_BLOCKS || p.first > newest ? 0 : (newest - p.first) / WINDOW_BLOCKS + 1;
    p.stride = WINDOW_BLOCKS;
    p.offset = p.first / WINDOW_BLOCKS % kWarpgroups;
    p.clusters = WINDOW_BLOCKS;
  } else {
    const int pages = position / kPage + 1, length = (position / kPage + kClusters) / kClusters;
    p.first = p.cluster * length;
    p.stride = 1;
    p.offset = 0;
    p.clusters = (pages + length - 1) / length;
    p.count = p.cluster < p.clusters ? max(0, min(length, pages - p.first)) : 0;
  }
  return p;
}

// The pages of this block in one layer.
struct Pages : Share {
  const u8* k_cache;
  const u8* v_cache;
  const int* table;  // null: a ring
  int ring_first, ring_pages;
  int position;

  INK_DEVICE int page(int item) const { return first + item * stride; }
  INK_DEVICE int key(int item) const { return page(item) * kPage; }
  INK_DEVICE int first_item(int warpgroup) const { return (warpgroup + offset) % kWarpgroups; }
  INK_DEVICE int locate(int j) const { return table ? table[j] : ring_first + j % ring_pages; }
  INK_DEVICE int first_row(int key) const {
    return window ? max(0, position - window + 1 - key) : 0;
  }
  INK_DEVICE bool has_newest() const { return count > 0 && page(count - 1) == position / kPage; }

  // One thread: the rows of older positions of a page to its stage.
  INK_DEVICE void copy(bool is_v, int item, int physical, u8* ring, u64* bars) const {
    const int at = key(item), stage = item % kStages;
    const int from = first_row(at), to = max(from, min(kPage, position - at));
    const u8* source = (is_v ? v_cache : k_cache) + Tile::begin(physical, kKvHeads, kv_head);
    copy_rows(ring + stage * kStageBytes + is_v * Tile::kBytes, source, from, to - from,
              bars + 2 * stage + is_v);
  }
  // One warp: items [from, to) before their layer's loop, K and V.
  INK_DEVICE void prefetch(int from, int to, u8* ring, u64* bars, int lane) const {
    const int item = from + lane / 2;
    if (item < min(to, count)) copy(lane & 1, item, locate(page(item)), ring, bars);
    __syncwarp();
  }
  // One warpgroup: zeros in the rows of V that are neither copied nor the step's own.
  INK_DEVICE void clear_rest(int item, u8* ring, int thread) const {
    const int at = key(item), begin = first_row(at), end = min(kPage, position + 1 - at);
    if (end - begin == kPage) return;
    u8* const v = ring + item % kStages * kStageBytes + Tile::kBytes;
    for (int c = thread; c < kPage * 16; c += 128) {
      const int row = c / 16, chunk = c % 16;
      if (row < begin || row >= end)
        *(uint4*)(v + chunk / 8 * Tile::kBlockBytes + row * Tile::kRowBytes + chunk % 8 * 16) =
            make_uint4(0, 0, 0, 0);
    }
  }
};

}  // namespace attention
