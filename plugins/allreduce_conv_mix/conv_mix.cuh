// allreduce_conv_mix behind the sum over ranks: static convolution, residual, mix, weighted norms.
//
// `Source` gives the sum in the model's dtype: load(token, column) is four columns of a row of the
// step, in bf16, called behind the wait; a row is asked for by the blocks of up to four tokens.
//
// Macros: WIDTH, FORMER (sources in front of the new residual), QUERIES, RESIDUAL (0 none, 1 bf16,
// 2 float32), KEEPS_FLOAT32 (the new residual), RING, RING_IS_WIDE, SPLIT (how a row is shared:
// 0 not, 1 by slices, 2 in a cluster; see mix.cuh), TRIGGER, REGISTERS of a thread, if they are
// bounded, and NORMS: with 0 results are the mixtures themselves, in float32.
#ifndef INK_CONV_MIX_CUH
#define INK_CONV_MIX_CUH
#include "mix.cuh"
#include "short_conv/short_conv.cuh"

#ifndef NORMS
#define NORMS 1
#endif

constexpr int MIX_SOURCES = FORMER + 1;  // the new residual is the last
using ResidualMix = Mix<WIDTH, MIX_SOURCES, QUERIES>;
constexpr int BLOCK_THREADS = SPLIT == 2 ? 32 * ResidualMix::CLUSTER_WARPS : MIX_THREADS;
// Blocks of a token.
constexpr int ROW_BLOCKS = SPLIT == 2 ? MIX_CLUSTER : SPLIT == 1 ? ResidualMix::SLICES : 1;

#ifdef REGISTERS
#define MIX_BOUNDS __maxnreg__(REGISTERS)
#else
#define MIX_BOUNDS __launch_bounds__(BLOCK_THREADS)
#endif

struct Shared {
#if SPLIT == 2
  ResidualMix::RowMemory mix;
#else
  ResidualMix::Memory mix;
#endif
};

template <class Source>
struct ConvMix {
  static constexpr bool WAITS_LATE = false;

  Source source;
  int token;
  short_conv::Step step;
  const float* conv_weight;
  bf16* ring;
  const void* residual;
  const bf16* former[FORMER ? FORMER : 1];
  const float* queries;               // [QUERIES][WIDTH]
  const bf16* norm_weights[QUERIES];  // [WIDTH] each
  void* residual_out;
  void* out;  // [QUERIES][num_rows][WIDTH]
  int num_rows;

  // Loaded early.
  short_conv::Taps taps;
  uint2 past[short_conv::PAST];
  Four query[QUERIES];
  uint2 norm[QUERIES];
  // Requested by `first`.
  Four x[short_conv::TAPS], old;

  INK_DEVICE void bind(int of_token, const short_conv::Step& of_step, const float* weight,
                       bf16* state, const void* before, const bf16* const (&sources)[9],
                       const float* all_queries, const bf16* const (&norms)[3], void* sum,
                       void* results, int rows) {
    token = of_token, step = of_step, conv_weight = weight, ring = state, residual = before;
#pragma unroll
    for (int j = 0; j < FORMER; j++) former[j] = sources[j];
#pragma unroll
    for (int i = 0; i < QUERIES; i++) norm_weights[i] = norms[i];
    queries = all_queries, residual_out = sum, out = results, num_rows = rows;
  }
  INK_DEVICE bool has_token() const { return token < step.num_tokens; }
  INK_DEVICE size_t at(int column) const { return (size_t)token * WIDTH + column; }

  INK_DEVICE void load_past(int column) {
    short_conv::load_past<RING, WIDTH>(past, ring, step, token, column);
  }
  INK_DEVICE void early(int column) {
    taps.load<false>(conv_weight, column);
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
      query[i] = load_weight_four<true>(queries, (size_t)i * WIDTH + column);
    load_norms(column);
    if (RING_IS_WIDE) load_past(column);  // last: it waits for the position
  }
  INK_DEVICE void first(int column, Four (&s)[MIX_SOURCES], Four (&q)[QUERIES]) {
    if (!RING_IS_WIDE) load_past(column);
    short_conv::load_inputs(x, past, source, token, column);
    load_others(column, s, q);
  }
  INK_DEVICE void last(int column, Four (&s)[MIX_SOURCES]) {
    s[FORMER] = store_four<KEEPS_FLOAT32>(residual_out, at(column), sum_with_residual());
    if (RING_IS_WIDE) store_in_ring(column);
  }
  INK_DEVICE void again(int column, Four (&s)[MIX_SOURCES]) {
    load_norms(column);
    load_former(column, s);
    s[FORMER] = load_act_four<KEEPS_FLOAT32>(residual_out, at(column));
  }
  INK_DEVICE void finish(int column, int i, const Four (&s)[MIX_SOURCES],
                         const float (&c)[MIX_SOURCES], float inverse) {
    store_four<!NORMS>(out, result_at(column, i), result(i, s, c, inverse));
  }

 protected:
  INK_DEVICE size_t result_at(int column, int i) const {
    return (size_t)i * num_rows * WIDTH + at(column);
  }
  // Of query i, not rounded.
  INK_DEVICE Four result(int i, const Four (&s)[MIX_SOURCES], const float (&c)[MIX_SOURCES],
                         float inverse) const {
    Four y = ResidualMix::mixed(s, c);
    if (NORMS) {
      const Four w = four_of(norm[i]);
#pragma unroll
      for (int e = 0; e < 4; e++) y.v[e] = __fmul_rn(__fmul_rn(y.v[e], inverse), w.v[e]);
    }
    return y;
  }
  // The new residual, not rounded.
  INK_DEVICE Four sum_with_residual() const {
    const Four update = round_four(short_conv::convolve<true>(x, taps));
    Four sum = update;
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (RESIDUAL) sum.v[i] = __fadd_rn(old.v[i], update.v[i]);
    return sum;
  }
  INK_DEVICE void store_in_ring(int column) {
    using namespace short_conv;
    store_four<false>(ring, ring_at<RING, WIDTH>(step, step.position + token, column), x[PAST]);
  }
  INK_DEVICE void load_others(int column, Four (&s)[MIX_SOURCES], Four (&q)[QUERIES]) {
    if (RESIDUAL) old = load_act_four<RESIDUAL == 2>(residual, at(column));
    load_former(column, s);
#pragma unroll
    for (int i = 0; i < QUERIES; i++) q[i] = query[i];
  }

 private:
  INK_DEVICE void load_norms(int column) {
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
      if (NORMS) norm[i] = load_weight8(norm_weights[i] + column);
  }
  INK_DEVICE void load_former(int column, Four (&s)[MIX_SOURCES]) {
#pragma unroll
    for (int j = 0; j < FORMER; j++) s[j] = load_act_four<false>(former[j], at(column));
  }
};

#endif  // INK_CONV_MIX_CUH
