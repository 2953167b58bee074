// Mixes of a token's residual blocks: N sources, M queries, over COLUMNS columns.
//
//     r_j = 1 / rms(S_j)     a_i = softmax_j(q_i . S_j r_j / sqrt(COLUMNS))     out_i = sum_j a_ij r_j S_j
//
// All that the results need of whole rows are the products of every two sources and of every query
// with every source: those of two sources also give the mean square of out_i, for the norm behind
// it. So one exchange of sums is enough, and a row can be shared by blocks that meet once.
//
// A slice is 512 columns: 128 threads of four each. Sums over a warp are made by its lanes in a
// fixed order, those of a slice are its warps' in order, those of a row the slices' in order. So
// three ways to share a row give the same bits:
//     split    a block for every slice; blocks hand each other their sums in 8-byte words of global
//              memory, each beside the number of the launch it belongs to
//     cluster  CLUSTER blocks have as many of the row's warps each, and store their warps' sums in
//              each other's shared memory
//     loop     a block for all slices of a token
// Sums without the last source are made first, as that may still be on its way.
//
// Macro TRIGGER, when blocks of the next kernel may start: 0 at once (as the kernel itself says), 1
// behind the wait, 2 when all sources are there.
#ifndef INK_MIX_CUH
#define INK_MIX_CUH
#include "cluster.cuh"
#include "vector.cuh"

#ifndef TRIGGER
#define TRIGGER 0
#endif

constexpr int MIX_THREADS = 128, MIX_WARPS = MIX_THREADS / 32, SLICE = 4 * MIX_THREADS;
constexpr int MIX_CLUSTER = 4;

__device__ constexpr int power_of_two_from(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}
// Bit in which partners differ in a step of a warp's sum. The tree of `width` takes the bits
// width / 2 down to 1, then those from `width` on.
__device__ constexpr int tree_bit(int width, int step) {
  return width >> (step + 1) ? width >> (step + 1) : 1 << step;
}

// Sums of v[i] over a warp by the tree of TREE, a power of two of them. As long as lanes hold
// several, they hand over the half that they leave to others; in the end v[0] is the sum of number
// `tree_place`. A recursion, as unrolled loops whose length shrinks were not unrolled in full, and
// v stood in local memory.
template <int TREE, int STEP, int COUNT, int W>
INK_DEVICE void sums_over_warp(float (&v)[W], int lane) {
  if constexpr (STEP < 5) {
    constexpr int BIT = tree_bit(TREE, STEP), HALF = COUNT / 2;
    if constexpr (HALF > 0) {
      const bool is_upper = lane & BIT;
#pragma unroll
      for (int i = 0; i < HALF; i++) {
        float mine = v[i], other = v[i + HALF];
        if (is_upper) mine = v[i + HALF], other = v[i];
        v[i] = __fadd_rn(mine, __shfl_xor_sync(INK_FULL_WARP, other, BIT));
      }
    } else {
      v[0] = __fadd_rn(v[0], __shfl_xor_sync(INK_FULL_WARP, v[0], BIT));
    }
    sums_over_warp<TREE, STEP + 1, HALF ? HALF : 1>(v, lane);
  }
}
// Which of COUNT sums the lane has; -1 where another lane has it too.
template <int TREE, int COUNT>
INK_DEVICE int tree_place(int lane) {
  int place = 0;
  bool is_first = true;
#pragma unroll
  for (int step = 0; step < 5; step++) {
    const bool is_set = lane & tree_bit(TREE, step);
    if (COUNT >> (step + 1))
      place += is_set ? COUNT >> (step + 1) : 0;
    else
      is_first &= !is_set;
  }
  return is_first ? place : -1;
}

