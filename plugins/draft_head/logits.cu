// Row k of `draft_head`: logits of all tokens that can be drafted, and of each block's tokens the
// largest and, where no filter needs all of them first, the one that the draw would take.
//
// A warp has tiles of 32 rows of the second table: eight lanes a row, four rows at a time, and in
// the end a token a lane. The first rows are requested before the wait.
//
// Macros: see head.cuh; DRAFTED (rows of the table), TOTAL (tokens that can be drafted), RANKS,
// each of which has DRAFTED of them, TRIMMED (tokens are i + d2t[i]), BASE_DRAFTED (columns of the
// base logits are rows of the table), BASE_STRIDE, BASE_FLOAT32, SOFTCAP (0 none, 1 before the
// bias, 2 behind it), BLOCKS, LOGITS_WARPS.
#if RANKS > 1
#include "../all_reduce/lamport.cuh"
#endif
#include "../w4a16/choice.cuh"
#include "head.cuh"

constexpr int WARPS = LOGITS_WARPS, TILES = (DRAFTED + 31) / 32, CHUNKS = RANK / 64;
constexpr int AT_ONCE = CHUNKS == 1 ? 8 : CHUNKS == 2 ? 4 : 2;  // steps of four rows
static_assert(RANK % 64 == 0 && RANK <= 256, "eight lanes a row");

struct Shared {
  u64 drawn[WARPS];
  float best[WARPS];
  int row[WARPS];
};
typedef uint4 Rows[AT_ONCE][CHUNKS];

INK_DEVICE void load_rows(Rows& w, const bf16* table, int tile, int step) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < AT_ONCE; j++) {
    const int row = min(tile * 32 + 4 * (step + j) + lane / 8, DRAFTED - 1);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
      w[j][i] = load_weight16(table + (size_t)row * RANK + 64 * i + lane % 8 * 8);
  }
}

// Sums over the eight lanes of a row, of which lane l keeps that of step l % 8.
INK_DEVICE float sum_of_step(float (&sums)[8]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 4; half; half /= 2) {
    const bool is_upper = lane & half;
#pragma unroll
    for (int i = 0; i < half; i++) {
      const float keep = is_upper ? sums[i + half] : sums[i];
      const float send = is_upper ? sums[i] : sums[i + half];
      sums[i] = keep + __shfl_xor_sync(INK_FULL_WARP, send, half);
    }
  }
  return sums[0];
}

INK_DEVICE float base_logit(const void* base, size_t at) {
  if (BASE_FLOAT32) return load_act_float((const float*)base + at);
  const u32 pair = load_act4((const u32*)base + at / 2);
  return at % 2 ? high_float(pair) : low_float(pair);
}

// Bits that order scores: -0 equals 0, and NaN is the largest. They are not what inboxes hold while
// they are empty.
INK_DEVICE u32 order_of(float x) {
  if (x != x) return 0xFFFFFFFEu;
  const u32 bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// z: of `next_row`. logits [GROUP][VOCAB], or [DRAFTED] of this row and rank where there are
// several. best, best_row, drawn [BLOCKS]: the largest logit and its token; the largest score and,
// inverted, its token. peers: with several ranks.
extern "C" __global__ void __maxnreg__(128)
    head_logits(const void* base, const bf16* table, const float* z_of_row, const int* d2t,
                const float* temperature, const int* top_k, const float* top_p, const float* min_p,
                const u64* seed, const int* position, const int* is_coupled, float* logits,
                float* best, int* best_row, u64* drawn, const void* peers, float softcap,
                float divisor, int row) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int first = warp * BLOCKS + blockIdx.x;
  if (thread == 0) pdl_trigger();
  Rows w;
  if (first < TILES) load_rows(w, table, first, 0);
#if RANKS > 1
  const int before = (int)((const Peers*)peers)->rank * DRAFTED;
#else
  const int before = 0;
#endif
  const int live = min(max(TOTAL - before, 0), DRAFTED);  // the last ranks may have fewer
  const Draw draw(temperature, top_k, top_p, min_p, seed, position, is_coupled, row);
  const bool draws = draw.temperature != 0 && !draw.is_filtered();
  pdl_wait();
  float z[CHUNKS][8];
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const float* from = z_of_row + 64 * i + lane % 8 * 8;
    as_floats8(z[i], load_act16(from), load_act16(from + 4));
  }
  Choice largest = least_choice(0x7FFFFFFF);
  u64 chosen = 0;
#pragma unroll 1
  for (int tile = first; tile < TILES; tile += WARPS * BLOCKS) {
    const int i = tile * 32 + lane % 8 * 4 + lane / 8;
    const bool is_row = i < live;
    const int drafted = before + i;
    const int token = is_row ? TRIMMED ? drafted + (int)load_weight4(d2t + drafted) : drafted : 0;
    const size_t at = (size_t)row * BASE_STRIDE + (BASE_DRAFTED ? i : token);
    float x = is_row ? base_logit(base, at) : 0.f;
    float sums[8];
#pragma unroll
    for (int step = 0; step < 8; step += AT_ONCE) {
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        float sum = 0.f, y[8];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
          unpack8(y, w[j][c]);
#pragma unroll
          for (int e = 0; e < 8; e++) sum = fmaf(z[c][e], y[e], sum);
        }
        sums[step + j] = sum;
      }
      if (step + AT_ONCE < 8)
        load_rows(w, table, tile, step + AT_ONCE);
      else if (tile + WARPS * BLOCKS < TILES)
        load_rows(w, table, tile + WARPS * BLOCKS, 0);
    }
    const float bias = sum_of_step(sums);
    x = x / divisor;
    if (SOFTCAP == 1) x = softcap * tanhf(x / softcap);
    x = x + bias;
    if (SOFTCAP == 2) x = softcap * tanhf(x / softcap);
    if (!is_row) continue;
    if (RANKS > 1)
      logits[i] = x;
    else
      logits[(size_t)row * VOCAB + token] = x;
    keep_better(largest, x, token);
    if (draws) {
      const uint4 bits = draw.bits(token / 4);
      const u32 low = token & 1 ? bits.y : bits.x, high = token & 1 ? bits.w : bits.z;
      const float score = x / draw.temperature + gumbel(token & 2 ? high : low);
      chosen = max(chosen, (u64)order_of(score) << 32 | ~(u32)token);
    }
  }
  keep_best_of_warp<1>(largest);
#pragma unroll
  for (int o = 16; o; o >>= 1) chosen = max(chosen, __shfl_xor_sync(INK_FULL_WARP, chosen, o));
  if (lane == 0) sm.best[warp] = largest.value, sm.row[warp] = largest.row, sm.drawn[warp] = chosen;
  __syncthreads();
  if (thread) return;
#pragma unroll
  for (int q = 1; q < WARPS; q++) {
    keep_better(largest, sm.best[q], sm.row[q]);
    chosen = max(chosen, sm.drawn[q]);
  }
  best[blockIdx.x] = largest.value;
  best_row[blockIdx.x] = largest.row;
  drawn[blockIdx.x] = chosen;
}
