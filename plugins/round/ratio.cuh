// What both kernels of the ratio test (ratio.cu) share: sizes, distributions, sums, noise.
//
// Rows: first those of the target, then those of the drafter. Of w drafts that are verified the
// first w + 1 and w count.
//
// Macros: VOCAB, TARGET_ROWS (n), DRAFT_ROWS (at most n - 1), THREADS, PARTS (blocks of a row of
// `ratio_rows`), BLOCKS (of `ratio_test`).
#pragma once
#define LAST_ROW 0
#include "../w4a16/sample.cu"
#include "state.cuh"

constexpr int kRows = TARGET_ROWS + DRAFT_ROWS;
constexpr int kBatch = 16;  // loads of a thread on their way at once, about
constexpr u32 kPurposeAccept = 2, kPurposeResidual = 3;  // see runtime/noise.py
static_assert(DRAFT_ROWS < TARGET_ROWS && DRAFT_ROWS <= kMaxDrafts, "a row behind each draft");

// A part's share of a row's distribution: the largest scaled logit with its token, as `best_of`
// makes it, and the sum of exp(logit - largest) over what the filters keep.
struct RowPart {
  u64 best;
  double sum;
};
// What `ratio_rows` hands to `ratio_test`.
struct RowParts {
  RowPart parts[kRows][PARTS];
  u32 floors[kRows];  // keys below it are filtered out
};

// Larger for the lower token.
INK_DEVICE u64 best_of(u32 key, int token) {
  return (u64)key << 32 | ~(u32)token;
}
INK_DEVICE float largest_of(u64 best) {
  return value_of((u32)(best >> 32));
}
INK_DEVICE int token_of(u64 best) {
  return (int)~(u32)best;
}
INK_DEVICE bool is_finite(float x) {
  return fabsf(x) < __uint_as_float(0x7F800000u);
}
// Of a finite largest logit, and of minus infinity too; always the same bits for the same numbers.
INK_DEVICE double weight_of(float logit, float largest) {
  return exp((double)logit - (double)largest);
}

INK_DEVICE u64 load_act_u64(const u64* p) {
  const uint2 words = load_act8(p);
  return (u64)words.y << 32 | words.x;
}
INK_DEVICE double as_double(u64 bits) {
  union {
    u64 bits;
    double number;
  } both;
  both.bits = bits;
  return both.number;
}
INK_DEVICE double load_act_double(const double* p) {
  return as_double(load_act_u64((const u64*)p));
}
// Bits that order doubles, larger than 0.
INK_DEVICE u64 order_of(double x) {
  union {
    double number;
    u64 bits;
  } both;
  both.number = x + 0.0;
  return both.bits >> 63 ? ~both.bits : both.bits | (u64)1 << 63;
}

// Every lane has the same bits: the order of additions is fixed, but for which of two comes first.
INK_DEVICE double warp_sum_double(double x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(INK_FULL_WARP, x, o);
  return x;
}
INK_DEVICE u64 warp_max_u64(u64 x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x = max(x, __shfl_xor_sync(INK_FULL_WARP, x, o));
  return x;
}

// Words of token ids 4 quad .. 4 quad + 3, of the round whose anchor stands at `anchor`.
INK_DEVICE uint4 round_bits(u64 seed, u32 position, u32 purpose, u32 anchor, u32 quad) {
  return philox4x32(make_uint4(quad, position, purpose, anchor), (u32)seed, (u32)(seed >> 32));
}
