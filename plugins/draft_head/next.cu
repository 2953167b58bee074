// Between the logits of row k - 1 of `draft_head` and those of row k: the token of row k - 1, and
// what the second table multiplies in row k. Row 0 has the anchor in front; behind the last row
// there is only its token.
//
// Without filters the token is the best of the candidates of `head_logits`, which every block finds
// for itself. With filters PARTS blocks draw it from all logits, as `sample` does but with the
// noise of drafts, and hand it to the others in a word of `published`, all of which are zero from
// one drafted block to the next.
//
// Then a warp makes each of the RANK values, and one more the confidence. It loads its part of the
// mixing matrix beside the token's embedding, which takes as long: earlier it would have to be kept
// in registers, or spilled, while filters work.
//
// Macros: see head.cuh, and PARTS and THREADS as `sample` has them. Grid: as many blocks as draw or
// make values.
#define LAST_ROW 0
#include "../w4a16/sample.cu"
#include "head.cuh"

constexpr int MATRICES = HEAD == 2 ? 3 : HEAD, TASKS = RANK + (CONFIDENCE ? 1 : 0);
constexpr int TASK_BLOCKS = (TASKS + WARPS - 1) / WARPS;
static_assert(RANK % 8 == 0 && RANK <= 256, "a lane has one chunk of a vector");

struct NextShared {
  Shared sample;
  int token;
};

