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
INK_DEVICE u64 best_of(u32 key, int token) { return (u64)key << 32 | ~(u32)token; }
INK_DEVICE float largest_of(u64 best) { return value_of((u32)(best >> 32)); }
INK_DEVICE int token_of(u64 best) { return (int)~(u32)best; }
INK_DEVICE bool is_finite(float x) { return fabsf(x) < __uint_as_float(0x7F800000u); }
INK_DEVICE u64 bits_of(double number) {
  union {
    double number;
    u64 bits;
  } both;
  both.number = number;
  return both.bits;
}
INK_DEVICE double as_double(u64 bits) {
  union {
    u64 bits;
    double number;
  } both;
  both.bits = bits;
  return both.number;
}

// exp(x) of x <= 0 with half the work of the library's, which is most of these kernels': 2^(n /
// 128) from a table and a power series of what is left. Off by 2e-15 + 2e-16 |x| of itself; 0
// below -700. exp(0) is 1.
struct Exponential {
  double powers[128];

  INK_DEVICE void fill() {
    for (int i = threadIdx.x; i < 128; i += THREADS) powers[i] = exp2(i / 128.0);
  }
  INK_DEVICE double of(double x) const {
    const double shifted = x * 184.66496523378731 + 6755399441055744.0;  // 128 / ln 2, 1.5 * 2^52
    const int n = (int)(u32)bits_of(shifted);
    const double r = x - (shifted - 6755399441055744.0) * 0.0054152123481245727;  // ln 2 / 128
    const double series = r * (1.0 + r * (0.5 + r * (1.0 / 6 + r * (1.0 / 24))));
    const double power = powers[n & 127];
    const double result = power + power * series;
    return x < -700 ? 0.0 : as_double(bits_of(result) + ((u64)(long long)(n >> 7) << 52));
  }
  // Relative to the row's largest logit, which is finite.
  INK_DEVICE double weight(float logit, float largest) const {
    return of((double)logit - (double)largest);
  }
};

INK_DEVICE u64 load_act_u64(const u64* p) {
  const uint2 words = load_act8(p);
  return (u64)words.y << 32 | words.x;
}
INK_DEVICE double load_act_double(const double* p) {
  return as_double(load_act_u64((const u64*)p));
}
// Bits that order doubles, larger than 0.
INK_DEVICE u64 order_of(double x) {
  const u64 bits = bits_of(x + 0.0);
  return bits >> 63 ? ~bits : bits | (u64)1 << 63;
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

// exp(logit - largest) * inverse is the probability, unless the row is certain of a token.
struct Distribution {
  double inverse;
  float largest;
  u32 floor;
  int token, is_certain;

  INK_DEVICE double probability(const Exponential& exponential, u32 key, int its_token) const {
    if (is_certain) return its_token == token ? 1.0 : 0.0;
    return key >= floor ? exponential.weight(value_of(key), largest) * inverse : 0.0;
  }
};
// The best score and its token.
struct Drawn {
  u64 score;  // 0: none
  int token, unused;

  INK_DEVICE void keep(u64 other, int its_token) {
    if (other > score || (other == score && its_token < token)) score = other, token = its_token;
  }
  INK_DEVICE void keep_best_of_warp() {
    const u64 best = warp_max_u64(score);
    token = (int)~__reduce_max_sync(INK_FULL_WARP, score == best ? ~(u32)token : 0u);
    score = best;
  }
};

// A row's distribution from its parts, by a warp.
INK_DEVICE Distribution combine(const Exponential& exponential, const RowParts* rows, int number) {
  constexpr int kOfLane = (PARTS + 31) / 32;
  const RowPart* parts = rows->parts[number];
  u64 own[kOfLane], best = 0;
  double sums[kOfLane], sum = 0;
#pragma unroll
  for (int j = 0; j < kOfLane; j++) {
    const int part = j * 32 + (int)threadIdx.x % 32;
    own[j] = part < PARTS ? load_act_u64(&parts[part].best) : 0;
    sums[j] = part < PARTS ? load_act_double(&parts[part].sum) : 0.0;
    best = max(best, own[j]);
  }
  const u32 floor = load_act4(rows->floors + number);
  best = warp_max_u64(best);
  const float largest = largest_of(best);
  if (is_finite(largest)) {
#pragma unroll
    for (int j = 0; j < kOfLane; j++)
      if (own[j]) sum += sums[j] * exponential.weight(largest_of(own[j]), largest);
  }
  sum = warp_sum_double(sum);
  return {1.0 / sum, largest, floor, token_of(best), !is_finite(largest)};
}
