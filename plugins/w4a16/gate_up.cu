// Routed experts' gate, up and activation for T = 1..8 tokens: top-k from the logits, then 8 gate
// and 8 up rows a tile over the distinct experts, each read once. WARPS warps split K; DEPTH tiles
// of a warp live in registers, and a slot is refilled as soon as it is used. One token: all tiles
// fit at once, and an expert's weights are requested as soon as its rank is known.
//
// Blocks trigger after their wait whatever TRIGGER says: `down` reads the logits before its own
// wait and relies on the router having ended by then.
#define TRIGGER 1
#include "route.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int NV = vectors_per_warp(HIDDEN, WARPS), LIVE_WARPS = HIDDEN / VECTOR_K / NV;
constexpr int TILE_BYTES = tile_bytes(HIDDEN), EXPERT_TILES = WIDTH / 8;
constexpr int ROUNDS = ONE_TOKEN ? 1 : 2;  // two rounds, so one barrier a round is enough

struct Shared {
  alignas(16) float partial[ROUNDS][DEPTH][LIVE_WARPS * 128];
  float scale[EXPERTS];
#if ONE_TOKEN
  int expert[DEPTH];
#else
  Route route;
#endif
};

INK_DEVICE float unit_of(const Shared& sm, int expert) {
  return WEIGHTS ? 1.f : sm.scale[expert] * UNIT;
}
// An element of bf16(silu(gate) up) from a tile's partial sums.
INK_DEVICE bf16 activation(const float* partial, float unit) {
  const float gate = strided_sum<LIVE_WARPS>(partial, 128) * unit;
  const float up = strided_sum<LIVE_WARPS>(partial + 64, 128) * unit;
  return to_bf16(silu_approx(gate) * up);
}

extern "C" __global__ void __maxnreg__(REGISTERS)
    gate_up(const bf16* z, const bf16* logits, const u8* weights, const float* scales, bf16* hidden,
            int num_rows) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, stride = gridDim.x;
  const bool live = LIVE_WARPS == WARPS || warp < LIVE_WARPS;
  auto tile_of = [&](int expert, int i) {
    return weights + ((size_t)expert * EXPERT_TILES + i % EXPERT_TILES) * TILE_BYTES;
  };
  Fragment<NV> w[DEPTH];
  Activations<NV> b;
  if (WEIGHTS == 0)
    for (int e = tid; e < EXPERTS; e += THREADS) copy_async4(sm.scale + e, scales + e);
  wait_and_trigger();
#if ONE_TOKEN
  // Before the weights: small loads queue behind large ones.
  const uint4 bits = load_logits(logits, lane);
  load_tokens<NV>(b, live ? z : nullptr, warp * NV, lane);  // into every column
  Keys keys = keys_of(bits, lane);
  u32 best = 0;
  int known = 0;
#pragma unroll
  for (int d = 0; d < DEPTH; d++) {
    const int i = blockIdx.x + d * stride;
    if (i < TOP_K * EXPERT_TILES) {
#pragma unroll 1
      for (; known <= i / EXPERT_TILES; known++) best = take_largest(keys);
      const int expert = expert_of(best);
      sm.expert[d] = expert;  // from every thread, all the same
      if (live) load_fragment<NV>(w[d], tile_of(expert, i), warp * NV, lane);
    }
  }
#pragma unroll
  for (int d = 0; d < DEPTH; d++)
    if (live && blockIdx.x + d * stride < TOP_K * EXPERT_TILES) {
      Tile tile = zero_tile();
      multiply_fragment<NV>(tile, w[d], b);
      store_tile(sm.partial[0][d] + warp * 128, tile, lane);
    }
  copy_async_wait();  // the scales
  __syncthreads();
  const int d = tid >> 6, i = blockIdx.x + d * stride;
  if (d < DEPTH && (tid & 7) == 0 && i < TOP_K * EXPERT_TILES) {
    hidden[i * 8 + ((tid & 63) >> 3)] =
        activation(sm.partial[0][d] + (tid & 63), unit_of(sm, sm.expert[d]));
  }
#else
  load_tokens<NV>(b, live && g < num_rows ? z + (size_t)g * HIDDEN : nullptr, warp * NV, lane);
  const RouteView view = route<false>(logits, num_rows, sm.route);
  const int num_tiles = view.num_experts * EXPERT_TILES;
#pragma unroll
  for (int d = 0; d < DEPTH; d++) {
    const int i = blockIdx.x + d * stride;
    if (live && i < num_tiles)
      load_fragment<NV>(w[d], tile_of(view.expert[i / EXPERT_TILES], i), warp * NV, lane);
  }

  int round = 0;
  for (int base = blockIdx.x; base < num_tiles; base += DEPTH * stride, round ^= 1) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      const int i = base + d * stride;
      if (live && i < num_tiles) {
        Tile tile = zero_tile();
        multiply_fragment<NV>(tile, w[d], b);
        const int next = i + DEPTH * stride;
        if (next < num_tiles)
          load_fragment<NV>(w[d], tile_of(view.expert[next / EXPERT_TILES], next), warp * NV, lane);
        store_tile(sm.partial[round][d] + warp * 128, tile, lane);
      }
    }
    copy_async_wait();  // the scales
    __syncthreads();
#pragma unroll
    for (int j = 0; j < (DEPTH * 64 + THREADS - 1) / THREADS; j++) {
      const int o = tid + j * THREADS, d = o >> 6, token = o & 7, i = base + d * stride;
      if (d < DEPTH && i < num_tiles) {
        const int u = i / EXPERT_TILES, k = view.rank[u][token];
        if (k != NO_RANK)
          hidden[((size_t)token * TOP_K + k) * WIDTH + i % EXPERT_TILES * 8 + ((o & 63) >> 3)] =
              activation(sm.partial[round][d] + (o & 63), unit_of(sm, view.expert[u]));
      }
    }
  }
#endif
}
