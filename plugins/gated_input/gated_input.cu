// gated_input: blocks are [token][result][block of its cluster]. All blocks of a cluster make the
// message and the gate's input, each some rows of `down`, which they hand to the others, and a
// thread one column of the result.
//
// Macros: WIDTH, RANK, FORMER (sources of messages), RESULTS, OWN_MIXED (whether each result has a
// mixed input of its own).
#include "cluster.cuh"
#include "vector.cuh"

constexpr int BLOCKS = 8, THREADS = WIDTH / BLOCKS, WARPS = THREADS / 32;
constexpr int DOWN_ROWS = RANK / BLOCKS, FOURS = WIDTH / 4;
// Products of a source with itself and with the query; and the input's with itself.
constexpr int SUMS = 2 * FORMER + 1;

struct Shared {
  float u[WIDTH], message[WIDTH];
  bf16 input[2 * WIDTH];  // of the gate
  float r[RANK], squares[BLOCKS];
  float warps[WARPS][SUMS], totals[SUMS];
};

// Sums over the block, in the order of its warps; every thread has them behind it.
template <int N>
INK_DEVICE void block_sums(Shared& m, const float (&v)[N]) {
  const int tid = threadIdx.x, warp = tid >> 5;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float sum = lanes_sum<32>(v[i]);
    if ((tid & 31) == 0) m.warps[warp][i] = sum;
  }
  __syncthreads();
  for (int i = tid; i < N; i += THREADS) {
    float sum = m.warps[0][i];
    for (int w = 1; w < WARPS; w++) sum = __fadd_rn(sum, m.warps[w][i]);
    m.totals[i] = sum;
  }
  __syncthreads();
}

INK_DEVICE float dot_four(const Four& a, const Four& b) {
  return fmaf(a.v[3], b.v[3],
              fmaf(a.v[2], b.v[2], fmaf(a.v[1], b.v[1], __fmul_rn(a.v[0], b.v[0]))));
}
INK_DEVICE float inverse_rms(float square, float eps) {
  return rsqrtf(fmaf(square, 1.f / WIDTH, eps));
}

