// Where the keys and values of a token lie in a cache buffer. kv_layout.py is the mirror of this file.
//
// A buffer is a row of pages; a page is 64 tokens of all kv heads of this rank:
//
//     [page][kv head][column block][token (64)][min(d, 64) dims]          bfloat16
//
// k_cache and v_cache are two buffers of this same form. A column block is 64 dims (all of them when
// d < 64), so with d >= 64 a token's row in a block is 128 bytes. In such rows the 16-byte chunk c
// stands at chunk c ^ (token & 7): the 128-byte swizzle of wgmma and bulk copies, so that plain copies
// of a tile (16 KB for d = 128) give matrix operands. Shorter rows are not swizzled.
//
// Position p lies in row p % 64 of page
//     page_table[p / 64]                             of a paged buffer,
//     slot * (R / 64) + (p % R) / 64                 of a ring of R rows per slot, R a multiple of 64.
#pragma once

namespace kv_layout {

constexpr int kPageTokens = 64;

// One kv head's tokens of a page. D: head dim, a multiple of 16, at most 64 or a multiple of 64.
template <int D>
struct Tile {
  static_assert(D >= 16 && D % 16 == 0 && (D <= 64 || D % 64 == 0), "head dim has no layout");
  static constexpr int kBlockDims = D < 64 ? D : 64;
  static constexpr int kBlocks = D / kBlockDims;
  static constexpr int kRowBytes = kBlockDims * 2;
  static constexpr int kBlockBytes = kPageTokens * kRowBytes;
  static constexpr int kBytes = kBlocks * kBlockBytes;

  // Byte of dim 8 * chunk of a token in the tile; the 16 bytes from there hold 8 consecutive dims.
  static __device__ __forceinline__ int chunk(int token, int chunk) {
    const int block = chunk / (kBlockDims / 8), in_row = chunk % (kBlockDims / 8);
    return block * kBlockBytes + token * kRowBytes +
           (kRowBytes == 128 ? (in_row ^ (token & 7)) : in_row) * 16;
  }
  // Byte of one dim of a token in the tile.
  static __device__ __forceinline__ int dim(int token, int dim) {
    return chunk(token, dim / 8) + dim % 8 * 2;
  }
  // Byte where the tile of a page and a kv head begins in the buffer.
  static __device__ __forceinline__ long long begin(int page, int num_kv_heads, int kv_head) {
    return ((long long)page * num_kv_heads + kv_head) * kBytes;
  }
};

// Page of position p. page_table: null for a ring of ring_rows rows per slot.
__device__ __forceinline__ int page_of(int p, const int* page_table, int slot, int ring_rows) {
  if (page_table) return page_table[p / kPageTokens];
  return slot * (ring_rows / kPageTokens) + p % ring_rows / kPageTokens;
}

}  // namespace kv_layout
