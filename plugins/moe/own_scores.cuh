// The router in the launch of the experts: ROUTER_ROWS experts a block, whose scores the blocks
// hand to each other as words (words.cuh), [token][expert]. The sums are those of router.cu, bit by
// bit: of every row ROUTER_THREADS threads share K.
#ifndef INK_MOE_OWN_SCORES_CUH
#define INK_MOE_OWN_SCORES_CUH
#include "router_sums.cuh"
#include "top_k.cuh"
#include "words.cuh"

constexpr int ROUTER_PIECES = (HIDDEN / 4 + ROUTER_THREADS - 1) / ROUTER_THREADS;
constexpr int ROUTER_WARPS = ROUTER_THREADS / 32;
static_assert(EXPERTS % 4 == 0, "whole pieces of four scores");
static_assert(HIDDEN % 4 == 0 && ROUTER_ROWS * ROUTER_THREADS <= WARPS * 32, "a thread for each");

struct OwnScores {
  float sums[ROUTER_ROWS][ROUTER_WARPS][TOKENS];
  u64 bar;
};

// What a thread multiplies: its share of the tokens. One token's comes to registers past the shared
// memory; others stand there in rows `stride` apart.
struct RouterShare {
#if ONE_TOKEN
  uint2 x[ROUTER_PIECES];
  INK_DEVICE void load(const bf16* from) {
    const int i = threadIdx.x % ROUTER_THREADS;
#pragma unroll
    for (int p = 0; p < ROUTER_PIECES; p++) {
      const int piece = p * ROUTER_THREADS + i;
      x[p] = piece < HIDDEN / 4 ? load_act8(from + piece * 4) : make_uint2(0, 0);
    }
  }
  INK_DEVICE uint2 of(int, int p, int) const { return x[p]; }
#else
  const bf16* rows;
  int stride;
  INK_DEVICE uint2 of(int token, int, int piece) const {
    return *(const uint2*)(rows + token * stride + piece * 4);
  }
#endif
};

// Experts of block b: `rows` from `first` on, at most ROUTER_ROWS, none in the last blocks.
INK_DEVICE int first_router_row(int b) { return min(b * ROUTER_ROWS, EXPERTS); }
INK_DEVICE int num_router_rows(int b) { return min(ROUTER_ROWS, EXPERTS - first_router_row(b)); }

// Before the wait: one thread asks for the rows' weights, to `memory`.
INK_DEVICE void request_router(OwnScores& sm, u8* memory, const float* weight, int b) {
  const int rows = num_router_rows(b);
  if (threadIdx.x || rows == 0) return;
  mbar_init(&sm.bar, 1);
  mbar_expect(&sm.bar, rows * HIDDEN * 4);
  bulk_load(memory, weight + (size_t)first_router_row(b) * HIDDEN, rows * HIDDEN * 4, &sm.bar);
}

// The block's scores to `words`, which are all experts'. All threads, behind a block barrier that
// follows `request_router`; contains block barriers, behind the last of which `memory` is free.
INK_DEVICE void send_scores(OwnScores& sm, const u8* memory, const RouterShare& share, float* words,
                            int b, int* error) {
  const int rows = num_router_rows(b), tid = threadIdx.x, lane = tid & 31;
  const int row = tid / ROUTER_THREADS, i = tid % ROUTER_THREADS;
  if (rows == 0) return;
  mbar_wait(&sm.bar, 0, error);
  if (row < rows) {  // whole warps
    const float* const weight = (const float*)memory + row * HIDDEN;
    float sums[MAX_TOKENS] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll ONE_TOKEN ? ROUTER_PIECES : 1
    for (int p = 0; p < ROUTER_PIECES; p++) {
      const int piece = p * ROUTER_THREADS + i;
      if (piece >= HIDDEN / 4) break;
      const float4 w = *(const float4*)(weight + piece * 4);
#pragma unroll
      for (int t = 0; t < TOKENS; t++) {
        const uint2 x = share.of(t, p, piece);
        sums[t] = fmaf(w.x, low_float(x.x), sums[t]);
        sums[t] = fmaf(w.y, high_float(x.x), sums[t]);
        sums[t] = fmaf(w.z, low_float(x.y), sums[t]);
        sums[t] = fmaf(w.w, high_float(x.y), sums[t]);
      }
    }
    const float sum = ONE_TOKEN ? warp_sum(sums[0]) : lane_sums(sums, lane);
    const int token = ONE_TOKEN ? lane : lane / 4;
    if ((ONE_TOKEN || lane % 4 == 0) && token < TOKENS) sm.sums[row][i / 32][token] = sum;
  }
  __syncthreads();
  if (tid < rows * TOKENS) {
    const int of_row = tid / TOKENS, token = tid % TOKENS;
    float logit = 0;
#pragma unroll
    for (int w = 0; w < ROUTER_WARPS; w++) logit += sm.sums[of_row][w][token];
    *(volatile float*)(words + token * EXPERTS + first_router_row(b) + of_row) =
        1.f / (1.f + expf(-logit));
  }
}
// Asks for the words of the block's scores in both slots, so that the L2 has them when they are
// filled and polled: a layer's are not touched again before the next step.
INK_DEVICE void touch_scores(const float* words, int b) {
  const int tid = threadIdx.x, at = tid % TOKENS * EXPERTS + first_router_row(b) + tid / TOKENS;
  if (tid >= num_router_rows(b) * TOKENS) return;
  load_act4(words + at);
  load_act4(words + TOKENS * EXPERTS + at);
}
// The words of the block's scores in the slot that the launch before has used.
INK_DEVICE void empty_scores(float* used, int b) {
  const int rows = num_router_rows(b), tid = threadIdx.x;
  if (tid >= rows * TOKENS) return;
  ((u32*)used)[tid % TOKENS * EXPERTS + first_router_row(b) + tid / TOKENS] = EMPTY;
}

// Four scores, once they are there.
INK_DEVICE uint4 receive4(const float* words, int* error) {
  uint4 v;
  u32 spins = 0;
#pragma unroll 1
  do v = load_inbox16(words);
  while (max(max(v.x, v.y), max(v.z, v.w)) == EMPTY && ++spins < INK_SPIN_LIMIT);
  if (spins == INK_SPIN_LIMIT) report_error(error, ERROR_SENTINEL);
  return v;
}
// Of a lane's experts; `words` are those of the warp's token.
INK_DEVICE PerExpert receive_scores(const float* words, int* error) {
  PerExpert s;
#pragma unroll
  for (int i = 0; i < LANE_EXPERTS; i += 4) {
    if (first_of_lane() + i >= EXPERTS) break;
    const uint4 v = receive4(words + first_of_lane() + i, error);
    s.value[i] = __uint_as_float(v.x), s.value[i + 1] = __uint_as_float(v.y);
    s.value[i + 2] = __uint_as_float(v.z), s.value[i + 3] = __uint_as_float(v.w);
  }
  return s;
}
#endif  // INK_MOE_OWN_SCORES_CUH
