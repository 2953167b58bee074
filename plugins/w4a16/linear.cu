// y[T, N] = bf16(x[T, K] W^T * scale): a plain product, one row tile of 16 rows a block, T = 1..8.
// The tile is staged in shared memory before the wait; activations go straight into registers.
#include "w4a16.cuh"

constexpr int WARPS = 16, THREADS = WARPS * 32;
constexpr int NV = vectors_per_warp(DIM_K, WARPS), LIVE_WARPS = DIM_K / VECTOR_K / NV;
constexpr int TILE_BYTES = tile_bytes(DIM_K);

struct Shared {
  alignas(128) u8 weights[TILE_BYTES];
  alignas(16) float partial[LIVE_WARPS * TILE_SUMS];
  u64 bar;
};

extern "C" __global__ void __maxnreg__(NV <= 4 ? 56 : 96)
    linear(const bf16* x, const u8* weights, const float* scale, bf16* y, int* error,
           int num_rows) {
  const int T = ONE_TOKEN ? 1 : num_rows;
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2;
  trigger_first();
  if (tid == 0) {
    mbar_init(&sm.bar, 1);
    mbar_expect(&sm.bar, TILE_BYTES);
    load_weights(sm.weights, weights + (size_t)blockIdx.x * TILE_BYTES, TILE_BYTES, &sm.bar);
  }
  const int row = blockIdx.x * 16 + (tid >> 3), token = tid & 7;
  const float unit = tid < 128 ? tensor_unit(scale) : 0.f;
  __syncthreads();
  wait_and_trigger();
  if (warp < LIVE_WARPS) {
    Activations<NV> b;
    load_tokens<NV>(b, g < T ? x + (size_t)g * DIM_K : nullptr, warp * NV, lane);
    mbar_wait(&sm.bar, 0, error);
    Tile tile = zero_tile();
    multiply_shared<NV>(tile, sm.weights, b, warp * NV, lane);
    store_tile(sm.partial + warp * TILE_SUMS, tile, lane);
  }
  __syncthreads();
  if (tid < 128 && token < T && row < DIM_N)
    y[(size_t)token * DIM_N + row] = to_bf16(
        strided_sum<LIVE_WARPS>(sm.partial + (tid >> 3) * TOKEN_COLUMNS + token, TILE_SUMS) * unit);
}
