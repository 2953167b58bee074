// Shape of attention_window.cu, and the operands that its lanes have of keys and values. Its macros stand there.
#pragma once
#include "device.cuh"
#include "kv_layout.cuh"

namespace window {

constexpr int kHeadsPerKv = ATTN_HEADS_PER_KV, kHeads = ATTN_KV_HEADS * kHeadsPerKv;
constexpr int kWindow = ATTN_WINDOW, kExtent = ATTN_EXTENT, kRingRows = ATTN_RING_ROWS;
constexpr int kDim = 128, kStates = 16, kPage = kv_layout::kPageTokens;
using Tile = kv_layout::Tile<kDim>;
constexpr int kBlocks = 8, kWarps = 4, kThreads = 32 * kWarps;
constexpr int kTiles = (kWindow + 16 * kWarps * kBlocks - 1) / (16 * kWarps * kBlocks);  // of 16 keys
constexpr int kWarpKeys = 16 * kTiles, kKeys = kWarps * kWarpKeys;
constexpr int kSteps = kKeys / 16, kPairs = (kHeadsPerKv + 1) / 2;
constexpr int kOwn = 8;  // the last keys of all, of which the step itself may have written some
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNoKey = -1e30f;  // reference point without a key; finite, so no difference is NaN
static_assert(kTiles <= 2 && kBlocks * 16 == kDim && ATTN_TOKENS <= kOwn, "window_tactics sees to it");

// Where the block's rows lie in a cache: 128 bytes that many times behind its begin. Few instructions for each of a lane's
// many rows: no division by the ring's length. Keys before 0 have the rows of others.
struct Rows {
  const int* page_table;  // of pages alone
  int key0;               // the block's first key
  u32 first, begin;       // its row in the ring, and the kv head's in the slot's first page, or in page 0

  INK_DEVICE Rows(const int* entries, int slot, int kv_head, int key0)
      : page_table(entries),
        key0(key0),
        first((u32)(key0 + kLead) % kRing),
        begin((u32)(Tile::begin(kRingRows ? slot * (kRingRows / kPage) : 0, ATTN_KV_HEADS, kv_head) / kRowBytes)) {}
  INK_DEVICE u32 operator[](int offset) const {
    if (!kRingRows) {
      const u32 key = max(0, key0 + offset);
      return begin + page_table[key / kPage] * kPageRows + key % kPage;
    }
    const u32 r = first + offset, row = min(r, r - kRing);  // below 0 is a large number
    return begin + row + row / kPage * (kPageRows - kPage);
  }

 private:
  static constexpr u32 kRowBytes = Tile::kRowBytes, kPageRows = ATTN_KV_HEADS * Tile::kBytes / kRowBytes;
  static constexpr u32 kRing = kRingRows ? kRingRows : 1;
  static constexpr int kLead = (kBlocks * kKeys + kRing - 1) / kRing * kRing;
  static_assert(!kRingRows || kRingRows >= kKeys, "the block's keys pass the ring's end once");
};
INK_DEVICE const u8* row_of(const u8* begin, u32 row) { return begin + (size_t)row * Tile::kRowBytes; }
// A chunk of 16 bytes in the row of a key, of which its place in a page's eighth counts.
INK_DEVICE u32 in_row(u32 key, u32 chunk) { return chunk / 8 * Tile::kBlockBytes + (chunk % 8 ^ key % 8) * 16; }
// Chunks t, t + 4, t + 8 and t + 12.
INK_DEVICE void load_key(uint4 (&to)[4], const u8* row, const u32 (&chunks)[4]) {
#pragma unroll
  for (u32 i = 0; i < 4; ++i) to[i] = load_act16(row + chunks[i]);
}
// A operands of V^T: rows g and g + 8 of tile i are dims 4 g + 2 i and one more, columns the keys 2 t, 2 t + 1, 2 t + 8 and
// 2 t + 9, of which v has four dims each.
INK_DEVICE void transpose_values(u32 (&a)[2][4], const uint2 (&v)[4]) {
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const uint2 x = v[2 * pair], y = v[2 * pair + 1];
    a[0][2 * pair] = __byte_perm(x.x, y.x, 0x5410);
    a[0][2 * pair + 1] = __byte_perm(x.x, y.x, 0x7632);
    a[1][2 * pair] = __byte_perm(x.y, y.y, 0x5410);
    a[1][2 * pair + 1] = __byte_perm(x.y, y.y, 0x7632);
  }
}

// 2^x for a whole x <= 0; 0 below -126.
INK_DEVICE float power_of_two(float x) {
  return __uint_as_float(__float_as_uint(fmaxf(x, -127.f) + (12582912.f + 127.f)) << 23);
}
INK_DEVICE float round_to_whole(float x) {
  return __fadd_rn(__fadd_rn(x, 12582912.f), -12582912.f);
}
INK_DEVICE float half_of(u32 pair, u32 index) { return __uint_as_float(index ? pair & 0xFFFF0000u : pair << 16); }
INK_DEVICE float max_over_keys(float x) {
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) x = fmaxf(x, __shfl_xor_sync(INK_FULL_WARP, x, d));
  return x;
}
INK_DEVICE float sum_over_keys(float x) {
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) x += __shfl_xor_sync(INK_FULL_WARP, x, d);
  return x;
}

}  // namespace window
