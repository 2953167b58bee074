// Routed experts' gate, up and activation for T = 1..8 tokens: top-k from the logits, then 8 gate
// and 8 up rows a tile over the distinct experts, each read once. Eight warps split K; DEPTH tiles
// of a warp live in registers, and a slot is refilled as soon as it is used.
//
// Blocks trigger after their wait whatever TRIGGER says: `down` reads the logits before its own
// wait and relies on the router having ended by then.
#define TRIGGER 1
#include "route.cuh"

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int NV = vectors_per_warp(HIDDEN, WARPS), LIVE_WARPS = HIDDEN / VECTOR_K / NV;
constexpr int TILE_BYTES = tile_bytes(HIDDEN), EXPERT_TILES = WIDTH / 8;

struct Shared {
  alignas(16) float partial[2][DEPTH]
                           [LIVE_WARPS * 128];  // two rounds, so one barrier a round is enough
  Route route;
  float unit[SLOTS];
  float solo_unit[WARPS][8];
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    gate_up(const bf16* z, const bf16* logits, const u8* weights, const float* scales, bf16* hidden,
            int T) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, stride = gridDim.x;
  const bool live = warp < LIVE_WARPS;
  wait_and_trigger();
  Activations<NV> b;  // before the weights: small loads queue behind large ones
  load_tokens<NV>(b, live && g < T ? z + (size_t)g * HIDDEN : nullptr, warp * NV, lane);
  const RouteView view = route(logits, T, sm.route);
  const int num_tiles = view.num_experts * EXPERT_TILES;
  float* units = T == 1 ? sm.solo_unit[warp] : sm.unit;
  const int mine = T == 1 ? lane : tid;
  float unit = 0;
  if (mine < view.num_experts) unit = tensor_unit(scales + view.expert[mine]);

  auto tile_at = [&](int i) {
    return weights +
           ((size_t)view.expert[i / EXPERT_TILES] * EXPERT_TILES + i % EXPERT_TILES) * TILE_BYTES;
  };
  Fragment<NV> w[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; d++) {
    const int i = blockIdx.x + d * stride;
    if (live && i < num_tiles) load_fragment<NV>(w[d], tile_at(i), warp * NV, lane);
  }
  if (mine < view.num_experts) units[mine] = unit;
  __syncwarp();

  int round = 0;
  for (int base = blockIdx.x; base < num_tiles; base += DEPTH * stride, round ^= 1) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      const int i = base + d * stride;
      if (live && i < num_tiles) {
        Tile tile = zero_tile();
        multiply_fragment<NV>(tile, w[d], b);
        const int next = i + DEPTH * stride;
        if (next < num_tiles) load_fragment<NV>(w[d], tile_at(next), warp * NV, lane);
        store_tile(sm.partial[round][d] + warp * 128, tile, lane);
      }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < (DEPTH * 64 + THREADS - 1) / THREADS; j++) {
      const int o = tid + j * THREADS, d = o >> 6, token = o & 7, i = base + d * stride;
      if (d < DEPTH && i < num_tiles) {
        const int u = i / EXPERT_TILES, k = view.rank[u][token];
        if (k != NO_RANK) {
          const float* p = sm.partial[round][d] + (o & 63);
          const float gate = strided_sum<LIVE_WARPS>(p, 128) * units[u];
          const float up = strided_sum<LIVE_WARPS>(p + 64, 128) * units[u];
          hidden[((size_t)token * TOP_K + k) * WIDTH + i % EXPERT_TILES * 8 + ((o & 63) >> 3)] =
              to_bf16(silu_approx(gate) * up);
        }
      }
    }
  }
}
