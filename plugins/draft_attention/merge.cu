// The sums of all parts become the rows of `draft_attention`: a block a row. A warp adds every
// fourth part, a lane 4 neighbouring values of 128, or 2, or 1.
//
// Macros: see parts.cuh; SINKS. Grid: KV_HEADS x ROWS.
#include "parts.cuh"

constexpr int WARPS = 4, VALUES = DIM % 128 == 0 ? 4 : DIM % 64 == 0 ? 2 : 1;
constexpr int STEPS = (DIM + 32 * VALUES - 1) / (32 * VALUES), LISTS = (PARTS + 31) / 32;
constexpr int PARTS_OF_WARP = (PARTS + WARPS - 1) / WARPS;
constexpr float LOG2E = 1.4426950408889634f;

struct Shared {
  float sums[WARPS][DIM];
};

INK_DEVICE void load_values(float (&x)[VALUES], const float* from) {
  u32 bits[4];
  if (VALUES == 4) {
    const uint4 y = load_act16(from);
    bits[0] = y.x, bits[1] = y.y, bits[2] = y.z, bits[3] = y.w;
  } else if (VALUES == 2) {
    const uint2 y = load_act8(from);
    bits[0] = y.x, bits[1] = y.y;
  } else {
    bits[0] = load_act4(from);
  }
#pragma unroll
  for (int e = 0; e < VALUES; e++) x[e] = __uint_as_float(bits[e]);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    merge(const float* o, const float* ml, const float* sinks, const int* position, bf16* out) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int kv_head = blockIdx.x / ROWS, row = blockIdx.x % ROWS;
  if (threadIdx.x == 0) pdl_trigger();
  const int count = pages_of(load_act_int(position)).count;
  pdl_wait();
  const size_t first = (size_t)kv_head * PARTS * ROWS + row;
  float m = NO_KEY, own_m[LISTS], own_l[LISTS], l = 0.f;  // lane i has parts i, 32 + i, ...
#pragma unroll
  for (int i = 0; i < LISTS; i++) {
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
  for (int i = 0; i < LISTS; i++) {
    own_m[i] = exp2_approx(own_m[i] - m);
    l = fmaf(own_l[i], own_m[i], l);
  }
  l = warp_sum(l);
  if (SINKS) {
    const float sink = load_weight_float(sinks + kv_head * HEADS_PER_KV + row % HEADS_PER_KV);
    l += exp2_approx(fmaf(sink, LOG2E, -m));
  }

  float sums[STEPS][VALUES];
#pragma unroll
  for (int j = 0; j < STEPS; j++)
#pragma unroll
    for (int e = 0; e < VALUES; e++) sums[j][e] = 0.f;
#pragma unroll
  for (int p = 0; p < PARTS_OF_WARP; p++) {
    const int part = p * WARPS + warp;
    const float f = __shfl_sync(INK_FULL_WARP, own_m[p * WARPS / 32], part % 32);
    if (f == 0.f || part >= PARTS) continue;  // parts without pages have written nothing
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
      const int dim = (32 * j + lane) * VALUES;
      if (dim >= DIM) continue;
      float x[VALUES];
      load_values(x, o + (first + (size_t)part * ROWS) * DIM + dim);
#pragma unroll
      for (int e = 0; e < VALUES; e++) sums[j][e] = fmaf(x[e], f, sums[j][e]);
    }
  }
#pragma unroll
  for (int j = 0; j < STEPS; j++)
#pragma unroll
    for (int e = 0; e < VALUES; e++) {
      const int dim = (32 * j + lane) * VALUES + e;
      if (dim < DIM) sm.sums[warp][dim] = sums[j][e];
    }
  __syncthreads();
  const size_t head =
      ((size_t)(row / HEADS_PER_KV) * KV_HEADS + kv_head) * HEADS_PER_KV + row % HEADS_PER_KV;
  for (int dim = threadIdx.x; dim < DIM; dim += 32 * WARPS) {
    float sum = sm.sums[0][dim];
#pragma unroll
    for (int q = 1; q < WARPS; q++) sum += sm.sums[q][dim];
    out[head * DIM + dim] = to_bf16(sum / l);
  }
}
