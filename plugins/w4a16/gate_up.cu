// Routed experts' gate, up and activation for one token; more tokens: experts.cu. Top-k from the
// logits, then tiles of 8 gate and 8 up rows, at most TILES a block. WARPS warps split K; DEPTH
// tiles of a warp come into registers, the others into shared memory: none waits for room. An
// expert's weights are requested as soon as its rank is known.
//
// Blocks trigger after their wait whatever TRIGGER says: `down` reads what the router wrote before
// its own wait and relies on the router having ended by then.
#define TRIGGER 1
#include "route.cuh"

constexpr int WARPS = 16, THREADS = WARPS * 32;
constexpr int NV = vectors_per_warp(HIDDEN, WARPS), LIVE_WARPS = HIDDEN / VECTOR_K / NV;
constexpr int TILE_BYTES = tile_bytes(HIDDEN), EXPERT_TILES = WIDTH / 8;
constexpr int NUM_TILES = TOP_K * EXPERT_TILES;
constexpr int STAGED = TILES - DEPTH, SLICE_BYTES = NV * CODE_BYTES;  // of a tile, for a warp
static_assert(STAGED >= 0, "more tiles in registers than there are");
static_assert(STAGED == 0 || WEIGHTS, "a warp's slice of an NVFP4 tile is not contiguous");

struct Shared {
#if TILES > DEPTH
  alignas(128) u8 staged[STAGED][TILE_BYTES];
  u64 full[STAGED][WARPS];
#endif
  alignas(16) float partial[TILES][LIVE_WARPS * TILE_SUMS];
  alignas(16) bf16 z[WARPS][NV * VECTOR_K];  // each warp's slice: registers are for weights
  float scale[EXPERTS];
  int expert[TILES];
};

extern "C" __global__ void __maxnreg__(REGISTERS)
    gate_up(const bf16* z, const bf16* logits, const u8* weights, const float* scales, bf16* hidden,
            int* error) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, stride = gridDim.x;
  const bool live = LIVE_WARPS == WARPS || warp < LIVE_WARPS;
  Fragment<NV> w[DEPTH];
#if TILES > DEPTH
  if (lane < STAGED) mbar_init(&sm.full[lane][warp], 1);
#endif
  if (WEIGHTS == 0)
    for (int e = tid; e < EXPERTS; e += THREADS) copy_async4(sm.scale + e, scales + e);
  wait_and_trigger();
  // Before the weights: small loads queue behind large ones.
  const uint4 bits = load_logits(logits, lane);
  bf16* const slice = sm.z[warp];
  constexpr int PIECES = NV * VECTOR_K / 8;  // of 16 bytes
  for (int i = lane; live && i < PIECES; i += 32)
    *(uint4*)(slice + i * 8) = load_act16(z + (warp * PIECES + i) * 8);
  __syncwarp();
  Keys keys = keys_of(bits, lane);
  u32 best = 0;
  int known = 0;
  auto find = [&](int d) {  // tile d, which must be there
    const int i = blockIdx.x + d * stride;
#pragma unroll 1
    for (; known <= i / EXPERT_TILES; known++) best = take_largest(keys);
    const int expert = expert_of(best);
    sm.expert[d] = expert;  // from every thread, all the same
    return weights + ((size_t)expert * EXPERT_TILES + i % EXPERT_TILES) * TILE_BYTES;
  };
#pragma unroll
  for (int d = 0; d < DEPTH; d++) {
    if (blockIdx.x + d * stride >= NUM_TILES) break;
    const u8* const tile = find(d);
    if (live) load_fragment<NV>(w[d], tile, warp * NV, lane);
  }
#if TILES > DEPTH
#pragma unroll
  for (int d = DEPTH; d < TILES; d++) {
    if (blockIdx.x + d * stride >= NUM_TILES) break;
    const u8* const tile = find(d);
    if (!live || lane != 0) continue;
    u64* const full = &sm.full[d - DEPTH][warp];
    mbar_expect(full, SLICE_BYTES);
    load_weights(sm.staged[d - DEPTH] + warp * SLICE_BYTES, tile + warp * SLICE_BYTES, SLICE_BYTES,
                 full);
  }
#endif
#pragma unroll
  for (int d = 0; d < DEPTH; d++) {
    if (!live || blockIdx.x + d * stride >= NUM_TILES) break;
    Tile tile = zero_tile();
#pragma unroll
    for (int v = 0; v < NV; v++) {
      Activations<1> b;  // the token in every column
      load_tokens_shared<1>(b, slice, v, lane);
      multiply(tile, w[d].codes[v], w[d].scale(v), b.v[0]);
    }
    store_tile(sm.partial[d] + warp * TILE_SUMS, tile, lane);
  }
#if TILES > DEPTH
#pragma unroll
  for (int d = DEPTH; d < TILES; d++) {
    if (!live || blockIdx.x + d * stride >= NUM_TILES) break;
    Tile tile = zero_tile();
    mbar_wait(&sm.full[d - DEPTH][warp], 0, error);
#pragma unroll
    for (int v = 0; v < NV; v++) {
      Activations<1> b;
      load_tokens_shared<1>(b, slice, v, lane);
      multiply_shared<1>(tile, sm.staged[d - DEPTH], b, warp * NV + v, lane);
    }
    store_tile(sm.partial[d] + warp * TILE_SUMS, tile, lane);
  }
#endif
  copy_async_wait();  // the scales
  __syncthreads();
  const int d = tid >> 6, i = blockIdx.x + d * stride;
  if (d < TILES && (tid & 7) == 0 && i < NUM_TILES) {
    const float* const partial = sm.partial[d] + (tid & 63) / 8 * TOKEN_COLUMNS;
    const float unit = WEIGHTS ? 1.f : sm.scale[sm.expert[d]] * UNIT;
    const float gate = strided_sum<LIVE_WARPS>(partial, TILE_SUMS) * unit;
    const float up = strided_sum<LIVE_WARPS>(partial + 8 * TOKEN_COLUMNS, TILE_SUMS) * unit;
    hidden[i * 8 + ((tid & 63) >> 3)] = to_bf16(silu_approx(gate) * up);
  }
}
