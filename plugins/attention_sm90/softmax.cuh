// Scores of a page to probabilities, with a running reference point per row.
//
// A thread of a warpgroup has keys 16 w + lane / 4 and 8 more of the page, and columns 2 (lane % 4) and
// 1 more of every token's eight rows: s[t] = {key a, row e}, {key a, row e + 1}, {key b, e}, {key b, e + 1}.
#pragma once
#include "shape.cuh"
#include "sm90.cuh"

namespace attention {

// The reference point of a row is a maximum of its scores rounded to bf16: it need not be exact, only the
// same in all threads. It moves when a score exceeds it by more than 2^8, which is rare after the first
// page. So a warpgroup first asks whether any of its rows must move, and only then reduces maxima. The
// answer for one row does not depend on the others: it is "some score's bf16 exceeds the row's limit".
struct Softmax {
  float m[kGroup][2];  // in powers of two
  float l[kGroup][2];  // this thread's share of the denominator
  u32 limit[kGroup];   // bf16x2, in the unit of the scores

  INK_DEVICE void reset() {
#pragma unroll
    for (int t = 0; t < kGroup; ++t) {
      m[t][0] = m[t][1] = kNoKey;
      l[t][0] = l[t][1] = 0.f;
      limit[t] = kNoKeyBf16x2;
    }
  }
};

// Largest of each token's pairs over the eight lanes that share lane % 4, to shared memory: halves the
// number of tokens at each exchange instead of exchanging all.
INK_DEVICE void store_page_maxima(const u32 (&x)[kGroup], u32* page_maxima, int warp, int lane) {
  constexpr int kLog = kGroup > 4 ? 3 : kGroup > 2 ? 2 : kGroup > 1 ? 1 : 0, kPadded = 1 << kLog;
  u32 v[kPadded];
#pragma unroll
  for (int t = 0; t < kPadded; ++t) v[t] = t < kGroup ? x[t < kGroup ? t : 0] : kNoKeyBf16x2;
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    const int bit = 16 >> step;
    if (step < kLog) {
      const int half = kPadded >> (step + 1);
      const bool upper = lane & bit;
#pragma unroll
      for (int t = 0; t < half; ++t) {
        const u32 keep = upper ? v[t + half] : v[t], send = upper ? v[t] : v[t + half];
        v[t] = sm90::max_bf16x2(keep, __shfl_xor_sync(INK_FULL_WARP, send, bit));
      }
    } else {
      v[0] = sm90::max_bf16x2(v[0], __shfl_xor_sync(INK_FULL_WARP, v[0], bit));
    }
  }
  const int eighth = lane >> 2, token = eighth >> (3 - kLog);
  if ((eighth & ((8 >> kLog) - 1)) == 0 && token < kGroup) page_maxima[(token * 4 + (lane & 3)) * 4 + warp] = v[0];
}

// s: masked scores in, probabilities out. o is rescaled where a reference moves. scale: powers of two per
// unit of the scores. page_maxima: [t][4][warp] of this warpgroup.
INK_DEVICE void probabilities(float (&s)[kGroup][4], float (&o)[2][kGroup][4], Softmax& state, float scale,
                              u32* page_maxima, bool is_first, int warpgroup, int warp, int lane) {
  u32 x[kGroup];
  u32 above = 0;
#pragma unroll
  for (int t = 0; t < kGroup; ++t) {
    x[t] = pack_bf16(fmaxf(s[t][0], s[t][2]), fmaxf(s[t][1], s[t][3]));
    above |= sm90::max_bf16x2(x[t], state.limit[t]) ^ state.limit[t];
  }
  if (is_first || sm90::named_barrier_or(4 + warpgroup, 128, above != 0)) {
    store_page_maxima(x, page_maxima, warp, lane);
    named_barrier(2 + warpgroup, 128);
    const float headroom = 8.f / scale;
#pragma unroll
    for (int t = 0; t < kGroup; ++t) {
      const uint4 v = *(const uint4*)(page_maxima + (t * 4 + (lane & 3)) * 4);
      const u32 top = sm90::max_bf16x2(sm90::max_bf16x2(v.x, v.y), sm90::max_bf16x2(v.z, v.w));
      const u32 moves = sm90::max_bf16x2(top, state.limit[t]) ^ state.limit[t];
      const u32 limit = pack_bf16(low_float(top) + headroom, high_float(top) + headroom);
      const u32 mask = (moves & 0xFFFFu ? 0xFFFFu : 0u) | (moves >> 16 ? 0xFFFF0000u : 0u);
      state.limit[t] = (limit & mask) | (state.limit[t] & ~mask);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float old = state.m[t][e];
        if (e ? moves >> 16 : moves & 0xFFFFu) state.m[t][e] = (e ? high_float(top) : low_float(top)) * scale;
        if (is_first) continue;  // nothing to rescale yet
        const float f = exp2_approx(old - state.m[t][e]);
        state.l[t][e] *= f;
        o[0][t][e] *= f;
        o[0][t][e + 2] *= f;
        o[1][t][e] *= f;
        o[1][t][e + 2] *= f;
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kGroup; ++t) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[t][e] = exp2_approx(fmaf(s[t][e], scale, -state.m[t][e & 1]));
    state.l[t][0] += s[t][0] + s[t][2];
    state.l[t][1] += s[t][1] + s[t][3];
  }
}

// Probabilities as bf16 to the warpgroup's P [row][64 keys], 128-byte swizzle. to: this lane's row of token 0.
INK_DEVICE void store_probabilities(const float (&s)[kGroup][4], u32 to) {
#pragma unroll
  for (int t = 0; t + 1 < kGroup; t += 2)
    sm90::store_transposed(to + t * 1024, pack_bf16(s[t][0], s[t][1]), pack_bf16(s[t][2], s[t][3]),
                           pack_bf16(s[t + 1][0], s[t + 1][1]), pack_bf16(s[t + 1][2], s[t + 1][3]));
  if (kGroup % 2) {
    constexpr int t = kGroup - 1;
    sm90::store_transposed(to + t * 1024, pack_bf16(s[t][0], s[t][1]), pack_bf16(s[t][2], s[t][3]));
  }
}

}  // namespace attention
