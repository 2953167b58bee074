// Building blocks of the small-token linear kernels: weights in chunks, 1..8 tokens, bf16
// activations.
//
// Layout (packing.py packs it): a chunk is 16 rows x 256 k. A matrix is [row tile][k / 256] chunks,
// so a row tile is one contiguous stream. A chunk is four vectors of 16 rows x 64 k. Lane 4g + t
// owns rows g and g + 8 and k = 64 j + 16 t .. + 15 of vector j, which is one scale block of each
// row:
//   NVFP4, 2304 bytes: codes [vector][lane][16 B], then scales [lane][8 B] (byte 2j row g, 2j+1 row
//   g+8) bf16,  8192 bytes: [vector][mma][lane][16 B], the four A registers of each mma
// The order of k within an mma is free; with this one, the B operand of a vector is 32 contiguous
// bytes of the token's row. A token is a column of the product, so its bits do not depend on the
// others.
//
// NVFP4 codes become bf16 exactly: sign, two exponent bits and mantissa go to bits {15, 8, 7, 6},
// which reads as value x 2^-126; one packed multiply by bf16(scale x 2^119) gives value x scale x
// 2^-7. The 2^7 goes into the tensor's scale (UNIT). Scales are stored as e5m3 bytes: bf16 bits of
// scale x 2^119 are (byte << 4) | 0x7000. A zero scale is stored as zero codes.
#ifndef INK_W4A16_CUH
#define INK_W4A16_CUH
#include "device.cuh"

#ifndef WEIGHTS
#define WEIGHTS 0  // 0: NVFP4, 1: bf16
#endif
// A step of one token has code of its own: what only more tokens need costs it issue slots. Bits
// are the same.
#ifndef ONE_TOKEN
#define ONE_TOKEN 0
#endif

constexpr int MAX_TOKENS = 8;
constexpr int VECTOR_K = 64, CHUNK_VECTORS = 4;
constexpr int CODE_BYTES = WEIGHTS ? 2048 : 512;  // of one vector
constexpr int CHUNK_BYTES = WEIGHTS ? 8192 : 2304;
constexpr float UNIT = WEIGHTS ? 1.f : 128.f;

__device__ constexpr int tile_bytes(int k) { return k / 256 * CHUNK_BYTES; }

// Vectors of a row tile for each of `warps` warps: the same number for every warp that has any.
__device__ constexpr int vectors_per_warp(int k, int warps) {
  int n = (k / VECTOR_K + warps - 1) / warps;
  while (k / VECTOR_K % n) n++;
  return n;
}

// The tensor's scale times what the codes' bf16 form lacks. bf16 weights have none: it is not read.
INK_DEVICE float tensor_unit(const float* scale) {
  return WEIGHTS ? 1.f : load_weight_float(scale) * UNIT;
}

// Whether weights are the first to leave the L2, so that what is read again stays.
constexpr bool ONCE = WEIGHTS && ONE_TOKEN;
INK_DEVICE void load_weights(void* to_smem, const void* from, u32 num_bytes, u64* bar) {
  if (ONCE)
    bulk_load_once(to_smem, from, num_bytes, bar);
  else
    bulk_load(to_smem, from, num_bytes, bar);
}

// ---- one vector ----
struct Scales {
  u32 low, high;
};  // bf16 pairs (scale x 2^119) of rows g and g + 8

template <int PAIR>
INK_DEVICE Scales scales_of(u32 bytes) {  // bytes 2 PAIR and 2 PAIR + 1
  const u32 low = __byte_perm(bytes, 0, 0x4040 | (2 * PAIR) | (2 * PAIR) << 8);
  const u32 high = __byte_perm(bytes, 0, 0x4040 | (2 * PAIR + 1) | (2 * PAIR + 1) << 8);
  return {low * 16u + 0x70007000u, high * 16u + 0x70007000u};
}

// Eight codes to the A registers of one mma.
INK_DEVICE void dequantize(u32 (&a)[4], u32 w, Scales s) {
  constexpr u32 MASK = 0x81C081C0u;
  a[0] = mul_bf16x2((w << 6) & MASK, s.low);
  a[1] = mul_bf16x2((w << 2) & MASK, s.high);
  a[2] = mul_bf16x2(__funnelshift_r(w, w, 4) & MASK, s.low);
  a[3] = mul_bf16x2((w & 0x81808180u) | ((w >> 8) & 0x00400040u), s.high);
}

