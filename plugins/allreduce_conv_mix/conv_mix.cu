// allreduce_conv_mix of a single rank. With SPLIT, [token][slice] are the blocks, else tokens. Rows
// from num_tokens on are left as they are.
#include "conv_mix.cuh"

struct Shared {
  ResidualMix::Memory mix;
};

extern "C" __global__ void __launch_bounds__(MIX_THREADS)
    conv_mix(const bf16* partial, const float* conv_weight, bf16* conv_state, const int* position,
             const int* num_tokens, const int* slot, const void* residual, const bf16* s0,
             const bf16* s1, const bf16* s2, const bf16* s3, const bf16* s4, const bf16* s5,
             const bf16* s6, const bf16* s7, const bf16* s8, const float* queries, const bf16* w0,
             const bf16* w1, const bf16* w2, void* residual_out, bf16* out, int num_rows,
             float mix_eps, float norm_eps
#if SPLIT
             ,
             u64* exchange, int* error
#endif
    ) {
  ResidualMix::Memory& memory = ((Shared*)dynamic_smem())->mix;
  pdl_trigger();
  ConvMix<short_conv::Rows<WIDTH>> row;
  row.source.rows = partial;
  row.token = SPLIT ? blockIdx.x / ResidualMix::SLICES : blockIdx.x;
  row.step = short_conv::load_step(position, num_tokens, slot);
  row.conv_weight = conv_weight, row.ring = conv_state, row.residual = residual;
  const bf16* const former[] = {s0, s1, s2, s3, s4, s5, s6, s7, s8};
  const bf16* const norms[] = {w0, w1, w2};
#pragma unroll
  for (int j = 0; j < FORMER; j++) row.former[j] = former[j];
#pragma unroll
  for (int i = 0; i < QUERIES; i++) row.norm_weights[i] = norms[i];
  row.queries = queries, row.residual_out = residual_out, row.out = out, row.num_rows = num_rows;
  const ResidualMix::Eps eps = {mix_eps, norm_eps};
#if SPLIT
  ResidualMix::split(memory, row, row.token, blockIdx.x % ResidualMix::SLICES, eps, exchange, error);
#else
  ResidualMix::loop(memory, row, eps);
#endif
}
