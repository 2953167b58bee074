// What the kernels of `draft_head` share: sizes, and the request's draw.
//
// Macros: GROUP (rows), WIDTH (of hidden), RANK, VOCAB, HEAD (0 vanilla, 1 gated, 2 rnn),
// CONFIDENCE (0 none, 1 of the row, 2 of the token before it too).
#pragma once
#include "device.cuh"
#include "noise.cuh"

// Rows of the mixing matrix, values of one, and where its parts begin.
constexpr int MIXED = HEAD == 0 ? 0 : HEAD == 1 ? RANK : 3 * RANK;
constexpr int MIX_STRIDE = HEAD == 1 ? WIDTH + RANK : 2 * RANK + WIDTH;
constexpr int OF_HIDDEN = HEAD == 1 ? 0 : 2 * RANK, OF_TOKEN = HEAD == 1 ? WIDTH : RANK;

INK_DEVICE float sigmoid(float x) {
  return 1.f / (1.f + expf(-x));
}
INK_DEVICE void unpack8(float (&x)[8], const uint4& v) {
  x[0] = low_float(v.x), x[1] = high_float(v.x), x[2] = low_float(v.y), x[3] = high_float(v.y);
  x[4] = low_float(v.z), x[5] = high_float(v.z), x[6] = low_float(v.w), x[7] = high_float(v.w);
}
INK_DEVICE void as_floats8(float (&x)[8], const uint4& a, const uint4& b) {
  x[0] = __uint_as_float(a.x), x[1] = __uint_as_float(a.y), x[2] = __uint_as_float(a.z);
  x[3] = __uint_as_float(a.w), x[4] = __uint_as_float(b.x), x[5] = __uint_as_float(b.y);
  x[6] = __uint_as_float(b.z), x[7] = __uint_as_float(b.w);
}

// Parameters of a draw, which do not change during a step: addresses of one element each.
struct Draw {
  float temperature, top_p, min_p;
  int top_k;
  u64 seed;
  u32 place, purpose, anchor;  // of the noise, see plugins/noise.py

  INK_DEVICE Draw(const float* temperature_at, const int* top_k_at, const float* top_p_at,
                  const float* min_p_at, const u64* seed_at, const int* position_at,
                  const int* is_coupled_at, int row) {
    temperature = load_act_float(temperature_at);
    top_p = load_act_float(top_p_at);
    min_p = load_act_float(min_p_at);
    top_k = load_act_int(top_k_at);
    const uint2 words = load_act8(seed_at);
    seed = (u64)words.y << 32 | words.x;
    const bool is_coupled = load_act_int(is_coupled_at) != 0;
    const u32 position = load_act_int(position_at);
    place = position + 1 + row;
    purpose = is_coupled ? PURPOSE_SAMPLE : 1;  // 1: DRAFT
    anchor = is_coupled ? 0 : position;
  }
  INK_DEVICE bool is_filtered() const {
    return temperature != 0 && (min_p > 0 || (top_k > 0 && top_k < VOCAB) || top_p < 1);
  }
  // The words of tokens 4 quad .. 4 quad + 3.
  INK_DEVICE uint4 bits(u32 quad) const {
    return philox4x32(make_uint4(quad, place, purpose, anchor), (u32)seed, (u32)(seed >> 32));
  }
};
