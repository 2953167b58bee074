// Routed experts (gate, up, activation, down), the shared expert's down projection and their sum,
// for T = 2..8 tokens in one launch. Every weight is read once for all tokens that chose its
// expert.
//
// First come tiles of 8 gate and 8 up rows of the distinct experts, dealt out to the blocks; the
// warps of a block split K. Then blocks own a row tile of 16 rows of the output each, of which a
// warp's job is one expert's (or WIDTH of the shared expert's) K. Every block needs all
// activations, so in between all wait for all: BLOCKS must fit the GPU at once. Each warp's weights
// come through a ring of its own, in the order of its work, so those of the second part arrive
// while it waits.
//
// Bits are those of gate_up.cu and down.cu, which serve one token.
#include "ring.cuh"
#include "route.cuh"

constexpr int WARPS = 16, THREADS = WARPS * 32;
constexpr int NV = vectors_per_warp(HIDDEN, WARPS), LIVE_WARPS = HIDDEN / VECTOR_K / NV;
using WarpSlice = Slice<WEIGHTS || NV % 2 ? 1 : 2>;
constexpr int TILE_BYTES = tile_bytes(HIDDEN), EXPERT_TILES = WIDTH / 8;
constexpr int TILE_SLICES = NV / WarpSlice::VECTORS;
constexpr int JOB_VECTORS = WIDTH / VECTOR_K, JOB_BYTES = tile_bytes(WIDTH);
constexpr int JOB_SLICES = JOB_VECTORS / WarpSlice::VECTORS;
constexpr int ROW_TILES = HIDDEN / 16, SHARED_JOBS = SHARED_WIDTH / WIDTH;
constexpr int ROUND = 4;  // tiles from barrier to barrier; there are two sets of partial sums
static_assert(JOB_VECTORS % CHUNK_VECTORS == 0, "a job is whole chunks");
static_assert(SHARED_WIDTH % WIDTH == 0, "the shared expert is a multiple of a routed one");
static_assert(ROW_TILES <= BLOCKS, "a block for each row tile");
static_assert(ROUND * 64 <= THREADS, "a thread for each element of a round");

struct Down {
  alignas(16) bf16 hidden[SLOTS][WIDTH + 8];  // padded: rows start in different banks
  alignas(16) float partial[SHARED_JOBS + SLOTS][128];
};
struct Shared {
  alignas(128) u8 ring[WARPS][STAGES * WarpSlice::BYTES];
  union {
    alignas(16) float partial[2][ROUND][LIVE_WARPS * 128];
    Down down;
  };
  Route route;
  float unit[MAX_TOKENS][8];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    experts(const bf16* z, const bf16* logits, const bf16* shared_hidden, const u8* gate_up,
            const float* gate_up_scale, const u8* down, const float* down_scale,
            const u8* shared_down, const float* shared_scale, bf16* hidden, bf16* out,
            u64* arrivals, int* error, int T) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, b = blockIdx.x;
  const bool live = LIVE_WARPS == WARPS || warp < LIVE_WARPS;
  wait_and_trigger();
  Activations<NV> x;
  load_tokens<NV>(x, live && g < T ? z + (size_t)g * HIDDEN : nullptr, warp * NV, lane);
  const Route& choice = sm.route;
  route(logits, T, sm.route);

  // This block's tiles are b + BLOCKS n. A warp's jobs are counted from the last one, as the first
  // ones finish tiles.
  const int num_tiles = choice.num_experts * EXPERT_TILES;
  const int my_tiles = (max(num_tiles - b, 0) + BLOCKS - 1) / BLOCKS;
  const int num_jobs = b < ROW_TILES ? SHARED_JOBS + choice.num_experts : 0;
  const int first_job = WARPS - 1 - warp, first_slices = live ? my_tiles * TILE_SLICES : 0;
  Ring<WarpSlice> ring = {sm.ring[warp], lane};
  auto request = [&]() {
    int slice = ring.requested;
    const u8* tile = nullptr;
    if (slice < first_slices) {
      const int i = b + slice / TILE_SLICES * BLOCKS;
      tile = gate_up + ((size_t)choice.expert[i / EXPERT_TILES] * EXPERT_TILES + i % EXPERT_TILES) *
                           TILE_BYTES;
      slice = warp * TILE_SLICES + slice % TILE_SLICES;
    } else {
      slice -= first_slices;
      const int job = first_job + slice / JOB_SLICES * WARPS;
      if (job < min(SHARED_JOBS, num_jobs))
        tile = shared_down + ((size_t)b * SHARED_JOBS + job) * JOB_BYTES;
      else if (job < num_jobs)
        tile = down + ((size_t)choice.expert[job - SHARED_JOBS] * ROW_TILES + b) * JOB_BYTES;
      slice %= JOB_SLICES;
    }
    ring.request(tile, slice * WarpSlice::VECTORS);
  };
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) request();

  // For later.
  float unit = 0, shared_unit = 0;
  const int slot = tid < T * TOP_K ? tid : 0;
  if (tid < T * TOP_K) unit = tensor_unit(down_scale + choice.chosen[slot / TOP_K][slot % TOP_K]);
  if (tid < 128) shared_unit = tensor_unit(shared_scale);
  if (tid < T * TOP_K) sm.unit[slot / TOP_K][slot % TOP_K] = unit;

  // ---- gate, up and activation ----
