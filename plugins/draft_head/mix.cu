// Row k of `draft_head` up to what the second table multiplies: a warp for each of its RANK values,
// and one for the confidence.
//
// Macros: see head.cuh. Grid: (RANK + 1) / WARPS blocks, or RANK / WARPS without confidences.
#include "head.cuh"

constexpr int WARPS = 8, MATRICES = HEAD == 2 ? 3 : HEAD;
static_assert(RANK % 8 == 0 && RANK <= 256, "a lane has one chunk of a vector");

INK_DEVICE float dot8(const float (&x)[8], const uint4& w, float sum) {
  float y[8];
  unpack8(y, w);
#pragma unroll
  for (int e = 0; e < 8; e++) sum = fmaf(x[e], y[e], sum);
  return sum;
}

// mixed and confidence: of `hidden_part`; states [GROUP][RANK], of which row k reads state k, 0 being
// zeros, and writes the next; z [RANK].
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    mix(const int* anchor, const int* tokens, const bf16* markov_w1, const bf16* mix_proj,
        const float* confidence_proj, const float* mixed, const float* confidence, float* states,
        float* z, float* confidences, int row) {
  const int lane = threadIdx.x % 32, i = blockIdx.x * WARPS + threadIdx.x / 32;
  if (threadIdx.x == 0) pdl_trigger();
  const bool has_chunk = lane < RANK / 8, is_confidence = i == RANK;
  uint4 of_token[MATRICES ? MATRICES : 1], of_state[MATRICES ? MATRICES : 1];
#pragma unroll
  for (int j = 0; j < MATRICES; j++) {
    of_token[j] = of_state[j] = make_uint4(0, 0, 0, 0);
    if (!has_chunk || i >= RANK) continue;
    const bf16* from = mix_proj + (size_t)(j * RANK + i) * MIX_STRIDE;
    of_token[j] = load_weight16(from + OF_TOKEN + 8 * lane);
    if (HEAD == 2) of_state[j] = load_weight16(from + 8 * lane);
  }
  pdl_wait();
  if (i > RANK) return;
  const int token = load_act_int(row ? tokens + row - 1 : anchor);
  const bf16* embedded = markov_w1 + (size_t)token * RANK;
  float e[8], s[8];
#pragma unroll
  for (int j = 0; j < 8; j++) e[j] = s[j] = 0.f;
  if (has_chunk) unpack8(e, load_weight16(embedded + 8 * lane));
  const float* state = states + (size_t)row * RANK;
  if (HEAD == 2 && row && has_chunk)
    as_floats8(s, load_act16(state + 8 * lane), load_act16(state + 8 * lane + 4));

  if (is_confidence) {
    float sum = 0.f;
    if (CONFIDENCE == 2 && has_chunk) {
      float y[8];
      const float* from = confidence_proj + WIDTH + 8 * lane;
      as_floats8(y, load_weight16(from), load_weight16(from + 4));
#pragma unroll
      for (int j = 0; j < 8; j++) sum = fmaf(e[j], y[j], sum);
    }
    sum = warp_sum(sum);
    if (lane == 0 && CONFIDENCE) confidences[row] = sigmoid(sum + load_act_float(confidence + row));
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
    if (row + 1 < GROUP) states[(size_t)(row + 1) * RANK + i] = gate * old + (1.f - gate) * tanhf(sums[1]);
    z[i] = tanhf(sums[2]);
  }
}
