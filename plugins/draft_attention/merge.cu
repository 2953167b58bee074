// The sums of all parts become the rows of `draft_attention`: a warp a row. A lane has 4
// neighbouring values of 128, or 2, or 1.
//
// Macros: see parts.cuh; SINKS. Grid: KV_HEADS x ROWS rows, WARPS a block.
#include "parts.cuh"

constexpr int WARPS = 4, VALUES = DIM % 128 == 0 ? 4 : DIM % 64 == 0 ? 2 : 1;
constexpr float LOG2E = 1.4426950408889634f;

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    merge(const float* o, const float* ml, const float* sinks, const int* position, bf16* out) {
  const int lane = threadIdx.x % 32, number = blockIdx.x * WARPS + threadIdx.x / 32;
  if (threadIdx.x == 0) pdl_trigger();
  const int count = pages_of(load_act_int(position)).count;
  pdl_wait();
  if (number >= KV_HEADS * ROWS) return;
  const int kv_head = number / ROWS, row = number % ROWS;
  const size_t first = (size_t)kv_head * PARTS * ROWS + row;
  float m = NO_KEY, own_m[(PARTS + 31) / 32], own_l[(PARTS + 31) / 32], l = 0.f;
#pragma unroll
  for (int i = 0; i < (PARTS + 31) / 32; i++) {
    const int part = 32 * i + lane;
    const bool has_pages = begin_of(part, count) < begin_of(part + 1, count);
    const bool has = part == 0 || (part < PARTS && has_pages);
    const uint2 bits = has ? load_act8(ml + (first + (size_t)part * ROWS) * 2) : make_uint2(0, 0);
    own_m[i] = has ? __uint_as_float(bits.x) : NO_KEY;
    own_l[i] = __uint_as_float(bits.y);
    m = fmaxf(m, own_m[i]);
  }
  m = warp_max(m);
#pragma unroll
  for (int i = 0; i < (PARTS + 31) / 32; i++) {
    own_m[i] = exp2_approx(own_m[i] - m);
    l = fmaf(own_l[i], own_m[i], l);
  }
  l = warp_sum(l);
  if (SINKS) {
    const float sink = load_weight_float(sinks + kv_head * HEADS_PER_KV + row % HEADS_PER_KV);
    l += exp2_approx(fmaf(sink, LOG2E, -m));
  }
  // What the parts without pages have not written is multiplied with nothing.
  constexpr int STEPS = (DIM + 32 * VALUES - 1) / (32 * VALUES);
  float sums[STEPS][VALUES];
#pragma unroll
  for (int j = 0; j < STEPS; j++)
#pragma unroll
    for (int e = 0; e < VALUES; e++) sums[j][e] = 0.f;
#pragma unroll
  for (int i = 0; i < (PARTS + 31) / 32; i++)
#pragma unroll 8
    for (int p = 0; p < (PARTS < 32 ? PARTS : 32); p++) {
      const int part = 32 * i + p;
      const float f = __shfl_sync(INK_FULL_WARP, own_m[i], p);
      if (f == 0.f || part >= PARTS) continue;
      const float* from = o + (first + (size_t)part * ROWS) * DIM;
#pragma unroll
      for (int j = 0; j < STEPS; j++) {
        const int dim = (32 * j + lane) * VALUES;
        if (dim >= DIM) continue;
        u32 x[4];
        if (VALUES == 4) {
          const uint4 y = load_act16(from + dim);
          x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
        } else if (VALUES == 2) {
          const uint2 y = load_act8(from + dim);
          x[0] = y.x, x[1] = y.y;
        } else {
          x[0] = load_act4(from + dim);
        }
#pragma unroll
        for (int e = 0; e < VALUES; e++) sums[j][e] = fmaf(__uint_as_float(x[e]), f, sums[j][e]);
      }
    }
  const size_t head = ((size_t)(row / HEADS_PER_KV) * KV_HEADS + kv_head) * HEADS_PER_KV +
                      row % HEADS_PER_KV;
#pragma unroll
  for (int j = 0; j < STEPS; j++) {
    const int dim = (32 * j + lane) * VALUES;
    if (dim >= DIM) continue;
#pragma unroll
    for (int e = 0; e < VALUES; e++) out[head * DIM + dim + e] = to_bf16(sums[j][e] / l);
  }
}