// Two sets of accumulators, of even and of odd mma, hide the latency; `store_tile` adds them.
struct Tile {
  float c[2][4];
};
INK_DEVICE Tile zero_tile() { return Tile{{{0, 0, 0, 0}, {0, 0, 0, 0}}}; }

struct Tokens {
  uint4 lo, hi;
};  // B operand of one vector: token g, 16 consecutive k

#if WEIGHTS == 0
struct Codes {
  uint4 w;
};
INK_DEVICE void multiply(Tile& tile, const Codes& codes, Scales s, const Tokens& b) {
  const u32 w[4] = {codes.w.x, codes.w.y, codes.w.z, codes.w.w};
#else
struct Codes {
  uint4 w[4];
};
INK_DEVICE void multiply(Tile& tile, const Codes& codes, Scales, const Tokens& b) {
#endif
  const u32 x[8] = {b.lo.x, b.lo.y, b.lo.z, b.lo.w, b.hi.x, b.hi.y, b.hi.z, b.hi.w};
#pragma unroll
  for (int m = 0; m < 4; m++) {
    u32 a[4];
#if WEIGHTS == 0
    dequantize(a, w[m], s);
#else
    a[0] = codes.w[m].x, a[1] = codes.w[m].y, a[2] = codes.w[m].z, a[3] = codes.w[m].w;
#endif
    mma_bf16(tile.c[m & 1], a, x[2 * m], x[2 * m + 1]);
  }
}

// ---- NV consecutive vectors of a row tile, the share of one warp ----
// `first` is a multiple of NV. Scale bytes of up to four vectors of a chunk are loaded together.
template <int NV>
struct Group {
  static constexpr int SIZE = NV % 4 == 0 ? 4 : NV % 2 == 0 ? 2 : 1;
  static constexpr int WORDS = SIZE == 1 ? NV : NV / 2;
};
template <int NV>
struct Fragment {
  Codes codes[NV];
#if WEIGHTS == 0
  u32 scales[Group<NV>::WORDS];
#endif
  INK_DEVICE Scales scale(int i) const {  // i is a constant after unrolling
#if WEIGHTS == 0
    if (Group<NV>::SIZE == 1) return scales_of<0>(scales[i % Group<NV>::WORDS]);
    return i & 1 ? scales_of<1>(scales[i / 2]) : scales_of<0>(scales[i / 2]);
#else
    return Scales{0, 0};
#endif
  }
};
INK_DEVICE const u8* vector_codes(const u8* tile, int vector, int lane) {
  return tile + (vector / CHUNK_VECTORS) * CHUNK_BYTES + vector % CHUNK_VECTORS * CODE_BYTES +
         lane * 16;
}
INK_DEVICE const u8* vector_scales(const u8* tile, int vector, int lane) {
  return tile + (vector / CHUNK_VECTORS) * CHUNK_BYTES + 2048 + lane * 8 +
         vector % CHUNK_VECTORS * 2;
}

// From device memory into registers.
template <int NV>
INK_DEVICE void load_fragment(Fragment<NV>& f, const u8* tile, int first, int lane) {
#pragma unroll
  for (int i = 0; i < NV; i++) {
    const u8* p = vector_codes(tile, first + i, lane);
#if WEIGHTS == 0
    f.codes[i].w = load_weight16(p);
#else
#pragma unroll
    for (int m = 0; m < 4; m++)
      f.codes[i].w[m] = ONCE ? load_weight16_once(p + m * 512) : load_weight16(p + m * 512);
#endif
  }
#if WEIGHTS == 0
#pragma unroll
  for (int i = 0; i < NV; i += Group<NV>::SIZE) {
    const u8* p = vector_scales(tile, first + i, lane);
    if (Group<NV>::SIZE == 4) {
      const uint2 v = load_weight8(p);
      f.scales[i / 2] = v.x;
      f.scales[i / 2 + 1] = v.y;
    } else if (Group<NV>::SIZE == 2) {
      f.scales[i / 2] = load_weight4(p);
    } else {
      f.scales[i] = load_weight2(p);
    }
  }
#endif
}

// B operands of NV vectors of row `x` (null: zeros), from device memory (activations).
template <int NV>
struct Activations {
  Tokens v[NV];
};
template <int NV>
INK_DEVICE void load_tokens(Activations<NV>& b, const bf16* x, int first, int lane) {
#pragma unroll
  for (int i = 0; i < NV; i++) {
    const bf16* p = x + (first + i) * VECTOR_K + (lane & 3) * 16;
    b.v[i].lo = x ? load_act16(p) : make_uint4(0, 0, 0, 0);
    b.v[i].hi = x ? load_act16(p + 8) : make_uint4(0, 0, 0, 0);
  }
}
// The same from shared memory.
template <int NV>
INK_DEVICE void load_tokens_shared(Activations<NV>& b, const bf16* x, int first, int lane) {
#pragma unroll
  for (int i = 0; i < NV; i++) {
    const bf16* p = x + (first + i) * VECTOR_K + (lane & 3) * 16;
    b.v[i].lo = *(const uint4*)p;
    b.v[i].hi = *(const uint4*)(p + 8);
  }
}

template <int NV>
INK_DEVICE void multiply_fragment(Tile& t, const Fragment<NV>& f, const Activations<NV>& b) {
#pragma unroll
  for (int i = 0; i < NV; i++) multiply(t, f.codes[i], f.scale(i), b.v[i]);
}

// N row tiles that lie one after the other in shared memory; the registers of their weights live
// for one vector only.
template <int N, int NV>
INK_DEVICE void multiply_shared(Tile (&t)[N], const u8* tiles, int tile_stride,
                                const Activations<NV>& b, int first, int lane) {
#pragma unroll
  for (int i = 0; i < NV; i++) {
#pragma unroll
    for (int n = 0; n < N; n++) {
      const u8* tile = tiles + n * tile_stride;
      const u8* p = vector_codes(tile, first + i, lane);
      Codes codes;
      Scales s = {0, 0};
#if WEIGHTS == 0
      codes.w = *(const uint4*)p;
      s = scales_of<0>(*(const u16*)vector_scales(tile, first + i, lane));
#else
#pragma unroll
      for (int m = 0; m < 4; m++) codes.w[m] = *(const uint4*)(p + m * 512);
#endif
      multiply(t[n], codes, s, b.v[i]);
    }
  }
}
template <int NV>
INK_DEVICE void multiply_shared(Tile& t, const u8* tile, const Activations<NV>& b, int first,
                                int lane) {
  Tile one[1] = {t};
  multiply_shared<1, NV>(one, tile, 0, b, first, lane);
  t = one[0];
}

// ---- sums over the warps of a block ----
// A warp's tile as [row 16][token TOKEN_COLUMNS] floats.
constexpr int TOKEN_COLUMNS = ONE_TOKEN ? 1 : MAX_TOKENS, TILE_SUMS = 16 * TOKEN_COLUMNS;
INK_DEVICE void store_tile(float* p, const Tile& t, int lane) {
  float c[4];
#pragma unroll
  for (int i = 0; i < 4; i++) c[i] = t.c[0][i] + t.c[1][i];
  if (!ONE_TOKEN) {
    *(float2*)(p + lane * 2) = make_float2(c[0], c[1]);
    *(float2*)(p + 64 + lane * 2) = make_float2(c[2], c[3]);
  } else if ((lane & 3) == 0) {
    p[lane >> 2] = c[0];
    p[8 + (lane >> 2)] = c[2];
  }
}
// The same of a sum in two halves, for any T as [row 16][token 8].
INK_DEVICE void store_tile(float* p, const Tile (&halves)[2], int lane) {
  float c[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    c[i] = (halves[0].c[0][i] + halves[0].c[1][i]) + (halves[1].c[0][i] + halves[1].c[1][i]);
  *(float2*)(p + lane * 2) = make_float2(c[0], c[1]);
  *(float2*)(p + 64 + lane * 2) = make_float2(c[2], c[3]);
}
// Sum of N floats `stride` apart, in an order of its own: even ones, odd ones, then both.
template <int N>
INK_DEVICE float strided_sum(const float* p, int stride) {
  float even = 0, odd = 0;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    even += p[i * stride];
    if (i + 1 < N) odd += p[(i + 1) * stride];
  }
  return even + odd;
}

// ---- residual add and RMSNorm in front of a product ----
// The sum of squares of a row is a binary tree over its elements in their order, whoever computes
// which part of it: of 8 by a thread and 256 by a warp here, of 4 by a lane and 128 by a warp in
// flint_layers.
INK_DEVICE float sum_of_squares(const float (&v)[8]) {
  float s[8];
#pragma unroll
  for (int i = 0; i < 8; i++) s[i] = __fmul_rn(v[i], v[i]);
  return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}
INK_DEVICE float tree_sum(float x) {
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) x += __shfl_xor_sync(INK_FULL_WARP, x, o);
  return x;
}
// `tree_sum` of four values with six shuffles: afterwards lane l holds that of value `value_of(l)`.
INK_DEVICE int value_of(int lane) { return (lane & 1) * 2 + (lane >> 1 & 1); }
INK_DEVICE float four_sums(const float (&v)[4], int lane) {
  const bool upper = lane & 1, odd = lane & 2;
  const float a = (upper ? v[2] : v[0]) + __shfl_xor_sync(INK_FULL_WARP, upper ? v[0] : v[2], 1);
  const float b = (upper ? v[3] : v[1]) + __shfl_xor_sync(INK_FULL_WARP, upper ? v[1] : v[3], 1);
  float c = (odd ? b : a) + __shfl_xor_sync(INK_FULL_WARP, odd ? a : b, 2);
#pragma unroll
  for (int o = 4; o < 32; o <<= 1) c += __shfl_xor_sync(INK_FULL_WARP, c, o);
  return c;
}
// 1 / rms of a row.
INK_DEVICE float inverse_rms(float squares, float inverse_width, float eps) {
  return rsqrt_approx(fmaf(squares, inverse_width, eps));
}