#pragma unroll 1
  for (int first = 0, round = 0; first < my_tiles; first += ROUND, round ^= 1) {
    // A thread's element of the round: its tile, row and token.
    const int d = tid >> 6, token = tid & 7, i = b + (first + d) * BLOCKS, u = i / EXPERT_TILES;
    const bool is_mine = d < ROUND && first + d < my_tiles;
    const int k = is_mine ? choice.rank[u][token] : NO_RANK;
    float scale = 0;
    if (k != NO_RANK) scale = tensor_unit(gate_up_scale + choice.expert[u]);
    if (live)
#pragma unroll 1
      for (int n = 0; n < min(ROUND, my_tiles - first); n++) {
        Tile tile = zero_tile();
#pragma unroll
        for (int v = 0; v < NV; v += WarpSlice::VECTORS) {
          const u8* const stage = ring.wait();
          Activations<WarpSlice::VECTORS> part;
#pragma unroll
          for (int j = 0; j < WarpSlice::VECTORS; j++) part.v[j] = x.v[v + j];
          WarpSlice::multiply(tile, stage, warp * NV + v, part, lane);
          request();
        }
        store_tile(sm.partial[round][n] + warp * 128, tile, lane);
      }
    __syncthreads();
    if (k != NO_RANK) {
      const float* const partial = sm.partial[round][d] + (tid & 63);
      const float gate = strided_sum<LIVE_WARPS>(partial, 128) * scale;
      const float up = strided_sum<LIVE_WARPS>(partial + 64, 128) * scale;
      hidden[((size_t)token * TOP_K + k) * WIDTH + i % EXPERT_TILES * 8 + ((tid & 63) >> 3)] =
          to_bf16(silu_approx(gate) * up);
    }
  }
  __syncthreads();
  u64 all = 0;
  if (tid == 0) all = (arrive(arrivals) / BLOCKS + 1) * BLOCKS;  // every launch adds BLOCKS
  if (b >= ROW_TILES) return;

  // ---- down ----
  auto work = [&](int job, const bf16* y, bool is_shared) {  // y: this lane's token
    Tile halves[2] = {zero_tile(), zero_tile()};
#pragma unroll
    for (int v = 0; v < JOB_VECTORS; v += WarpSlice::VECTORS) {
      Activations<WarpSlice::VECTORS> part;
      if (is_shared)
        load_tokens_shared<WarpSlice::VECTORS>(part, y, v, lane);
      else
        load_tokens<WarpSlice::VECTORS>(part, y, v, lane);
      const u8* const stage = ring.wait();
      WarpSlice::multiply(halves[2 * v / JOB_VECTORS], stage, v, part, lane);
      request();
    }
    store_tile(sm.down.partial[job], halves, lane);
  };
  int job = first_job;
#pragma unroll 1
  for (; job < SHARED_JOBS; job += WARPS)
    work(job, g < T ? shared_hidden + (size_t)g * SHARED_WIDTH + job * WIDTH : nullptr, false);
  if (tid == 0) {
    u32 spins = 0;
    while (load_arrivals(arrivals) < all && spins < INK_SPIN_LIMIT) spins++;
    if (spins == INK_SPIN_LIMIT) report_error(error, ERROR_SENTINEL);
  }
  __syncthreads();
  constexpr int PIECES = WIDTH / 8;  // of a row, 16 bytes each
  for (int i = tid; i < T * TOP_K * PIECES; i += THREADS)
    *(uint4*)(sm.down.hidden[i / PIECES] + i % PIECES * 8) = load_act16(hidden + i * 8);
  __syncthreads();
#pragma unroll 1
  for (; job < num_jobs; job += WARPS) {
    const int k = choice.rank[job - SHARED_JOBS][g];  // columns of other tokens are not read
    work(job, sm.down.hidden[k == NO_RANK ? 0 : g * TOP_K + k], true);
  }
  __syncthreads();
  const int row = b * 16 + (tid >> 3), token = tid & 7;
  if (tid < 128 && token < T) {
    float routed = 0;
#pragma unroll
    for (int k = 0; k < TOP_K; k++) {
      const int of_token = SHARED_JOBS + choice.index[token][k];
      const float y = sm.down.partial[of_token][tid] * sm.unit[token][k];
      routed = fmaf(choice.weight[token][k], round_bf16(y), routed);  // the product is exact
    }
    float shared = 0;
#pragma unroll
    for (int j = 0; j < SHARED_JOBS; j++) shared += sm.down.partial[j][tid];
    shared = round_bf16(shared * shared_unit);
    out[(size_t)token * HIDDEN + row] = to_bf16(round_bf16(routed) + shared);
  }
}
