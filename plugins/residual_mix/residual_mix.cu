// residual_mix: see allreduce_conv_mix/mix.cuh. All sources are bf16 but those of FLOAT32_SOURCES
// (a bit for each). With SPLIT, [token][slice] are the blocks, else tokens.
#include "allreduce_conv_mix/mix.cuh"

using RowMix = Mix<WIDTH, SOURCES, QUERIES>;

struct Shared {
  RowMix::Memory mix;
};

struct Inputs {
  static constexpr bool WAITS_LATE = false;
  int token, num_rows;
  const void* sources[SOURCES];
  const float* queries;
  float* out;  // [QUERIES][num_rows][WIDTH]
  Four query[QUERIES];

  INK_DEVICE bool has_token() const { return true; }
  INK_DEVICE void early(int column) {
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
      query[i] = load_weight_four<true>(queries, (size_t)i * WIDTH + column);
  }
  INK_DEVICE void first(int column, Four (&s)[SOURCES], Four (&q)[QUERIES]) {
    again(column, s);
#pragma unroll
    for (int i = 0; i < QUERIES; i++) q[i] = query[i];
  }
  INK_DEVICE void last(int, Four (&)[SOURCES]) {}
  INK_DEVICE void again(int column, Four (&s)[SOURCES]) {
    const size_t at = (size_t)token * WIDTH + column;
#pragma unroll
    for (int j = 0; j < SOURCES; j++)
      s[j] = FLOAT32_SOURCES >> j & 1 ? load_act_four<true>(sources[j], at)
                              : load_act_four<false>(sources[j], at);
  }
  INK_DEVICE void finish(int column, int i, const Four (&s)[SOURCES], const float (&c)[SOURCES],
                         float) {
    store_four<true>(out, ((size_t)i * num_rows + token) * WIDTH + column, RowMix::mixed(s, c));
  }
};

extern "C" __global__ void __launch_bounds__(MIX_THREADS)
    residual_mix(const void* s0, const void* s1, const void* s2, const void* s3, const void* s4,
                 const void* s5, const void* s6, const void* s7, const void* s8, const void* s9,
                 const float* queries, float* out, int num_rows, float eps
#if SPLIT
                 ,
                 u64* exchange, int* error
#endif
    ) {
  RowMix::Memory& memory = ((Shared*)dynamic_smem())->mix;
  pdl_trigger();
  Inputs row;
  row.token = SPLIT ? blockIdx.x / RowMix::SLICES : blockIdx.x;
  row.num_rows = num_rows;
  const void* const sources[] = {s0, s1, s2, s3, s4, s5, s6, s7, s8, s9};
#pragma unroll
  for (int j = 0; j < SOURCES; j++) row.sources[j] = sources[j];
  row.queries = queries, row.out = out;
  const RowMix::Eps eps_of = {eps, 1.f};  // nothing is normed behind it
#if SPLIT
  RowMix::split(memory, row, row.token, blockIdx.x % RowMix::SLICES, eps_of, exchange, error);
#else
  RowMix::loop(memory, row, eps_of);
#endif
}
