// The token of row k of `draft_head`: the best of the candidates of `head_logits`, or, where the
// request has filters, what `sample` would draw from the row's logits with the noise of drafts.
//
// Macros: see head.cuh, and PARTS and THREADS as `sample` has them. Grid: PARTS blocks, of which all
// but the first end at once where no filter is on.
#define LAST_ROW 0
#include "../w4a16/sample.cu"
#include "head.cuh"

// As `draw` of sample.cu, with noise of its own.
INK_DEVICE u64 draw_draft(Row& row, u32 floor, const Draw& noise) {
  u64 best = 0;
  for_quads(row.part, [&](int i, int quad) {
    const uint4 keys = row.sm.keys[i];
    if (max(max(keys.x, keys.y), max(keys.z, keys.w)) < floor) return;
    const uint4 bits = noise.bits(quad);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 key = word_of(keys, j);
      if (key < floor) continue;
      const float score = value_of(key) + gumbel(word_of(bits, j));
      best = max(best, (u64)key_of(score) << 32 | ~(u32)(quad * 4 + j));
    }
  });
  return best;
}
// Over the block, for every thread.
INK_DEVICE u64 block_max(Shared& sm, u64 best) {
#pragma unroll
  for (int o = 16; o; o >>= 1) best = max(best, __shfl_xor_sync(INK_FULL_WARP, best, o));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) sm.sums[threadIdx.x >> 5] = best;
  __syncthreads();
#pragma unroll
  for (int q = 0; q < WARPS; q++) best = max(best, sm.sums[q]);
  return best;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    draw_row(const float* best, const int* best_row, const u64* drawn, const float* logits,
             const float* temperature, const int* top_k, const float* top_p, const float* min_p,
             const u64* seed, const int* position, const int* is_coupled, int* tokens,
             void* exchange, int* error, int count, int number) {
  Shared& sm = *(Shared*)dynamic_smem();
  Row row = {sm, (Exchange*)exchange, error, (int)blockIdx.x, 0};
  pdl_trigger();
  const Draw request(temperature, top_k, top_p, min_p, seed, position, is_coupled, number);
  if (!request.is_filtered() && row.part > 0) return;
  pdl_wait();
  const Choice greedy = sm.candidates.run(best, best_row, count);
  if (!request.is_filtered()) {
    u64 chosen = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) {
      const uint2 words = load_act8(drawn + i);
      chosen = max(chosen, (u64)words.y << 32 | words.x);
    }
    chosen = block_max(sm, chosen);
    if (threadIdx.x == 0)
      tokens[number] = request.temperature == 0 ? greedy.row : (int)~(u32)chosen;
    return;
  }
  const float largest = greedy.value / request.temperature;
  load_keys(row, logits + (size_t)number * VOCAB, request.temperature);
  u32 floor = 1;
  if (request.min_p > 0) {
    const float threshold = largest + (float)log((double)request.min_p);
    if (threshold == threshold) floor = max(floor, key_of(threshold));
  }
  if (request.top_k > 0 && request.top_k < VOCAB)
    floor = max(floor, select<false>(row, 1, request.top_k, largest));
  if (request.top_p < 1 && fabsf(largest) < __uint_as_float(0x7F800000u)) {
    const u32 weightless = key_of(largest - 33.f);  // as in `sample`
    floor = max(floor, select<true>(row, max(floor, weightless), request.top_p, largest));
  }
  const float hopeless = largest - (27.f + fabsf(largest) * 1e-6f);
  if (hopeless == hopeless) floor = max(floor, key_of(hopeless));
  finish(row, block_max(sm, draw_draft(row, floor, request)), tokens + number);
}
