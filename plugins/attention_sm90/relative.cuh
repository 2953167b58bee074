// Inkling-2's relative bias: for a token and a key within kExtent, R[token, head] . bank[distance], rounded to
// bf16. Compiled, but not yet run on a GPU in this form.
#pragma once
#include "pages.cuh"
#include "shape.cuh"

namespace attention {

struct RelativeBias {
  static constexpr int kExtent = 1024;
  static constexpr bool kKeeps = kGroup <= 4;  // wide steps have no registers to spare and read R again for each page
  const Args& args;
  int kv_head, t0;
  u32 kept[kKeeps ? kGroup : 1][2];

  INK_DEVICE RelativeBias(const Args& args, int kv_head, int t0, int lane) : args(args), kv_head(kv_head), t0(t0) {
    if (kKeeps) {
#pragma unroll
      for (int t = 0; t < kGroup; ++t) read(kept[kKeeps ? t : 0], t, lane);
    }
  }
  // B fragment of a token's R: 16 states x 8 heads.
  INK_DEVICE void read(u32 (&rel)[2], int t, int lane) const {
    const int h = lane / 4;
    rel[0] = rel[1] = 0;
    if (h < kHeadsPerKv && t0 + t < kTokens) {
      const bf16* row = args.rel + ((size_t)(t0 + t) * kHeads + kv_head * kHeadsPerKv + h) * 16 + (lane & 3) * 2;
      rel[0] = *(const u32*)row;
      rel[1] = *(const u32*)(row + 8);
    }
  }

  // Powers of two, in the layout of the scores. key: first of the page; key_a: the thread's first.
  INK_DEVICE void compute(float (&out)[kGroup][4], const Step& step, int key, int key_a, int lane) const {
    const bool is_near = step.base - (key + kPage - 1) < kExtent;
#pragma unroll
    for (int t = 0; t < kGroup; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[t][e] = 0.f;
      if (!is_near) continue;
      const int distance = step.position(t) - key_a;
      u32 a[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int d = max(0, min(distance - (e & 1) * 8, kExtent - 1));
        a[e] = *(const u32*)(args.bank + d * 16 + (lane & 3) * 2 + (e >> 1) * 8);
      }
      u32 rel[2];
      if (kKeeps) {
        rel[0] = kept[kKeeps ? t : 0][0];
        rel[1] = kept[kKeeps ? t : 0][1];
      } else {
        read(rel, t, lane);
      }
      mma_bf16(out[t], a, rel[0], rel[1]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int d = distance - (e >> 1) * 8;
        out[t][e] = d >= 0 && d < kExtent ? round_bf16(out[t][e]) * kLog2e : 0.f;
      }
    }
  }
};

}  // namespace attention
