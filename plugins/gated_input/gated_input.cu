// gated_input: blocks are [token][result][block of its cluster]. All blocks of a cluster make the
// message and the gate's input itself; each has some rows of `down`, which it hands to the others,
// and some columns of the result.
//
// Nearly all of the time is latency, so weights are asked for long before they are used: into the
// L2 before the kernel waits, rows of `down` into registers when the input has come, before it is
// summed up, and those of `forget` and `gain` before blocks wait for each other's rows.
//
// Macros: WIDTH, RANK, FORMER (sources of messages), RESULTS, OWN_MIXED (whether each result has a
// mixed input of its own), REGISTERS, DRY_PASS.
//
// DRY_PASS: before the wait blocks go through all of the code once, with whatever is in memory, and
// store nothing but in shared memory of their own. A step has some forty kernels and this one few
// blocks, so that mostly they stand on a multiprocessor whose instruction cache has none of it;
// fetched behind the wait, it is a good part of their time. For launches whose blocks start early.
#include "attention_sm90/latency.cuh"
#include "attention_sm90/sm90.cuh"
#include "vector.cuh"

#ifndef DRY_PASS
#define DRY_PASS 0
#endif
constexpr int BLOCKS = 8, THREADS = 256, WARPS = THREADS / 32;
constexpr int COLUMNS = WIDTH / BLOCKS, OWN_COLUMNS = (COLUMNS + THREADS - 1) / THREADS;
constexpr int FOURS = WIDTH / 4, OWN_FOURS = (FOURS + THREADS - 1) / THREADS;
// A warp's pieces of a row of `down`, 8 values for each lane, and how many are asked for early.
constexpr int DOWN_ROWS = RANK / BLOCKS, PIECES = 2 * WIDTH / 256;
constexpr int EARLY_PIECES = PIECES < 18 ? PIECES : 18;
// Lanes that share a row of `forget` and of `gain`, rows of the block at once, and how often.
constexpr int ROW_LANES = RANK / 8, ROWS_AT_ONCE = WARPS * 32 / ROW_LANES;
constexpr int ROUNDS = (COLUMNS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
constexpr int EARLY_ROUNDS = ROUNDS < 9 ? ROUNDS : 9;
// Products of a source with itself and with the query; and the input's with itself.
constexpr int SUMS = 2 * FORMER + 1;
static_assert(WIDTH % 128 == 0 && (ROW_LANES & (ROW_LANES - 1)) == 0 && ROW_LANES <= 32, "whole");

struct Shared {
  bf16 input[2 * WIDTH];  // of the gate
  float u[WIDTH];
  float message[COLUMNS], phi[COLUMNS], gamma[COLUMNS];
  float r[RANK], squares[BLOCKS];  // which blocks push to each other
  u64 has_rows, has_squares;
  // Sums of warps: each place is used once, so that one barrier is enough.
  float sums[SUMS][WARPS], of_message[1][WARPS], own[1][WARPS];
};

// Sums over the block, in the order of its warps.
template <int N>
INK_DEVICE void block_sums(float (&places)[N][WARPS], float (&v)[N]) {
  const int tid = threadIdx.x;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float sum = lanes_sum<32>(v[i]);
    if ((tid & 31) == 0) places[i][tid >> 5] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; i++) {
    v[i] = places[i][0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) v[i] = __fadd_rn(v[i], places[i][w]);
  }
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
// Eight values of a row of `forget` or `gain` times those of r.
INK_DEVICE float dot_rank(uint4 w, const float (&r)[8]) {
  const u32 x[4] = {w.x, w.y, w.z, w.w};
  float sum = __fmul_rn(low_float(x[0]), r[0]);
  sum = fmaf(high_float(x[0]), r[1], sum);
#pragma unroll
  for (int j = 1; j < 4; j++)
    sum = fmaf(high_float(x[j]), r[2 * j + 1], fmaf(low_float(x[j]), r[2 * j], sum));
  return lanes_sum<ROW_LANES>(sum);
}

extern "C" __global__ void __maxnreg__(REGISTERS)
    gated_input(const float* mixed, const bf16* f0, const bf16* f1, const bf16* f2,
                const float* queries, const bf16* down, const bf16* forget, const bf16* gain,
                const bf16* w0, const bf16* w1, const bf16* w2, bf16* out, int* error,
                int num_rows, int first, float mix_eps, float gate_eps, float norm_eps) {
  Shared& m = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int block = blockIdx.x % BLOCKS, result = blockIdx.x / BLOCKS % RESULTS;
  const int token = blockIdx.x / (BLOCKS * RESULTS);
  pdl_trigger();
  if (tid == 0) {
    mbar_init(&m.has_rows, 1);
    mbar_init(&m.has_squares, 1);
    mbar_expect(&m.has_rows, sizeof m.r);
    mbar_expect(&m.has_squares, sizeof m.squares);
  }
  __syncwarp();
  cluster_arrive_relaxed();  // this block runs, and its barriers can be counted on

  // What never changes: weights on their way to the L2, and the query.
  down += ((size_t)result * RANK + block * DOWN_ROWS) * 2 * WIDTH;
  forget += ((size_t)result * WIDTH + block * COLUMNS) * RANK;
  gain += ((size_t)result * WIDTH + block * COLUMNS) * RANK;
  const bf16* const norm = (result == 0 ? w0 : result == 1 ? w1 : w2) + block * COLUMNS;
  if (tid == 0) {
    bulk_prefetch(norm, COLUMNS * sizeof(bf16));
    bulk_prefetch(down, DOWN_ROWS * 2 * WIDTH * sizeof(bf16));
    bulk_prefetch(forget, COLUMNS * RANK * sizeof(bf16));
    bulk_prefetch(gain, COLUMNS * RANK * sizeof(bf16));
  }
  queries += (size_t)(first + result) * WIDTH;
  auto run = [&](bool is_dry) {
    Four q[OWN_FOURS];
#pragma unroll
    for (int n = 0; n < OWN_FOURS; n++) {
      const int four = tid + n * THREADS;
      q[n] = four < FOURS ? load_weight_four<true>(queries, 4 * four) : zero_four();
    }
    if (!is_dry) {
      pdl_wait();
      cluster_wait_aligned();
    }

    const bf16* const former[] = {f0, f1, f2};
    const size_t row = (size_t)token * WIDTH;
    const float* const own_mixed =
        mixed + (size_t)(OWN_MIXED ? result : 0) * num_rows * WIDTH + row;
    Four u[OWN_FOURS];
    uint2 source[OWN_FOURS][FORMER];  // as they are, in half the registers
#pragma unroll
    for (int n = 0; n < OWN_FOURS; n++) {
      const int four = tid + n * THREADS;
      u[n] = four < FOURS ? load_act_four<true>(own_mixed, 4 * four) : zero_four();
#pragma unroll
      for (int j = 0; j < FORMER; j++)
        source[n][j] = four < FOURS ? load_act8(former[j] + row + 4 * four) : make_uint2(0, 0);
    }
    float sums[SUMS] = {};
#pragma unroll
    for (int n = 0; n < OWN_FOURS; n++) {
      const int four = tid + n * THREADS;
      if (four < FOURS) store_four<true>(m.u, 4 * four, u[n]);
      sums[2 * FORMER] = __fadd_rn(sums[2 * FORMER], dot_four(u[n], u[n]));
#pragma unroll
      for (int j = 0; j < FORMER; j++) {
        const Four s = four_of(source[n][j]);
        sums[2 * j] = __fadd_rn(sums[2 * j], dot_four(s, s));
        sums[2 * j + 1] = __fadd_rn(sums[2 * j + 1], dot_four(q[n], s));
      }
    }
    uint4 early[EARLY_PIECES];
    const uint4 none = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int n = 0; n < EARLY_PIECES; n++) {
      const bf16* const weights = down + (size_t)warp * 2 * WIDTH + 8 * lane;
      early[n] = warp < DOWN_ROWS ? load_weight16(weights + 256 * n) : none;
    }
    block_sums(m.sums, sums);

    // Shares of the sources, as `residual_mix` has them.
    float share[FORMER], top = 0.f, all = 0.f;
#pragma unroll
    for (int j = 0; j < FORMER; j++) {
      const float r = inverse_rms(sums[2 * j], mix_eps);
      share[j] = __fmul_rn(__fmul_rn(sums[2 * j + 1], r), sqrtf(1.f / WIDTH));
      top = j ? fmaxf(top, share[j]) : share[j];
    }
#pragma unroll
    for (int j = 0; j < FORMER; j++) {
      share[j] = expf(__fadd_rn(share[j], -top));
      all = __fadd_rn(all, share[j]);
    }
#pragma unroll
    for (int j = 0; j < FORMER; j++)
      share[j] = __fmul_rn(share[j] / all, inverse_rms(sums[2 * j], mix_eps));
    const float of_u = inverse_rms(sums[2 * FORMER], gate_eps);

    Four message[OWN_FOURS];
    float square[1] = {0.f};
#pragma unroll
    for (int n = 0; n < OWN_FOURS; n++) {
      const int four = tid + n * THREADS;
      message[n] = zero_four();
#pragma unroll
      for (int j = 0; j < FORMER; j++) {
        const Four s = four_of(source[n][j]);
#pragma unroll
        for (int e = 0; e < 4; e++) message[n].v[e] = fmaf(share[j], s.v[e], message[n].v[e]);
      }
      square[0] = __fadd_rn(square[0], dot_four(message[n], message[n]));
      if (four >= FOURS) continue;
      const int own = 4 * four - block * COLUMNS;
      if (own >= 0 && own < COLUMNS) store_four<true>(m.message, own, message[n]);
      Four x = four_of(*(const uint4*)(m.u + 4 * four));  // its own, whose registers weights have
#pragma unroll
      for (int e = 0; e < 4; e++) x.v[e] = __fmul_rn(x.v[e], of_u);
      store_four<false>(m.input, 4 * four, x);
    }
    block_sums(m.of_message, square);
    const float of_message = inverse_rms(square[0], gate_eps);
#pragma unroll
    for (int n = 0; n < OWN_FOURS; n++) {
      const int four = tid + n * THREADS;
#pragma unroll
      for (int e = 0; e < 4; e++) message[n].v[e] = __fmul_rn(message[n].v[e], of_message);
      if (four < FOURS) store_four<false>(m.input, WIDTH + 4 * four, message[n]);
    }
    __syncthreads();

    // Row `i` of the block's, whose first pieces may be here; r goes to all blocks.
    auto row_of_down = [&](int i, bool is_early) {
      const bf16* const weights = down + (size_t)i * 2 * WIDTH + 8 * lane;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < PIECES; n++) {
        const bool is_here = is_early && n < EARLY_PIECES;
        const uint4 w = is_here ? early[n] : load_weight16(weights + 256 * n);
        sum = dot_eight(w, *(const uint4*)(m.input + 256 * n + 8 * lane), sum);
      }
      const float r = to_float(to_bf16(lanes_sum<32>(sum)));
      if (lane < BLOCKS && !is_dry)
        sm90::push(sm90::address_at(m.r + block * DOWN_ROWS + i, lane), r,
                   sm90::address_at(&m.has_rows, lane));
    };
    if (warp < DOWN_ROWS) row_of_down(warp, true);
    if constexpr (DOWN_ROWS > WARPS)
      for (int i = warp + WARPS; i < DOWN_ROWS; i += WARPS) row_of_down(i, false);

    const int own_row = tid / ROW_LANES, of_row = tid % ROW_LANES * 8;
    uint4 of_forget[EARLY_ROUNDS], of_gain[EARLY_ROUNDS];
    auto ask = [&](int start) {
#pragma unroll
      for (int n = 0; n < EARLY_ROUNDS; n++) {
        const int column = (start + n) * ROWS_AT_ONCE + own_row;
        const size_t at = (size_t)column * RANK + of_row;
        of_forget[n] = column < COLUMNS ? load_weight16(forget + at) : none;
        of_gain[n] = column < COLUMNS ? load_weight16(gain + at) : none;
      }
    };
    ask(0);
    if (!is_dry) sm90::mbar_wait_cluster(&m.has_rows, 0, error);
    float r[8];
#pragma unroll
    for (int i = 0; i < 8; i++) r[i] = m.r[of_row + i];
#pragma unroll 1
    for (int start = 0; start < ROUNDS; start += EARLY_ROUNDS) {
      if (start) ask(start);
#pragma unroll
      for (int n = 0; n < EARLY_ROUNDS; n++) {
        const int column = (start + n) * ROWS_AT_ONCE + own_row;
        const float phi = dot_rank(of_forget[n], r), gamma = dot_rank(of_gain[n], r);
        if (of_row || column >= COLUMNS) continue;
        m.phi[column] = phi;
        m.gamma[column] = gamma;
      }
    }
    __syncthreads();

    float gated[OWN_COLUMNS], own[1] = {0.f};
#pragma unroll
    for (int n = 0; n < OWN_COLUMNS; n++) {
      const int column = tid + n * THREADS;
      gated[n] = 0.f;
      if (column >= COLUMNS) continue;
      const float phi = tanhf(m.phi[column]), gamma = tanhf(m.gamma[column]);
      const float kept = __fmul_rn(__fadd_rn(1.f, -phi), m.u[block * COLUMNS + column]);
      gated[n] = __fadd_rn(kept, __fmul_rn(gamma, m.message[column]));
      own[0] = __fadd_rn(own[0], __fmul_rn(gated[n], gated[n]));
    }
    float of_norm[OWN_COLUMNS];
#pragma unroll
    for (int n = 0; n < OWN_COLUMNS; n++) {
      const int column = tid + n * THREADS;
      of_norm[n] = column < COLUMNS ? to_float((bf16)load_weight2(norm + column)) : 0.f;
    }
    block_sums(m.own, own);
    if (tid < BLOCKS && !is_dry)
      sm90::push(sm90::address_at(m.squares + block, tid), own[0],
                 sm90::address_at(&m.has_squares, tid));
    // All that others push has come then, so that a block may end.
    if (!is_dry) sm90::mbar_wait_cluster(&m.has_squares, 0, error);
    float total = m.squares[0];
#pragma unroll
    for (int i = 1; i < BLOCKS; i++) total = __fadd_rn(total, m.squares[i]);
    const float rms = inverse_rms(total, norm_eps);
    bf16* const to = out + ((size_t)result * num_rows + token) * WIDTH + block * COLUMNS;
#pragma unroll
    for (int n = 0; n < OWN_COLUMNS; n++) {
      const int column = tid + n * THREADS;
      const float y = __fmul_rn(__fmul_rn(gated[n], rms), of_norm[n]);
      if (column < COLUMNS && !is_dry) to[column] = to_bf16(y);
    }
    if (DRY_PASS) __syncthreads();  // all have read what the next pass overwrites
  };
#pragma unroll 1
  for (int pass = DRY_PASS; pass >= 0; pass--) run(pass);
}
