// Mixes of a token's residual blocks: N sources, M queries, over COLUMNS columns.
//
//     r_j = 1 / rms(S_j)     a_i = softmax_j(q_i . S_j r_j / sqrt(COLUMNS))     out_i = sum_j a_ij r_j S_j
//
// All that the results need of whole rows are the products of every two sources and of every query
// with every source: those of two sources also give the mean square of out_i, for the norm behind
// it. So one exchange of sums is enough, and a row can be shared by blocks that meet once.
//
// A slice is 512 columns: 128 threads of four each. Its sums are made by its threads in a fixed
// order, those of a row are the slices' in order. So `split` (a block for every slice; blocks hand
// each other their sums in 8-byte words of global memory, each beside the number of the launch it
// belongs to) and `loop` (a block for all slices of a token) give the same bits.
#ifndef INK_MIX_CUH
#define INK_MIX_CUH
#include "vector.cuh"

constexpr int MIX_THREADS = 128, MIX_WARPS = MIX_THREADS / 32, SLICE = 4 * MIX_THREADS;

__device__ constexpr int power_of_two_from(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// W sums over a warp; lane l gets that of v[l % W] in v[0]. In each step lanes hand over the half of
// the sums that they leave to others. A recursion, as unrolled loops whose length shrinks were not
// unrolled in full, and v stood in local memory.
template <int HALF, int W>
INK_DEVICE void sums_over_warp(float (&v)[W], int lane) {
  if constexpr (HALF > 0) {
    const bool is_upper = lane & HALF;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
      float mine = v[i], other = v[i + HALF];
      if (is_upper) mine = v[i + HALF], other = v[i];
      v[i] = __fadd_rn(mine, __shfl_xor_sync(INK_FULL_WARP, other, HALF));
    }
    sums_over_warp<HALF / 2>(v, lane);
  } else {
#pragma unroll
    for (int o = W; o < 32; o *= 2)
      v[0] = __fadd_rn(v[0], __shfl_xor_sync(INK_FULL_WARP, v[0], o));
  }
}

// Inputs: what a kernel does for four columns from `column` on, which are in the row:
//     early(column)            loads what never changes; before the wait in `split`
//     load(column, s, q)       sources and queries
//     again(column, s)         the same sources, for `loop`; the thread has loaded them before
//     finish(column, s, c, r)  takes c_ij = a_ij r_j and r_i = 1 / rms(out_i)
template <int COLUMNS, int N, int M>
struct Mix {
  static constexpr int SLICES = (COLUMNS + SLICE - 1) / SLICE;
  static constexpr int PAIRS = N * (N + 1) / 2, SUMS = PAIRS + M * N;
  static constexpr int WORDS = (SUMS + 3) / 4 * 4;  // of a slice: sectors of its own
  static_assert(SUMS <= MIX_THREADS && COLUMNS % 4 == 0, "a thread for each sum");

  struct Memory {
    float warps[MIX_WARPS][SUMS];
    float totals[SUMS];
  };
  struct Eps {
    float mix, norm;
  };

  // Number of the product of S_j and S_k, k <= j.
  static __device__ constexpr int pair(int j, int k) { return j * (j + 1) / 2 + k; }

  template <int FIRST>
  static INK_DEVICE void store_sums(const float (&v)[SUMS], float* row, int lane) {
    constexpr int W = SUMS - FIRST >= 32 ? 32 : power_of_two_from(SUMS - FIRST);
    float part[W];
#pragma unroll
    for (int i = 0; i < W; i++) part[i] = FIRST + i < SUMS ? v[(FIRST + i) % SUMS] : 0.f;
    sums_over_warp<W / 2>(part, lane);
    if (lane < W && FIRST + lane < SUMS) row[FIRST + lane] = part[0];
    if constexpr (FIRST + W < SUMS) store_sums<FIRST + W>(v, row, lane);
  }

  // Thread i < SUMS gets the slice's sum i. Between two calls stands a barrier.
  static INK_DEVICE float slice_sum(Memory& m, const Four (&s)[N], const Four (&q)[M]) {
    const int tid = threadIdx.x;
    float v[SUMS];
    auto dot = [](const Four& a, const Four& b) {
      return fmaf(a.v[3], b.v[3],
                  fmaf(a.v[2], b.v[2], fmaf(a.v[1], b.v[1], __fmul_rn(a.v[0], b.v[0]))));
    };
#pragma unroll
    for (int j = 0; j < N; j++) {
#pragma unroll
      for (int k = 0; k <= j; k++) v[pair(j, k)] = dot(s[j], s[k]);
#pragma unroll
      for (int i = 0; i < M; i++) v[PAIRS + i * N + j] = dot(q[i], s[j]);
    }
    store_sums<0>(v, m.warps[tid >> 5], tid & 31);
    __syncthreads();
    if (tid >= SUMS) return 0.f;
    float sum = m.warps[0][tid];
#pragma unroll
    for (int w = 1; w < MIX_WARPS; w++) sum = __fadd_rn(sum, m.warps[w][tid]);
    return sum;
  }

