// Residual add, RMSNorm, router logits and the shared expert's gate, up and activation; T = 1..8
// tokens, hidden size at most 2048. One tile of 8 gate and 8 up rows and ROUTER_ROWS router rows a
// block.
#include "w4a16.cuh"

constexpr int WARPS = 16, THREADS = WARPS * 32;
constexpr int NV = vectors_per_warp(HIDDEN, WARPS), LIVE_WARPS = HIDDEN / VECTOR_K / NV;
constexpr int TILE_BYTES = tile_bytes(HIDDEN), BLOCKS = SHARED_WIDTH / 8;
constexpr int ROUTER_ROWS = (EXPERTS + BLOCKS - 1) / BLOCKS;
static_assert(ROUTER_ROWS <= 8, "a block takes at most 8 router rows");
using InputNorm = Norm<HIDDEN, THREADS, HAS_DELTA>;

struct Shared {
  alignas(128) u8 weights[TILE_BYTES];
  alignas(128) bf16 router[ROUTER_ROWS * HIDDEN];
  InputNorm::Memory norm;
  alignas(16) float partial[LIVE_WARPS * TILE_SUMS];
  alignas(16) float logits[LIVE_WARPS * TILE_SUMS / 2];  // [warp][row 8][token TOKEN_COLUMNS]
  u64 bar;
};

extern "C" __global__ void __maxnreg__(56)
    router(const bf16* x, const bf16* delta, const bf16* norm_weight, const bf16* router_weight,
           const u8* weights, const float* scale, bf16* residual, bf16* z, bf16* logits,
           bf16* hidden, int* error, int num_rows, float eps) {
  const int T = ONE_TOKEN ? 1 : num_rows;
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2;
  const int rows = min(ROUTER_ROWS, EXPERTS - (int)blockIdx.x * ROUTER_ROWS);  // may be negative
  trigger_first();
  if (warp >= WARPS) return;  // such warps only take registers, so that no second block fits the SM
  if (tid == 0) {
    const u32 router_bytes = rows > 0 ? rows * HIDDEN * 2 : 0;
    mbar_init(&sm.bar, 1);
    mbar_expect(&sm.bar, TILE_BYTES + router_bytes);
    load_weights(sm.weights, weights + (size_t)blockIdx.x * TILE_BYTES, TILE_BYTES, &sm.bar);
    if (router_bytes)
      load_weights(sm.router, router_weight + (size_t)blockIdx.x * ROUTER_ROWS * HIDDEN,
                   router_bytes, &sm.bar);
  }
  InputNorm::load_weight(sm.norm, norm_weight);
  const float unit = tid < 64 ? tensor_unit(scale) : 0.f;

  wait_and_trigger();
  InputNorm::run(sm.norm, x, delta, eps, residual, z, T, blockIdx.x < T ? (int)blockIdx.x : -1);
  mbar_wait(&sm.bar, 0, error);
  if (warp < LIVE_WARPS) {
    Activations<NV> b;
    load_tokens_shared<NV>(b, sm.norm.z + min(g, T - 1) * InputNorm::STRIDE, warp * NV, lane);
    Tile tile = zero_tile(), scores = zero_tile();
    if (rows > 0) {
#pragma unroll
      for (int i = 0; i < NV; i++) {
        const bf16* p = sm.router + g * HIDDEN + (warp * NV + i) * VECTOR_K + (lane & 3) * 16;
        const uint4 none = make_uint4(0, 0, 0, 0);
        const uint4 lo = g < rows ? *(const uint4*)p : none,
                    hi = g < rows ? *(const uint4*)(p + 8) : none;
        const u32 w[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
        const Tokens& v = b.v[i];
        const u32 y[8] = {v.lo.x, v.lo.y, v.lo.z, v.lo.w, v.hi.x, v.hi.y, v.hi.z, v.hi.w};
#pragma unroll
        for (int m = 0; m < 4; m++) {
          const u32 a[4] = {w[2 * m], 0, w[2 * m + 1], 0};
          mma_bf16(scores.c[m & 1], a, y[2 * m], y[2 * m + 1]);
        }
      }
    }
    multiply_shared<NV>(tile, sm.weights, b, warp * NV, lane);
    store_tile(sm.partial + warp * TILE_SUMS, tile, lane);
    float* const to = sm.logits + warp * (TILE_SUMS / 2);
    const float low = scores.c[0][0] + scores.c[1][0], high = scores.c[0][1] + scores.c[1][1];
    if (!ONE_TOKEN)
      *(float2*)(to + lane * 2) = make_float2(low, high);
    else if ((lane & 3) == 0)
      to[g] = low;
  }
  __syncthreads();
  const int token = tid & 7;
  if (tid < 64 && token < T) {
    const float* p = sm.partial + (tid >> 3) * TOKEN_COLUMNS + token;
    const float gate = round_bf16(strided_sum<LIVE_WARPS>(p, TILE_SUMS) * unit);
    const float up = round_bf16(strided_sum<LIVE_WARPS>(p + 8 * TOKEN_COLUMNS, TILE_SUMS) * unit);
    hidden[(size_t)token * SHARED_WIDTH + blockIdx.x * 8 + (tid >> 3)] =
        to_bf16(silu_exact(gate) * up);
  } else if (tid >= 64 && tid < 128 && token < T) {
    const int r = (tid - 64) >> 3;
    if (r < rows)
      logits[(size_t)token * EXPERTS + blockIdx.x * ROUTER_ROWS + r] =
          to_bf16(strided_sum<LIVE_WARPS>(sm.logits + r * TOKEN_COLUMNS + token, TILE_SUMS / 2));
  }
}
