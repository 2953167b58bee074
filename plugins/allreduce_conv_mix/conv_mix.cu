// allreduce_conv_mix of a single rank. Blocks are [token][block of its row], see SPLIT. Rows from
// num_tokens on are left as they are.
#include "conv_mix.cuh"

extern "C" __global__ void MIX_BOUNDS
    conv_mix(const bf16* partial, const float* conv_weight, bf16* conv_state, const int* position,
             const int* num_tokens, const int* slot, const void* residual, const bf16* s0,
             const bf16* s1, const bf16* s2, const bf16* s3, const bf16* s4, const bf16* s5,
             const bf16* s6, const bf16* s7, const bf16* s8, const float* queries, const bf16* w0,
             const bf16* w1, const bf16* w2, void* residual_out, void* out, int num_rows,
             float mix_eps, float norm_eps
#if SPLIT == 1
             ,
             u64* exchange, int* error
#endif
    ) {
  auto& memory = ((Shared*)dynamic_smem())->mix;
  if (TRIGGER == 0) pdl_trigger();
  ConvMix<short_conv::Rows<WIDTH>> row;
  row.source.rows = partial;
  row.bind(blockIdx.x / ROW_BLOCKS, short_conv::load_step(position, num_tokens, slot), conv_weight,
           conv_state, residual, {s0, s1, s2, s3, s4, s5, s6, s7, s8}, queries, {w0, w1, w2},
           residual_out, out, num_rows);
  const ResidualMix::Eps eps = {mix_eps, norm_eps};
  const int block = blockIdx.x % ROW_BLOCKS;
#if SPLIT == 2
  ResidualMix::cluster(memory, row, block, eps);
#elif SPLIT == 1
  ResidualMix::split(memory, row, row.token, block, eps, exchange, error);
#else
  ResidualMix::loop(memory, row, eps);
#endif
}