// Inputs: what a kernel does for four columns from `column` on, which are in the row:
//     early(column)            loads what never changes; before the wait
//     first(column, s, q)      all sources but the last, which it requests, and queries
//     last(column, s)          the last source
//     again(column, s)         the same sources, for `loop`; the thread has loaded them before
//     finish(column, i, s, c, r)  takes c_j = a_ij r_j and r = 1 / rms(out_i)
// Where WAITS_LATE is set, what `first` and `last` read needs no wait; behind the wait comes
//     late(column, s)          stores that may not come earlier
// and `finish`.
template <int COLUMNS, int N, int M>
struct Mix {
  static constexpr int SLICES = (COLUMNS + SLICE - 1) / SLICE, ROW_WARPS = SLICES * MIX_WARPS;
  static constexpr int CLUSTER_WARPS = ROW_WARPS / MIX_CLUSTER;  // of a block
  static constexpr int PAIRS = N * (N + 1) / 2, SUMS = PAIRS + M * N;
  static constexpr int WORDS = (SUMS + 3) / 4 * 4;  // of a slice: sectors of its own
  static_assert(SUMS <= MIX_THREADS && COLUMNS % 4 == 0, "a thread for each sum");
  static_assert(M <= MIX_WARPS && N <= 32, "a warp for each query, a lane for each source");

  // What results are made of.
  struct Weights {
    float totals[SUMS], c[M][N], inverse[M];
  };
  struct Memory {
    float warps[MIX_WARPS][SUMS];
    Weights weights;
  };
  struct RowMemory {
    float warps[ROW_WARPS][SUMS];
    Weights weights;
  };
  struct Eps {
    float mix, norm;
  };

  // Number of the product of S_j and S_k, k <= j.
  static __device__ constexpr int pair(int j, int k) { return j * (j + 1) / 2 + k; }
  static __device__ constexpr int row_of(int sum) {
    int j = 0;
    while (pair(j, j) < sum) j++;
    return j;
  }
  // Whether a sum needs the last source.
  static __device__ constexpr bool is_late(int sum) {
    return sum < PAIRS ? sum >= pair(N - 1, 0) : (sum - PAIRS) % N == N - 1;
  }
  // Sums are added by warps 32 at a time, from FIRST on.
  static __device__ constexpr int tree_of(int first) {
    return SUMS - first >= 32 ? 32 : power_of_two_from(SUMS - first);
  }
  static __device__ constexpr int end_of(int first) {
    return first + 32 < SUMS ? first + 32 : SUMS;
  }
  static __device__ constexpr int count(int first, bool late) {
    int n = 0;
    for (int sum = first; sum < end_of(first); sum++) n += is_late(sum) == late;
    return n;
  }
  static INK_DEVICE float dot(const Four& a, const Four& b) {
    return fmaf(a.v[3], b.v[3],
                fmaf(a.v[2], b.v[2], fmaf(a.v[1], b.v[1], __fmul_rn(a.v[0], b.v[0]))));
  }
  // The thread's parts of the sums from SUM to END that are LATE or not, to v[AT] and on.
  template <int SUM, int END, bool LATE, int AT, int W>
  static INK_DEVICE void products(float (&v)[W], const Four (&s)[N], const Four (&q)[M]) {
    if constexpr (SUM < END) {
      constexpr bool IS_WANTED = is_late(SUM) == LATE;
      if constexpr (IS_WANTED && SUM < PAIRS)
        v[AT] = dot(s[row_of(SUM)], s[SUM - pair(row_of(SUM), 0)]);
      else if constexpr (IS_WANTED)
        v[AT] = dot(q[(SUM - PAIRS) / N], s[(SUM - PAIRS) % N]);
      products<SUM + 1, END, LATE, AT + IS_WANTED>(v, s, q);
    } else {
#pragma unroll
      for (int i = AT; i < W; i++) v[i] = 0.f;
    }
  }
  // store(sum, value) for this warp's sums that are LATE or not, each by one lane.
  template <bool LATE, int FIRST = 0, class Store>
  static INK_DEVICE void warp_sums(const Four (&s)[N], const Four (&q)[M], const Store& store) {
    if constexpr (FIRST < SUMS) {
      constexpr int COUNT = count(FIRST, LATE), TREE = tree_of(FIRST), END = end_of(FIRST);
      if constexpr (COUNT > 0) {
        constexpr int W = power_of_two_from(COUNT);
        const int lane = threadIdx.x & 31, place = tree_place<TREE, W>(lane);
        float v[W];
        products<FIRST, END, LATE, 0>(v, s, q);
        sums_over_warp<TREE, 0, W>(v, lane);
        int sum = place, at = 0;  // which sum that is, by runs of them
#pragma unroll
        for (int i = FIRST; i < END; i++) {
          const bool is_start = is_late(i) == LATE && (i == FIRST || is_late(i - 1) != LATE);
          if (is_start) sum = place >= at ? place + (i - at) : sum;
          at += is_late(i) == LATE;
        }
        if (place >= 0 && place < COUNT) store(sum, v[0]);
      }
      warp_sums<LATE, FIRST + 32>(s, q, store);
    }
  }

