// Routed and shared experts' down projection, weighted sum and final addition; T = 1..8 tokens. One
// row tile of 16 rows a block. A job is one expert's (or WIDTH of the shared expert's) K; warp w
// takes jobs w, w + 8, ...; DEPTH jobs of a warp live in registers. Launched right after `gate_up`,
// which see: the routing and the weights come before the wait.
#include "route.cuh"

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int NV = WIDTH / VECTOR_K, JOB_BYTES = tile_bytes(WIDTH), ROW_TILES = HIDDEN / 16;
constexpr int SHARED_JOBS = SHARED_WIDTH / WIDTH;
static_assert(SHARED_WIDTH % WIDTH == 0, "the shared expert is a multiple of a routed one");

struct Shared {
  alignas(16) float partial[SHARED_JOBS + SLOTS][128];
  Route route;
  float unit[MAX_TOKENS][8];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    down(const bf16* logits, const bf16* hidden, const bf16* shared_hidden, const u8* weights,
         const float* scales, const u8* shared_weights, const float* shared_scale, bf16* out,
         int num_rows) {
  const int T = ONE_TOKEN ? 1 : num_rows;
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2;
  trigger_first();
  Fragment<NV> w[DEPTH];
  const u8* shared_tile = shared_weights + (size_t)blockIdx.x * SHARED_JOBS * JOB_BYTES;
#pragma unroll
  for (int d = 0; d < DEPTH; d++) {
    const int job = warp + d * WARPS;
    if (job < SHARED_JOBS) load_fragment<NV>(w[d], shared_tile + job * JOB_BYTES, 0, lane);
  }
  const RouteView view = route<true>(logits, T, sm.route);
  const int num_jobs = SHARED_JOBS + view.num_experts;
  auto tile_of = [&](int job) {
    if (job < SHARED_JOBS) return shared_tile + job * JOB_BYTES;
    return weights + ((size_t)view.expert[job - SHARED_JOBS] * ROW_TILES + blockIdx.x) * JOB_BYTES;
  };
#pragma unroll
  for (int d = 0; d < DEPTH; d++) {
    const int job = warp + d * WARPS;
    if (job >= SHARED_JOBS && job < num_jobs) load_fragment<NV>(w[d], tile_of(job), 0, lane);
  }
  // For one token warp 0 alone knows the choice here; for more, all threads do.
  float unit = 0, shared_unit = 0;
  const int slot = tid < T * TOP_K ? tid : 0;
  int* const chosen = &sm.route.chosen[slot / TOP_K][slot % TOP_K];
  if (tid < T * TOP_K) unit = tensor_unit(scales + *chosen);
  if (tid < 128) shared_unit = tensor_unit(shared_scale);
  if (tid < T * TOP_K) sm.unit[slot / TOP_K][slot % TOP_K] = unit;

  wait_and_trigger();
  for (int base = warp; base < num_jobs; base += DEPTH * WARPS) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      const int job = base + d * WARPS;
      if (job < num_jobs) {
        const bf16* x = nullptr;
        if (job < SHARED_JOBS) {
          if (g < T) x = shared_hidden + (size_t)g * SHARED_WIDTH + job * WIDTH;
        } else {
          const int k = view.rank[job - SHARED_JOBS][g];
          if (k != NO_RANK) x = hidden + ((size_t)g * TOP_K + k) * WIDTH;
        }
        Activations<NV> b;
        load_tokens<NV>(b, x, 0, lane);
        Tile halves[2] = {zero_tile(), zero_tile()};
        multiply_fragment<NV>(halves, w[d], b);
        const int next = job + DEPTH * WARPS;
        if (next < num_jobs) load_fragment<NV>(w[d], tile_of(next), 0, lane);
        store_tile(sm.partial[job], halves, lane);
      }
    }
  }
  __syncthreads();
  const int row = blockIdx.x * 16 + (tid >> 3), token = tid & 7;
  if (tid < 128 && token < T) {
    float routed = 0;
#pragma unroll
    for (int k = 0; k < TOP_K; k++) {
      const float y = sm.partial[SHARED_JOBS + sm.route.index[token][k]][tid] * sm.unit[token][k];
      routed = fmaf(sm.route.weight[token][k], round_bf16(y), routed);  // the product is exact
    }
    float shared = 0;
#pragma unroll
    for (int j = 0; j < SHARED_JOBS; j++) shared += sm.partial[j][tid];
    shared = round_bf16(shared * shared_unit);
    out[(size_t)token * HIDDEN + row] = to_bf16(round_bf16(routed) + shared);
  }
}
