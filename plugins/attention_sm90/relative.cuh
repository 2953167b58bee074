// Inkling-2's relative bias: for a token and a key within kExtent, rel[token, head] . bank[distance], rounded to bf16.
//
// The distances from a page's keys to the block's tokens are consecutive, so their rows of the bank are one piece of
// at most 2.3 KB, which comes with the page's keys (pages.cuh). A product of it with a token's states has the layout of
// the token's scores: rows are the warp's 16 keys, columns the heads.
#pragma once
#include "pages.cuh"
#include "relative_shape.cuh"

namespace attention {

// Relative states of the block's tokens, on their way to shared memory; zeros where no head or valid token is. All
// threads: to be made before q is loaded and stored behind it, so that one latency serves both.
struct RelativeStates {
  static constexpr int kPieces = kGroup * 8 * 2;  // of 16 bytes
  static_assert(kPieces <= kThreads, "a thread has one piece");
  uint4 piece;

  INK_DEVICE RelativeStates(const Args& args, int kv_head, int valid_tokens, int thread) {
    const int t = thread / 16, h = thread / 2 % 8;
    piece = make_uint4(0, 0, 0, 0);
    if (thread < kPieces && h < kHeadsPerKv && t < valid_tokens)
      piece = load_act16(args.rel +
                         ((size_t)(blockIdx.z * kGroup + t) * kHeads + kv_head * kHeadsPerKv + h) * kStates +
                         thread % 2 * 8);
  }
  INK_DEVICE void store(u8* smem, int thread) const {
    if (thread < kPieces) *(uint4*)(smem + RelativeSmem::kRel + thread * 16) = piece;
  }
};

// Bias of a page and the warp's 16 keys from `key + first_row` on: of token t and its four scores, two pairs of bf16.
INK_DEVICE void relative_bias(u32 (&out)[kGroup][2], const Step& step, const u8* smem, int stage, int key, int first_row,
                              int lane) {
  const int first = step.first_distance(key);
  const bool is_near = first < kExtent;  // of the whole block
  const u8* const bank = smem + RelativeSmem::kBank + stage * RelativeSmem::kBankBytes + lane / 16 * 16;
  const u8* const rel = smem + RelativeSmem::kRel + lane / 4 * RelativeSmem::kRowBytes + lane % 4 * 4;
#pragma unroll
  for (int t = 0; t < kGroup; ++t) {
    out[t][0] = out[t][1] = 0;
    if (!is_near) continue;
    const int distance = step.position(t) - (key + first_row);  // from the warp's first key
    // Row of a key: its distance. Keys behind the token have none, and what is read for them is not used, nor
    // is what lies behind the extent.
    u32 a[4];
    load_matrices(a, bank + max(0, distance - lane % 16 - first) * RelativeSmem::kRowBytes);
    const u8* const states = rel + t * 8 * RelativeSmem::kRowBytes;
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    mma_bf16(c, a, *(const u32*)states, *(const u32*)(states + 16));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int d = distance - lane / 4 - half * 8;
      out[t][half] = d >= 0 && d < kExtent ? pack_bf16(c[2 * half], c[2 * half + 1]) : 0;
    }
  }
}

}  // namespace attention
