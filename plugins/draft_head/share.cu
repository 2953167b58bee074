// Between the logits of a row of `draft_head` and its token, on several ranks: each has the logits
// of its own tokens, and all learn the best of every rank. Where filters need all logits of the
// row, or somebody reads them, they are exchanged too.
//
// Ranks have the same request, so all of them exchange the same.
//
// Macros: see head.cuh; RANKS, DRAFTED (tokens of a rank, a multiple of four), TOTAL (tokens that
// can be drafted), TRIMMED (tokens are i + d2t[i]), THREADS.
#include "../all_reduce/lamport.cuh"
#include "../w4a16/choice.cuh"
#include "head.cuh"

constexpr u32 QUADS = DRAFTED / 4;
constexpr int WARPS = THREADS / 32;
static_assert(DRAFTED % 4 == 0, "logits are exchanged in vectors of four");

struct Shared {
  BestOf<WARPS> candidates;
  u64 drawn[WARPS];
};

// This rank's candidate, for every thread: largest logit, its token, score and token of the draw.
INK_DEVICE uint4 candidate(Shared& sm, const float* best, const int* best_row, const u64* drawn,
                           int count) {
  const Choice largest = sm.candidates.run(best, best_row, count);
  u64 chosen = 0;
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const uint2 words = load_act8(drawn + i);
    chosen = max(chosen, (u64)words.y << 32 | words.x);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) chosen = max(chosen, __shfl_xor_sync(INK_FULL_WARP, chosen, o));
  if (threadIdx.x % 32 == 0) sm.drawn[threadIdx.x / 32] = chosen;
  __syncthreads();
#pragma unroll
  for (int q = 0; q < WARPS; q++) chosen = max(chosen, sm.drawn[q]);
  // Tokens as they are, not inverted: no word is the empty pattern but that of a NaN.
  const u32 token = chosen ? ~(u32)chosen : 0;
  return make_uint4(__float_as_uint(largest.value), (u32)largest.row, (u32)(chosen >> 32), token);
}

// best, best_row, drawn [count] and own [DRAFTED]: of `head_logits`. Of ranks: [RANKS].
extern "C" __global__ void __launch_bounds__(THREADS)
    share_row(const float* best, const int* best_row, const u64* drawn, const float* own,
              const int* d2t, const float* temperature, const int* top_k, const float* top_p,
              const float* min_p, const u64* seed, const int* position, const int* is_coupled,
              const int* wants_logits, float* logits, float* best_of_ranks, int* row_of_ranks,
              u64* drawn_of_ranks, const Peers* peers, int* error, int count, int row) {
  __shared__ Shared sm;
  Exchange exchange(peers, error);
  const u32 first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
  if (threadIdx.x == 0) pdl_trigger();
  const Draw request(temperature, top_k, top_p, min_p, seed, position, is_coupled, row);
  const bool has_logits = request.is_filtered() || load_act_int(wants_logits) != 0;
  pdl_wait();
  exchange.begin();
  uint4 mine = make_uint4(0, 0, 0, 0);
  if (blockIdx.x == 0) mine = candidate(sm, best, best_row, drawn, count);
  exchange.ready();
  if (first == 0) exchange.send16(0, mine);
  if (has_logits)
    for (u32 q = first; q < QUADS; q += step) exchange.send16(16 + q * 16, load_act16(own + q * 4));
  exchange.clear(first, step);
  __syncthreads();
  exchange.end(has_logits ? 16 + QUADS * 16 : 16, gridDim.x, THREADS);
  if (first == 0) {
    uint4 parts[RANKS];
    exchange.receive16(0, mine, parts);
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      best_of_ranks[r] = __uint_as_float(parts[r].x);
      row_of_ranks[r] = (int)parts[r].y;
      drawn_of_ranks[r] = (u64)parts[r].z << 32 | ~parts[r].w;
    }
  }
  if (!has_logits) return;
  for (u32 q = first; q < QUADS; q += step) {
    uint4 parts[RANKS];
    exchange.receive16(16 + q * 16, load_act16(own + q * 4), parts);
#pragma unroll
    for (u32 r = 0; r < RANKS; r++) {
      const u32 words[4] = {parts[r].x, parts[r].y, parts[r].z, parts[r].w};
#pragma unroll
      for (u32 k = 0; k < 4; k++) {
        const u32 i = r * DRAFTED + q * 4 + k;
        if (i >= TOTAL) continue;
        const u32 token = TRIMMED ? i + load_weight4(d2t + i) : i;
        logits[(size_t)row * VOCAB + token] = __uint_as_float(words[k]);
      }
    }
  }
}
