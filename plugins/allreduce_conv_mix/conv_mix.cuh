// allreduce_conv_mix behind the sum over ranks: static convolution, residual, mix, weighted norms.
//
// `Source` gives the sum in the model's dtype: load(token, column) is four columns of a row of the
// step, called behind the wait; a row is asked for by the blocks of up to four tokens.
//
// Macros: WIDTH, FORMER (sources in front of the new residual), QUERIES, RESIDUAL (0 none, 1 bf16, 2 float32), KEEPS_FLOAT32
// (the new residual), RING, RING_IS_WIDE, SPLIT.
#ifndef INK_CONV_MIX_CUH
#define INK_CONV_MIX_CUH
#include "mix.cuh"
#include "short_conv/short_conv.cuh"

constexpr int MIX_SOURCES = FORMER + 1;  // the new residual is the last
using ResidualMix = Mix<WIDTH, MIX_SOURCES, QUERIES>;

template <class Source>
struct ConvMix {
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
  bf16* out;  // [QUERIES][num_rows][WIDTH]
  int num_rows;

  // Loaded early.
  short_conv::Taps taps;
  uint2 past[short_conv::PAST];
  Four query[QUERIES];
  uint2 norm[QUERIES];

  INK_DEVICE bool has_token() const { return token < step.num_tokens; }
  INK_DEVICE size_t at(int column) const { return (size_t)token * WIDTH + column; }

  INK_DEVICE void load_past(int column) {
    short_conv::load_past<RING, WIDTH>(past, ring, step, token, column);
  }
  INK_DEVICE void early(int column) {
    taps.load(conv_weight, column);
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
      query[i] = load_weight_four<true>(queries, (size_t)i * WIDTH + column);
    load_norms(column);
    if (RING_IS_WIDE) load_past(column);  // last: it waits for the position
  }
  INK_DEVICE void load(int column, Four (&s)[MIX_SOURCES], Four (&q)[QUERIES]) {
    using namespace short_conv;
    if (!RING_IS_WIDE) load_past(column);
    Four x[TAPS], old = zero_four();
    load_inputs(x, past, source, token, column);
    if (RESIDUAL) old = load_act_four<RESIDUAL == 2>(residual, at(column));
    load_former(column, s);
    const Four update = round_four(convolve<true>(x, taps));
    Four sum = update;
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (RESIDUAL) sum.v[i] = __fadd_rn(old.v[i], update.v[i]);
    s[FORMER] = store_four<KEEPS_FLOAT32>(residual_out, at(column), sum);
    if (RING_IS_WIDE)
      store_four<false>(ring, ring_at<RING, WIDTH>(step, step.position + token, column), x[PAST]);
#pragma unroll
    for (int i = 0; i < QUERIES; i++) q[i] = query[i];
  }
  INK_DEVICE void again(int column, Four (&s)[MIX_SOURCES]) {
    load_norms(column);
    load_former(column, s);
    s[FORMER] = load_act_four<KEEPS_FLOAT32>(residual_out, at(column));
  }
  INK_DEVICE void finish(int column, const Four (&s)[MIX_SOURCES],
                         const float (&c)[QUERIES][MIX_SOURCES], const float (&inverse)[QUERIES]) {
#pragma unroll
    for (int i = 0; i < QUERIES; i++) {
      Four y = ResidualMix::mixed(s, c[i]);
      const Four w = four_of(norm[i]);
#pragma unroll
      for (int e = 0; e < 4; e++) y.v[e] = __fmul_rn(__fmul_rn(y.v[e], inverse[i]), w.v[e]);
      store_four<false>(out, (size_t)i * num_rows * WIDTH + at(column), y);
    }
  }

 private:
  INK_DEVICE void load_norms(int column) {
#pragma unroll
    for (int i = 0; i < QUERIES; i++) norm[i] = load_weight8(norm_weights[i] + column);
  }
  INK_DEVICE void load_former(int column, Four (&s)[MIX_SOURCES]) {
#pragma unroll
    for (int j = 0; j < FORMER; j++) s[j] = load_act_four<false>(former[j], at(column));
  }
};

#endif  // INK_CONV_MIX_CUH
