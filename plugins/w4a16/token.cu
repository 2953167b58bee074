// The two ends of a step: rows of the embedding table, and the greedy token from the candidates of
// `stream` (largest value, lowest id on ties).
#include "device.cuh"

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
  struct Shared {
    float best[8];
    int row[8];
  };
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x;
  pdl_trigger();
  pdl_wait();
  float value = __uint_as_float(0xFF800000u);
  int id = 0x7FFFFFFF;
  auto keep = [&](float v, int n) {
    if (v > value || (v == value && n < id)) value = v, id = n;
  };
  for (int i = tid; i < count; i += 256)
    keep(load_act_float(best + (size_t)blockIdx.x * count + i),
         load_act_int(row + (size_t)blockIdx.x * count + i));
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    const float v = __shfl_xor_sync(INK_FULL_WARP, value, o);
    keep(v, __shfl_xor_sync(INK_FULL_WARP, id, o));
  }
  if ((tid & 31) == 0) sm.best[tid >> 5] = value, sm.row[tid >> 5] = id;
  __syncthreads();
  if (tid == 0) {
    for (int q = 1; q < 8; q++) keep(sm.best[q], sm.row[q]);
    tokens[blockIdx.x] = id == 0x7FFFFFFF ? 0 : id;
  }
}