INK_DEVICE float dot8(const float (&x)[8], const uint4& w, float sum) {
  float y[8];
  unpack8(y, w);
#pragma unroll
  for (int e = 0; e < 8; e++) sum = fmaf(x[e], y[e], sum);
  return sum;
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

// This thread's best score and token of the part: as `draw` of sample.cu, with other noise.
INK_DEVICE u64 best_of_part(Row& row, u32 floor, const Draw& request) {
  u64 best = 0;
  for_quads(row.part, [&](int i, int quad) {
    const uint4 keys = row.sm.keys[i];
    if (max(max(keys.x, keys.y), max(keys.z, keys.w)) < floor) return;
    const uint4 bits = request.bits(quad);
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

// A part's share of a draw with filters; the last part to arrive has the token afterwards.
INK_DEVICE void draw_filtered(Row& row, const Draw& request, float largest_logit,
                              const float* logits, int* token) {
  const float largest = largest_logit / request.temperature;
  load_keys(row, logits, request.temperature);
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
  finish(row, block_max(row.sm, best_of_part(row, floor, request)), token);
}

INK_DEVICE int await_token(const u64* word, int* error) {
  u64 v;
  u32 tries = 0;
#pragma unroll 1
  while ((v = load_relaxed(word)) == 0)
    if (++tries == INK_SPIN_LIMIT) {
      report_error(error, ERROR_SENTINEL);
      break;
    }
  return (int)(u32)v;
}

// best, best_row, drawn [count]: candidates of `head_logits`, or of ranks. mixed and confidence: of
// `hidden_part`. states [GROUP][RANK], of which row k reads state k, 0 being zeros, and writes the
// next; z [RANK]; published [GROUP].
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    next_row(const int* anchor, const float* best, const int* best_row, const u64* drawn,
             const float* logits, const float* temperature, const int* top_k, const float* top_p,
             const float* min_p, const u64* seed, const int* position, const int* is_coupled,
             const bf16* markov_w1, const bf16* mix_proj, const float* confidence_proj,
             const float* mixed, const float* confidence, int* tokens, float* states, float* z,
             float* confidences, u64* published, void* exchange, int* error, int count, int row) {
  NextShared& sm = *(NextShared*)dynamic_smem();
  const int thread = threadIdx.x, lane = thread % 32, block = blockIdx.x;
  const int i = block * WARPS + thread / 32;
  if (thread == 0) pdl_trigger();
  const bool has_tasks = row < GROUP && block < TASK_BLOCKS;
  const Draw request(temperature, top_k, top_p, min_p, seed, position, is_coupled, row - 1);
  const bool is_filtered = row && request.is_filtered();
  pdl_wait();

  if (row == GROUP && block == 0 && thread < GROUP) store_relaxed(published + thread, 0);
  int token;
  if (row == 0) {
    token = load_act_int(anchor);
  } else if (!is_filtered) {
    if (!has_tasks && block) return;
    if (request.temperature == 0) {
      token = sm.sample.candidates.run(best, best_row, count).row;
    } else {
      u64 chosen = 0;
      for (int j = thread; j < count; j += THREADS) {
        const uint2 words = load_act8(drawn + j);
        chosen = max(chosen, (u64)words.y << 32 | words.x);
      }
      token = (int)~(u32)block_max(sm.sample, chosen);
    }
    if (block == 0 && thread == 0) tokens[row - 1] = token;
  } else {
    if (block < PARTS) {
      Row part = {sm.sample, (Exchange*)exchange, error, block, 0};
      const float largest = sm.sample.candidates.run(best, best_row, count).value;
      draw_filtered(part, request, largest, logits + (size_t)(row - 1) * VOCAB, &sm.token);
      if (thread == 0 && (PARTS == 1 || sm.sample.is_last)) {
        tokens[row - 1] = sm.token;
        if (row < GROUP) store_relaxed(published + row - 1, (u64)1 << 32 | (u32)sm.token);
      }
    }
    if (!has_tasks) return;
    if (thread == 0) sm.token = await_token(published + row - 1, error);
    __syncthreads();
    token = sm.token;
  }
  if (!has_tasks || i >= TASKS) return;

  const bf16* embedded = markov_w1 + (size_t)token * RANK;
  const bool has_chunk = lane < RANK / 8;
  float e[8], s[8];
#pragma unroll
  for (int j = 0; j < 8; j++) e[j] = s[j] = 0.f;
  if (has_chunk) unpack8(e, load_weight16(embedded + 8 * lane));
  const float* state = states + (size_t)row * RANK;
  if (HEAD == 2 && row && has_chunk)
    as_floats8(s, load_act16(state + 8 * lane), load_act16(state + 8 * lane + 4));
  uint4 of_token[MATRICES ? MATRICES : 1], of_state[MATRICES ? MATRICES : 1];
#pragma unroll
  for (int j = 0; j < MATRICES; j++) {
    of_token[j] = of_state[j] = make_uint4(0, 0, 0, 0);
    if (!has_chunk || i >= RANK) continue;
    const bf16* from = mix_proj + (size_t)(j * RANK + i) * MIX_STRIDE;
    of_token[j] = load_weight16(from + OF_TOKEN + 8 * lane);
    if (HEAD == 2) of_state[j] = load_weight16(from + 8 * lane);
  }
  if (CONFIDENCE && i == RANK) {
    float sum = 0.f;
    if (CONFIDENCE == 2 && has_chunk) {
      float y[8];
      const float* from = confidence_proj + WIDTH + 8 * lane;
      as_floats8(y, load_weight16(from), load_weight16(from + 4));
#pragma unroll
      for (int j = 0; j < 8; j++) sum = fmaf(e[j], y[j], sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) confidences[row] = sigmoid(sum + load_act_float(confidence + row));
    return;
  }
  float sums[MATRICES ? MATRICES : 1];
#pragma unroll
  for (int j = 0; j < MATRICES; j++) {
    sums[j] = dot8(e, of_token[j], 0.f);
    if (HEAD == 2) sums[j] = dot8(s, of_state[j], sums[j]);
    sums[j] = warp_sum(sums[j]) + load_act_float(mixed + (size_t)row * MIXED + j * RANK + i);
  }
  if (lane) return;
  const float own = to_float((bf16)load_weight2(embedded + i));
  if (HEAD == 0) z[i] = own;
  if (HEAD == 1) z[i] = sigmoid(sums[0]) * own;
  if (HEAD == 2) {
    const float gate = sigmoid(sums[0]), old = row ? load_act_float(state + i) : 0.f;
    const float changed = gate * old + (1.f - gate) * tanhf(sums[1]);
    if (row + 1 < GROUP) states[(size_t)(row + 1) * RANK + i] = changed;
    z[i] = tanhf(sums[2]);
  }
}