// s = x + delta;  z = bf16(s * rsqrt(mean s^2 + eps) * w) from the unrounded s, for H <= 2048.
// Every 256 threads are a group that takes each GROUPS-th token, eight elements a thread. z goes to
// shared memory with row stride H + 8 (no bank conflicts for B operands); rows T and above are left
// as they are.
template <int H, int THREADS, bool DELTA>
struct Norm {
  static constexpr int STRIDE = H + 8, GROUPS = THREADS / 256, GROUP_WARPS = 8;
  static constexpr int BATCH = ONE_TOKEN ? 1 : 4;  // tokens of a group at once
  static_assert(H <= 2048 && H % 8 == 0 && THREADS % 256 == 0, "eight elements a thread");
  struct Memory {  // shared memory
    alignas(16) bf16 z[TOKEN_COLUMNS * STRIDE];
    alignas(16) float sums[TOKEN_COLUMNS * GROUP_WARPS];
    alignas(16) uint4 weight[256];
  };

  static INK_DEVICE void load_weight(Memory& m, const bf16* weight) {
    const int tid = threadIdx.x;
    if (tid < 256 && tid * 8 < H) m.weight[tid] = load_weight16(weight + tid * 8);
  }

  // residual and z_out (may be null): where row `own` of bf16(s) and of z go; own < 0 for none.
  static INK_DEVICE void run(Memory& m, const bf16* x, const bf16* delta, float eps, bf16* residual,
                             bf16* z_out, int T, int own) {
    const int lane = threadIdx.x & 31, group = GROUPS == 1 ? 0 : threadIdx.x >> 8;
    const int place = threadIdx.x & 255, k = place * 8;
    const int end = ONE_TOKEN || BATCH * GROUPS >= MAX_TOKENS ? 1 : T;
#pragma unroll 1
    for (int t0 = 0; t0 < end; t0 += BATCH * GROUPS) {
      const int first = t0 + group;  // this thread's tokens are first + q GROUPS
      float s[BATCH][8];
#pragma unroll
      for (int q = 0; q < BATCH; q++) {
        const int token = first + q * GROUPS;
        const bool live = token < T && k < H;
        uint4 a = make_uint4(0, 0, 0, 0), d = a;
        if (live) a = load_act16(x + token * H + k);
        if (DELTA && live) d = load_act16(delta + token * H + k);
        // As bits until all loads are on their way.
        s[q][0] = __uint_as_float(a.x), s[q][1] = __uint_as_float(a.y);
        s[q][2] = __uint_as_float(a.z), s[q][3] = __uint_as_float(a.w);
        s[q][4] = __uint_as_float(d.x), s[q][5] = __uint_as_float(d.y);
        s[q][6] = __uint_as_float(d.z), s[q][7] = __uint_as_float(d.w);
      }
      float squares[4] = {0, 0, 0, 0};
#pragma unroll
      for (int q = 0; q < BATCH; q++) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const u32 a = __float_as_uint(s[q][i]), d = __float_as_uint(s[q][4 + i]);
          v[2 * i] = DELTA ? low_float(a) + low_float(d) : low_float(a);
          v[2 * i + 1] = DELTA ? high_float(a) + high_float(d) : high_float(a);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) s[q][i] = v[i];
        squares[q] = sum_of_squares(v);
      }
      float* sums = m.sums + first * GROUP_WARPS + (place >> 5);
#if ONE_TOKEN
      if (group == 0) {
        const float sum = tree_sum(squares[0]);
        if (lane == 0) *sums = sum;
      }
#else
      const float sum_of_warp = four_sums(squares, lane);
      if (lane < 4) sums[value_of(lane) * GROUPS * GROUP_WARPS] = sum_of_warp;
#endif
      __syncthreads();
      // Lanes 2q and 2q + 1 (and their repetitions) add up the sums of token q.
      const int q_of_lane = ONE_TOKEN ? 0 : lane >> 1 & 3;
      const int token_of_lane = ONE_TOKEN ? 0 : first + q_of_lane * GROUPS;
      const float4 four = ((const float4*)(m.sums + token_of_lane * GROUP_WARPS))[lane & 1];
      float sum = (four.x + four.y) + (four.z + four.w);
      sum += __shfl_xor_sync(INK_FULL_WARP, sum, 1);
      const float inverse = inverse_rms(sum, 1.f / H, eps);
      const uint4 w = m.weight[place];
#pragma unroll
      for (int q = 0; q < BATCH; q++) {
        const int token = first + q * GROUPS;
        const float r = ONE_TOKEN ? inverse : __shfl_sync(INK_FULL_WARP, inverse, 2 * q);
        if (token >= T || k >= H) continue;
        const float* v = s[q];
        const uint4 z =
            make_uint4(pack_bf16(v[0] * r * low_float(w.x), v[1] * r * high_float(w.x)),
                       pack_bf16(v[2] * r * low_float(w.y), v[3] * r * high_float(w.y)),
                       pack_bf16(v[4] * r * low_float(w.z), v[5] * r * high_float(w.z)),
                       pack_bf16(v[6] * r * low_float(w.w), v[7] * r * high_float(w.w)));
        *(uint4*)(m.z + token * STRIDE + k) = z;
        if (token == own) {
          if (residual)
            *(uint4*)(residual + token * H + k) =
                make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                           pack_bf16(v[6], v[7]));
          if (z_out) *(uint4*)(z_out + token * H + k) = z;
        }
      }
    }
    __syncthreads();
  }
};

// Activation of a gated pair in the model's exact form, of rounded or unrounded g and u.
INK_DEVICE float silu_exact(float g) { return g / (1.f + expf(-g)); }
INK_DEVICE float silu_approx(float g) {
  return g * rcp_approx(1.f + exp2_approx(g * -1.44269504088896341f));
}

// Where launch_dependents stands: 0 first instruction, 1 after the wait, 2 never (at the end).
#ifndef TRIGGER
#define TRIGGER 1
#endif
INK_DEVICE void trigger_first() {
  if (TRIGGER == 0) pdl_trigger();
}
INK_DEVICE void wait_and_trigger() {
  pdl_wait();
  if (TRIGGER == 1) pdl_trigger();
}

#endif  // INK_W4A16_CUH
