// Which pages a block attends to, and their way into shared memory.
#pragma once
#include "shape.cuh"
#if ATTN_RELATIVE
#include "relative_shape.cuh"
#endif

namespace attention {

// Positions of a block's tokens. Rows that num_tokens leaves out stand at the last valid position.
struct Step {
  int start;  // of row 0 of the step; rows of older positions may be read before the wait
  int base;   // of the block's first token
  int last;   // of the block's last token
  int count;  // valid rows of the step
  INK_DEVICE int position(int t) const { return min(base + t, last); }
#if ATTN_RELATIVE
  // Distances from keys of the page at `key` to tokens of the block that have a bias: [first, end).
  INK_DEVICE int first_distance(int key) const { return max(0, base - (key + kPage - 1)); }
  INK_DEVICE int end_distance(int key) const { return min(kExtent, last + 1 - key); }
#endif
};

INK_DEVICE Step read_step(const Args& args) {
  const int start = load_act_int(args.position), given = load_act_int(args.num_tokens);
  const int count = max(1, min(given, kTokens)), t0 = blockIdx.z * kGroup;
  return {start, start + min(t0, count - 1), start + min(t0 + kGroup - 1, count - 1), count};
}

// Pages per block, without a window, for a token at p: a step function of the position alone whose
// plateaus are at least 64 * blocks positions long.
INK_DEVICE int split_length(int p) {
  constexpr int kSplits = kCluster * kClusters;
  return max(kMinPages, (p / kPage + kSplits) / kSplits);
}

// Pages of a block: item i < count is page first + i * kStride; it is of warpgroup (i + offset) % 2.
// With a window, page j is of rank j % kCluster and of warpgroup j / kCluster % 2. Without, blocks take
// runs of pages. Either way an owner depends on the page, not on the width of the step.
struct Work {
  static constexpr int kStride = kWindow ? kCluster : 1;
  int first, count, offset;
  int clusters;  // that have pages

  INK_DEVICE int page(int item) const { return first + item * kStride; }
  INK_DEVICE int key(int item) const { return page(item) * kPage; }
  INK_DEVICE int first_item(int warpgroup) const { return (warpgroup + offset) % kWarpgroups; }
};

INK_DEVICE Work find_work(const Step& step, int rank, int cluster, int length, int last_position) {
  Work work;
  if (kWindow) {
    const int oldest = max(step.base - kWindow + 1, 0) / kPage, newest = step.last / kPage;
    work.first = oldest + (rank + kCluster - oldest % kCluster) % kCluster;
    work.count = work.first > newest ? 0 : (newest - work.first) / kCluster + 1;
    work.offset = work.first / kCluster % kWarpgroups;
    work.clusters = 1;
  } else {
    const int pages = last_position / kPage + 1;
    work.first = (cluster * kCluster + rank) * length;
    work.count = max(0, min(length, pages - work.first));
    work.offset = 0;
    work.clusters = ((pages + length - 1) / length + kCluster - 1) / kCluster;
  }
  return work;
}

enum RowsOf { kAll, kBeforeStep, kThisStep };

// Copies pages to stages. A stage has a barrier for K and one for V, so that scores need not wait for V.
struct Loader {
  const Args& args;
  const Step& step;
  u8* smem;
  u64* bars;
  int kv_head, slot;

  INK_DEVICE u64* bar(int stage, bool is_v) const { return bars + 2 * stage + is_v; }
  // Physical page of page j of the sequence.
  INK_DEVICE int locate(int j) const {
    return kv_layout::page_of(j * kPage, kRingRows ? nullptr : args.page_table, slot, kRingRows ? kRingRows : kPage);
  }
  // Rows of the page at `key` that some token of the block sees: [first_row, end_row).
  INK_DEVICE int first_row(int key) const { return kWindow ? max(0, step.base - kWindow + 1 - key) : 0; }
  INK_DEVICE int end_row(int key) const { return min(kPage, step.last + 1 - key); }

  // One thread. kBeforeStep arms the barrier for all rows, and kThisStep must follow. Rows of the bank that the page's
  // keys need come with them.
  INK_DEVICE void copy(bool is_v, int stage, int key, int page, RowsOf rows) const {
    const int first = first_row(key), end = end_row(key);
    const int middle = max(first, min(end, step.start - key));
    u64* const full = bar(stage, is_v);
    if (rows != kThisStep) {
      int expected = (end - first) * 2 * Tile::kRowBytes;
#if ATTN_RELATIVE
      const int distance = step.first_distance(key);
      const int bank_bytes = is_v ? 0 : max(0, step.end_distance(key) - distance) * RelativeSmem::kRowBytes;
      expected += bank_bytes;
#endif
      mbar_expect(full, expected);
#if ATTN_RELATIVE
      if (bank_bytes > 0)
        bulk_load(smem + RelativeSmem::kBank + stage * RelativeSmem::kBankBytes, args.bank + distance * kStates,
                  bank_bytes, full);
#endif
    }
    const int from = rows == kThisStep ? middle : first, to = rows == kBeforeStep ? middle : end;
    const u8* source = (is_v ? args.v_cache : args.k_cache) + Tile::begin(page, kKvHeads, kv_head);
    u8* target = smem + stage * kStageBytes + is_v * Tile::kBytes;
    if (to - from == kPage) {
      bulk_load(target, source, Tile::kBytes, full);
    } else if (from < to) {
      source += from * Tile::kRowBytes;
      target += from * Tile::kRowBytes;
      bulk_load(target, source, (to - from) * Tile::kRowBytes, full);
      bulk_load(target + Tile::kBlockBytes, source + Tile::kBlockBytes, (to - from) * Tile::kRowBytes, full);
    }
  }

  // One warpgroup: zeros in the rows of V that are not copied. Their probabilities are zero, but
  // what a recycled page or an earlier kernel left there may be NaN.
  INK_DEVICE void clear_rest(int stage, int key, int thread) const {
    const int first = first_row(key), end = end_row(key);
    if (end - first == kPage) return;
    u8* const v = smem + stage * kStageBytes + Tile::kBytes;
    for (int c = thread; c < kPage * 16; c += 128) {
      const int row = c / 16, chunk = c % 16;
      if (row < first || row >= end)
        *(uint4*)(v + chunk / 8 * Tile::kBlockBytes + row * Tile::kRowBytes + chunk % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
  }
};

}  // namespace attention