  // A slice's sum from those of its warps, warps[w * SUMS].
  static INK_DEVICE float slice_sum(const float* warps) {
    float sum = warps[0];
#pragma unroll
    for (int w = 1; w < MIX_WARPS; w++) sum = __fadd_rn(sum, warps[w * SUMS]);
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

  // c_j of query i and 1 / rms(out_i) from the row's sums, by a warp: lane j has source j. What is
  // summed over sources is added one by one.
  static INK_DEVICE void weigh(Weights& m, int i, Eps eps) {
    constexpr float PART = 1.f / COLUMNS;
    auto of = [](float x, int j) { return __shfl_sync(INK_FULL_WARP, x, j); };
    const int lane = threadIdx.x & 31, j = min(lane, N - 1);
    const float* const products = m.totals + pair(j, 0);
    const float square = products[j], r = rsqrtf(fmaf(square, PART, eps.mix));
    const float logit = __fmul_rn(__fmul_rn(m.totals[PAIRS + i * N + j], r), sqrtf(PART));
    const float e = expf(__fadd_rn(logit, -warp_max(logit)));
    float sum = 0.f, row = 0.f, mean = 0.f;
#pragma unroll
    for (int k = 0; k < N; k++) sum = __fadd_rn(sum, of(e, k));
    const float c = __fmul_rn(e / sum, r);
#pragma unroll
    for (int k = 0; k < N - 1; k++) {  // the products with sources in front
      const float c_k = of(c, k);
      if (k < j) row = fmaf(c_k, products[k], row);
    }
    row = fmaf(c, square, __fmul_rn(2.f, row));
#pragma unroll
    for (int k = 0; k < N; k++) mean = fmaf(of(c, k), of(row, k), mean);
    if (lane < N) m.c[i][lane] = c;
    if (lane == 0) m.inverse[i] = rsqrtf(fmaf(fmaxf(mean, 0.f), PART, eps.norm));
  }
  // All threads, behind what they have stored of totals.
  template <int WARPS>
  static INK_DEVICE void weigh_all(Weights& m, Eps eps) {
    __syncthreads();
    const int warp = threadIdx.x >> 5;
#pragma unroll 1
    for (int i = warp; i < M; i += WARPS) weigh(m, i, eps);
    __syncthreads();
  }
  template <class Inputs>
  static INK_DEVICE void finish(const Weights& m, Inputs& inputs, int column, const Four (&s)[N]) {
#pragma unroll
    for (int i = 0; i < M; i++) inputs.finish(column, i, s, m.c[i], m.inverse[i]);
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

  static INK_DEVICE void wait_for_launches() {
    pdl_wait();
    if (TRIGGER == 1) pdl_trigger();
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
    if (!Inputs::WAITS_LATE || !inputs.has_token()) wait_for_launches();
    if (!inputs.has_token()) return;
    words += (size_t)token * SLICES * WORDS;
    // Only this block writes the words of its slice, so they tell the last launch's number.
    u64 before = 0;
    if (SLICES > 1 && tid < SUMS) before = load_relaxed(words + slice * WORDS + tid);
    float* const of_warp = m.warps[tid >> 5];
    auto store = [&](int sum, float value) { of_warp[sum] = value; };
    Four s[N], q[M];
    clear(s, q);
    if (is_live) inputs.first(column, s, q);
    warp_sums<false>(s, q, store);
    if (is_live) inputs.last(column, s);
    if (TRIGGER == 2) pdl_trigger();
    warp_sums<true>(s, q, store);
    __syncthreads();
    const float sum = tid < SUMS ? slice_sum(m.warps[0] + tid) : 0.f;
    const float total = SLICES > 1 ? exchange(sum, words, slice, before, error) : sum;
    if (tid < SUMS) m.weights.totals[tid] = total;
    weigh_all<MIX_WARPS>(m.weights, eps);
    if constexpr (Inputs::WAITS_LATE) {
      wait_for_launches();
      if (is_live) inputs.late(column, s);
    }
    if (is_live) finish(m.weights, inputs, column, s);
  }

  // A token a cluster, of MIX_CLUSTER blocks of CLUSTER_WARPS warps; `rank`: this block's. Whole
  // slices only. Waits for the kernels before.
  template <class Inputs>
  static INK_DEVICE void cluster(RowMemory& m, Inputs& inputs, int rank, Eps eps) {
    static_assert(COLUMNS % SLICE == 0, "every thread has columns");
    constexpr int THREADS = 32 * CLUSTER_WARPS;
    const int tid = threadIdx.x, warp = rank * CLUSTER_WARPS + (tid >> 5);
    const int column = 4 * (rank * THREADS + tid);
    cluster_arrive();  // who stores to another block knows that it runs
    inputs.early(column);
    u32 to[MIX_CLUSTER];
#pragma unroll
    for (int r = 0; r < MIX_CLUSTER; r++) to[r] = cluster_address(m.warps[warp], r);
    auto store = [&](int sum, float value) {
#pragma unroll
      for (int r = 0; r < MIX_CLUSTER; r++) cluster_store(to[r] + 4 * sum, value);
    };
    if (!Inputs::WAITS_LATE || !inputs.has_token()) wait_for_launches();
    cluster_wait();
    if (!inputs.has_token()) return;  // the whole cluster
    Four s[N], q[M];
    inputs.first(column, s, q);
    warp_sums<false>(s, q, store);
    inputs.last(column, s);
    if (TRIGGER == 2) pdl_trigger();
    warp_sums<true>(s, q, store);
    cluster_arrive();
    cluster_wait();
#pragma unroll 1
    for (int i = tid; i < SUMS; i += THREADS) {
      float total = 0.f;
#pragma unroll
      for (int slice = 0; slice < SLICES; slice++) {
        const float sum = slice_sum(m.warps[slice * MIX_WARPS] + i);
        total = slice ? __fadd_rn(total, sum) : sum;
      }
      m.weights.totals[i] = total;
    }
    weigh_all<CLUSTER_WARPS>(m.weights, eps);
    if constexpr (Inputs::WAITS_LATE) {
      wait_for_launches();
      inputs.late(column, s);
    }
    finish(m.weights, inputs, column, s);
  }

  // All slices of a token a block; waits for the kernels before.
  template <class Inputs>
  static INK_DEVICE void loop(Memory& m, Inputs& inputs, Eps eps) {
    const int tid = threadIdx.x;
    pdl_wait();
    if (TRIGGER > 0) pdl_trigger();
    if (!inputs.has_token()) return;
    float* const of_warp = m.warps[tid >> 5];
    auto store = [&](int sum, float value) { of_warp[sum] = value; };
    Four s[N], q[M];
    float total = 0.f;
#pragma unroll 1
    for (int slice = 0; slice < SLICES; slice++) {
      const int column = slice * SLICE + 4 * tid;
      clear(s, q);
      if (column < COLUMNS) {
        inputs.early(column);
        inputs.first(column, s, q);
        inputs.last(column, s);
      }
      warp_sums<false>(s, q, store);
      warp_sums<true>(s, q, store);
      __syncthreads();
      const float sum = tid < SUMS ? slice_sum(m.warps[0] + tid) : 0.f;
      total = slice ? __fadd_rn(total, sum) : sum;
      __syncthreads();
    }
    if (tid < SUMS) m.weights.totals[tid] = total;
    weigh_all<MIX_WARPS>(m.weights, eps);
#pragma unroll 1
    for (int column = 4 * tid; column < COLUMNS; column += SLICE) {
      inputs.again(column, s);
      finish(m.weights, inputs, column, s);
    }
  }
};

#endif  // INK_MIX_CUH
