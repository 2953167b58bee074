// Products with many row tiles and K = HIDDEN, T = 1..8 tokens: lm_head and dense gate/up. Eight
// warps split K; DEPTH tiles of a warp live in registers, all requested before the wait; a slot is
// refilled as soon as it is used. HAS_NORM: residual add and RMSNorm in front (HIDDEN at most
// 2048), else x is the input. What becomes of the product y (DIM_N rows):
//   GATED   y's tiles are 8 gate and 8 up rows, rounded to bf16; out[T, DIM_N / 2] = bf16(silu(g)
//   u) LOGITS  out[T, DIM_N] float32 = y ARGMAX  the block's largest y and its lowest row, per
//   token, for `argmax` or `sample`
// Rows at and above DIM_N are padding of the last tile.
#include "choice.cuh"
#include "w4a16.cuh"

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int NV = vectors_per_warp(HIDDEN, WARPS), LIVE_WARPS = HIDDEN / VECTOR_K / NV;
constexpr int TILE_BYTES = tile_bytes(HIDDEN), NUM_TILES = (DIM_N + 15) / 16;
using InputNorm = Norm<HIDDEN, THREADS, HAS_DELTA>;

struct Shared {
  // Two rounds, so one barrier a round is enough.
  alignas(16) float partial[2][DEPTH][LIVE_WARPS * TILE_SUMS];
#if HAS_NORM
  InputNorm::Memory norm;
#endif
  float best[WARPS][MAX_TOKENS];
  int best_row[WARPS][MAX_TOKENS];
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    stream(const bf16* x, const bf16* delta, const bf16* norm_weight, const u8* weights,
           const float* scale, void* out, float* best_out, int* row_out, bf16* residual,
           int num_rows, float eps) {
  const int T = ONE_TOKEN ? 1 : num_rows;
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, stride = gridDim.x;
  const bool live = warp < LIVE_WARPS;
  trigger_first();
  Fragment<NV> w[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; d++) {
    const int i = blockIdx.x + d * stride;
    if (live && i < NUM_TILES)
      load_fragment<NV>(w[d], weights + (size_t)i * TILE_BYTES, warp * NV, lane);
  }
#if HAS_NORM
  InputNorm::load_weight(sm.norm, norm_weight);
#endif
  const float unit = tensor_unit(scale);
  wait_and_trigger();
  Activations<NV> b;
#if HAS_NORM
  InputNorm::run(sm.norm, x, delta, eps, residual, nullptr, T,
                 blockIdx.x < T ? (int)blockIdx.x : -1);
  if (live)
    load_tokens_shared<NV>(b, sm.norm.z + min(g, T - 1) * InputNorm::STRIDE, warp * NV, lane);
#else
  load_tokens<NV>(b, live && g < T ? x + (size_t)g * HIDDEN : nullptr, warp * NV, lane);
#endif

  const int token = tid & 7;
  Choice best = least_choice(0);
  int round = 0;
  for (int base = blockIdx.x; base < NUM_TILES; base += DEPTH * stride, round ^= 1) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      const int i = base + d * stride;
      if (live && i < NUM_TILES) {
        Tile tile = zero_tile();
        multiply_fragment<NV>(tile, w[d], b);
        const int next = i + DEPTH * stride;
        if (next < NUM_TILES)
          load_fragment<NV>(w[d], weights + (size_t)next * TILE_BYTES, warp * NV, lane);
        store_tile(sm.partial[round][d] + warp * TILE_SUMS, tile, lane);
      }
    }
    __syncthreads();
    constexpr int OUTPUTS = GATED ? 64 : 128;  // of a tile
#pragma unroll
    for (int j = 0; j < (DEPTH * OUTPUTS + THREADS - 1) / THREADS; j++) {
      const int o = tid + j * THREADS, d = o / OUTPUTS, i = base + d * stride;
      if (d < DEPTH && i < NUM_TILES && token < T) {
        const int row = o % OUTPUTS >> 3;
        const float* p = sm.partial[round][d] + row * TOKEN_COLUMNS + token;
        const float y = strided_sum<LIVE_WARPS>(p, TILE_SUMS) * unit;
#if GATED
        const float gate = round_bf16(y);
        const float up =
            round_bf16(strided_sum<LIVE_WARPS>(p + 8 * TOKEN_COLUMNS, TILE_SUMS) * unit);
        ((bf16*)out)[(size_t)token * (DIM_N / 2) + i * 8 + row] = to_bf16(silu_exact(gate) * up);
#else
        const int n = i * 16 + row;
        if (n < DIM_N) {
#if LOGITS
          ((float*)out)[(size_t)token * DIM_N + n] = y;
#endif
#if ARGMAX
          keep_better(best, y, n);
#endif
        }
#endif
      }
    }
  }
#if ARGMAX
  keep_best_of_warp<8>(best);
  if (lane < 8) {
    sm.best[warp][lane] = best.value;
    sm.best_row[warp][lane] = best.row;
  }
  __syncthreads();
  if (tid < T) {
#pragma unroll
    for (int q = 0; q < WARPS; q++) keep_better(best, sm.best[q][tid], sm.best_row[q][tid]);
    best_out[tid * stride + blockIdx.x] = best.value;
    row_out[tid * stride + blockIdx.x] = best.row;
  }
#endif
}
