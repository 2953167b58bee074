// The two ends of a step: rows of the embedding table, and the greedy token from the candidates of
// `stream` (largest value, lowest id on ties).
#include "choice.cuh"

// out[T, HIDDEN] = table[tokens]: one block a token, 256 threads. Ids are clamped to the table.
extern "C" __global__ void __launch_bounds__(256)
    embed(const int* tokens, const bf16* table, bf16* out, int vocab) {
  pdl_trigger();
  pdl_wait();
  const int id = min(max(load_act_int(tokens + blockIdx.x), 0), vocab - 1);
  for (int i = threadIdx.x * 8; i < HIDDEN; i += 256 * 8)
    *(uint4*)(out + (size_t)blockIdx.x * HIDDEN + i) =
        load_weight16(table + (size_t)id * HIDDEN + i);
}

// tokens[T] from best and row [T, count]: one block a token, 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    argmax(const float* best, const int* row, int* tokens, int count) {
  BestOf<8>& sm = *(BestOf<8>*)dynamic_smem();
  pdl_trigger();
  pdl_wait();
  const size_t first = (size_t)blockIdx.x * count;
  const Choice choice = sm.run(best + first, row + first, count);
  if (threadIdx.x == 0) tokens[blockIdx.x] = choice.row;
}