// Adds the products of eight bf16 each.
INK_DEVICE float dot_eight(uint4 a, uint4 b, float sum) {
  const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; i++)
    sum = fmaf(high_float(x[i]), high_float(y[i]), fmaf(low_float(x[i]), low_float(y[i]), sum));
  return sum;
}
// A row of `forget` or `gain` times r.
INK_DEVICE float dot_rank(const bf16* row, const float* r) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < RANK; i += 8) {
    const uint4 w = load_weight16(row + i);
    const u32 x[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int j = 0; j < 4; j++)
      sum = fmaf(high_float(x[j]), r[i + 2 * j + 1], fmaf(low_float(x[j]), r[i + 2 * j], sum));
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gated_input(const float* mixed, const bf16* f0, const bf16* f1, const bf16* f2,
                const float* queries, const bf16* down, const bf16* forget, const bf16* gain,
                const bf16* w0, const bf16* w1, const bf16* w2, bf16* out, int num_rows, int first,
                float mix_eps, float gate_eps, float norm_eps) {
  Shared& m = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int block = blockIdx.x % BLOCKS, result = blockIdx.x / BLOCKS % RESULTS;
  const int token = blockIdx.x / (BLOCKS * RESULTS);
  const int column = block * THREADS + tid;
  pdl_trigger();
  cluster_arrive();  // who stores to another block knows that it runs

  // What never changes: weights on their way to the L2, the query and the norm.
  down += ((size_t)result * RANK + block * DOWN_ROWS) * 2 * WIDTH;
  forget += ((size_t)result * WIDTH + block * THREADS) * RANK;
  gain += ((size_t)result * WIDTH + block * THREADS) * RANK;
  if (tid == 0) {
    bulk_prefetch(down, DOWN_ROWS * 2 * WIDTH * sizeof(bf16));
    bulk_prefetch(forget, THREADS * RANK * sizeof(bf16));
    bulk_prefetch(gain, THREADS * RANK * sizeof(bf16));
  }
  queries += (size_t)(first + result) * WIDTH;
  const bf16* const weights_of_norm = result == 0 ? w0 : result == 1 ? w1 : w2;
  const float norm = to_float((bf16)load_weight2(weights_of_norm + column));
  pdl_wait();
  cluster_wait();

  const bf16* const former[] = {f0, f1, f2};
  const size_t row = (size_t)token * WIDTH;
  mixed += ((size_t)(OWN_MIXED ? result : 0) * num_rows) * WIDTH + row;
  float sums[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; i++) sums[i] = 0.f;
  for (int four = tid; four < FOURS; four += THREADS) {
    const Four u = load_act_four<true>(mixed, 4 * four);
    const Four q = load_weight_four<true>(queries, 4 * four);
    store_four<true>(m.u, 4 * four, u);
    sums[2 * FORMER] = __fadd_rn(sums[2 * FORMER], dot_four(u, u));
#pragma unroll
    for (int j = 0; j < FORMER; j++) {
      const Four s = load_act_four<false>(former[j], row + 4 * four);
      sums[2 * j] = __fadd_rn(sums[2 * j], dot_four(s, s));
      sums[2 * j + 1] = __fadd_rn(sums[2 * j + 1], dot_four(q, s));
    }
  }
  block_sums(m, sums);

  // Shares of the sources, as `residual_mix` has them.
  float share[FORMER], top = 0.f, all = 0.f;
#pragma unroll
  for (int j = 0; j < FORMER; j++) {
    const float r = inverse_rms(m.totals[2 * j], mix_eps);
    share[j] = __fmul_rn(__fmul_rn(m.totals[2 * j + 1], r), sqrtf(1.f / WIDTH));
    top = j ? fmaxf(top, share[j]) : share[j];
  }
#pragma unroll
  for (int j = 0; j < FORMER; j++) {
    share[j] = expf(__fadd_rn(share[j], -top));
    all = __fadd_rn(all, share[j]);
  }
#pragma unroll
  for (int j = 0; j < FORMER; j++)
    share[j] = __fmul_rn(share[j] / all, inverse_rms(m.totals[2 * j], mix_eps));
  const float of_u = inverse_rms(m.totals[2 * FORMER], gate_eps);

  float square[1] = {0.f};
  for (int four = tid; four < FOURS; four += THREADS) {
    Four sum = zero_four(), u = four_of(*(const uint4*)(m.u + 4 * four));
#pragma unroll
    for (int j = 0; j < FORMER; j++) {
      const Four s = load_act_four<false>(former[j], row + 4 * four);
#pragma unroll
      for (int e = 0; e < 4; e++) sum.v[e] = fmaf(share[j], s.v[e], sum.v[e]);
    }
    store_four<true>(m.message, 4 * four, sum);
    square[0] = __fadd_rn(square[0], dot_four(sum, sum));
#pragma unroll
    for (int e = 0; e < 4; e++) u.v[e] = __fmul_rn(u.v[e], of_u);
    store_four<false>(m.input, 4 * four, u);
  }
  block_sums(m, square);
  const float of_message = inverse_rms(m.totals[0], gate_eps);
  for (int four = tid; four < FOURS; four += THREADS) {
    Four x = four_of(*(const uint4*)(m.message + 4 * four));
#pragma unroll
    for (int e = 0; e < 4; e++) x.v[e] = __fmul_rn(x.v[e], of_message);
    store_four<false>(m.input, WIDTH + 4 * four, x);
  }
  __syncthreads();

  for (int i = warp; i < DOWN_ROWS; i += WARPS) {
    const bf16* const weights = down + (size_t)i * 2 * WIDTH;
    float sum = 0.f;
#pragma unroll 6
    for (int at = 8 * lane; at < 2 * WIDTH; at += 256)
      sum = dot_eight(load_weight16(weights + at), *(const uint4*)(m.input + at), sum);
    const float r = to_float(to_bf16(lanes_sum<32>(sum)));
    if (lane < BLOCKS) cluster_store(cluster_address(m.r + block * DOWN_ROWS + i, lane), r);
  }
  cluster_arrive();
  cluster_wait();

  const float phi = tanhf(dot_rank(forget + (size_t)tid * RANK, m.r));
  const float gamma = tanhf(dot_rank(gain + (size_t)tid * RANK, m.r));
  const float kept = __fmul_rn(__fadd_rn(1.f, -phi), m.u[column]);
  const float gated = __fadd_rn(kept, __fmul_rn(gamma, m.message[column]));
  const float own[1] = {__fmul_rn(gated, gated)};
  block_sums(m, own);
  if (tid < BLOCKS) cluster_store(cluster_address(m.squares + block, tid), m.totals[0]);
  cluster_arrive();
  cluster_wait();
  float total = m.squares[0];
#pragma unroll
  for (int i = 1; i < BLOCKS; i++) total = __fadd_rn(total, m.squares[i]);
  const float y = __fmul_rn(__fmul_rn(gated, inverse_rms(total, norm_eps)), norm);
  out[((size_t)result * num_rows + token) * WIDTH + column] = to_bf16(y);
}