  // Thread i < SUMS gives its slice's sum i and gets the row's. `words`: [slice][WORDS] of the row.
  // `last`: this thread's own word of the last launch.
  static INK_DEVICE float exchange(float sum, u64* words, int slice, u64 last, int* error) {
    const int tid = threadIdx.x;
    if (tid >= SUMS) return 0.f;
    const u32 number = (u32)(last >> 32) + 1;
    store_relaxed(words + slice * WORDS + tid, (u64)number << 32 | __float_as_uint(sum));
    u64 word[SLICES];
    u32 spins = 0;
#pragma unroll 1
    while (true) {
      bool is_complete = true;
#pragma unroll
      for (int i = 0; i < SLICES; i++) word[i] = load_relaxed(words + i * WORDS + tid);
#pragma unroll
      for (int i = 0; i < SLICES; i++) is_complete &= (u32)(word[i] >> 32) == number;
      if (is_complete) break;
      if (++spins == INK_SPIN_LIMIT) {
        report_error(error, ERROR_SENTINEL);
        break;
      }
    }
    float total = __uint_as_float((u32)word[0]);
#pragma unroll
    for (int i = 1; i < SLICES; i++) total = __fadd_rn(total, __uint_as_float((u32)word[i]));
    return total;
  }

  // c_ij of all sources and 1 / rms(out_i), from the row's sums.
  static INK_DEVICE void weigh(const float* totals, int i, Eps eps, float (&c)[N], float& inverse) {
    constexpr float PART = 1.f / COLUMNS;
    float r[N], largest = 0.f, sum = 0.f;
#pragma unroll
    for (int j = 0; j < N; j++) {
      r[j] = rsqrtf(fmaf(totals[pair(j, j)], PART, eps.mix));
      c[j] = __fmul_rn(__fmul_rn(totals[PAIRS + i * N + j], r[j]), sqrtf(PART));
      largest = j ? fmaxf(largest, c[j]) : c[j];
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
      c[j] = expf(__fadd_rn(c[j], -largest));
      sum = __fadd_rn(sum, c[j]);
    }
    float square = 0.f;
#pragma unroll
    for (int j = 0; j < N; j++) {
      c[j] = __fmul_rn(c[j] / sum, r[j]);
      float row = 0.f;  // of the products with sources in front
#pragma unroll
      for (int k = 0; k < j; k++) row = fmaf(c[k], totals[pair(j, k)], row);
      row = fmaf(c[j], totals[pair(j, j)], __fmul_rn(2.f, row));
      square = fmaf(c[j], row, square);
    }
    inverse = rsqrtf(fmaf(fmaxf(square, 0.f), PART, eps.norm));
  }
  static INK_DEVICE void weigh_all(const float* totals, Eps eps, float (&c)[M][N],
                                   float (&inverse)[M]) {
#pragma unroll
    for (int i = 0; i < M; i++) weigh(totals, i, eps, c[i], inverse[i]);
  }
  static INK_DEVICE Four mixed(const Four (&s)[N], const float (&c)[N]) {
    Four y;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      y.v[e] = __fmul_rn(c[0], s[0].v[e]);
#pragma unroll
      for (int j = 1; j < N; j++) y.v[e] = fmaf(c[j], s[j].v[e], y.v[e]);
    }
    return y;
  }

  static INK_DEVICE void clear(Four (&s)[N], Four (&q)[M]) {
#pragma unroll
    for (int j = 0; j < N; j++) s[j] = zero_four();
#pragma unroll
    for (int i = 0; i < M; i++) q[i] = zero_four();
  }

  // One slice of a token a block; waits for the kernels before. `words`: of all tokens.
  template <class Inputs>
  static INK_DEVICE void split(Memory& m, Inputs& inputs, int token, int slice, Eps eps, u64* words,
                               int* error) {
    const int tid = threadIdx.x, column = slice * SLICE + 4 * tid;
    const bool is_live = column < COLUMNS;
    if (is_live) inputs.early(column);
    pdl_wait();
    if (!inputs.has_token()) return;
    words += (size_t)token * SLICES * WORDS;
    // Only this block writes the words of its slice, so they tell the last launch's number.
    u64 last = 0;
    if (SLICES > 1 && tid < SUMS) last = load_relaxed(words + slice * WORDS + tid);
    Four s[N], q[M];
    clear(s, q);
    if (is_live) inputs.load(column, s, q);
    const float sum = slice_sum(m, s, q);
    const float total = SLICES > 1 ? exchange(sum, words, slice, last, error) : sum;
    if (tid < SUMS) m.totals[tid] = total;
    __syncthreads();
    float c[M][N], inverse[M];
    weigh_all(m.totals, eps, c, inverse);
    if (is_live) inputs.finish(column, s, c, inverse);
  }

  // All slices of a token a block; waits for the kernels before.
  template <class Inputs>
  static INK_DEVICE void loop(Memory& m, Inputs& inputs, Eps eps) {
    const int tid = threadIdx.x;
    pdl_wait();
    if (!inputs.has_token()) return;
    Four s[N], q[M];
    float total = 0.f;
#pragma unroll 1
    for (int slice = 0; slice < SLICES; slice++) {
      const int column = slice * SLICE + 4 * tid;
      clear(s, q);
      if (column < COLUMNS) {
        inputs.early(column);
        inputs.load(column, s, q);
      }
      const float sum = slice_sum(m, s, q);
      total = slice ? __fadd_rn(total, sum) : sum;
      __syncthreads();
    }
    if (tid < SUMS) m.totals[tid] = total;
    __syncthreads();
    float c[M][N], inverse[M];
    weigh_all(m.totals, eps, c, inverse);
#pragma unroll 1
    for (int column = 4 * tid; column < COLUMNS; column += SLICE) {
      inputs.again(column, s);
      inputs.finish(column, s, c, inverse);
    }
  }
};

#endif  // INK_MIX_CUH
