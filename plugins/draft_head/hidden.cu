// What `draft_head` needs of the hidden rows alone, for all rows at once: products with the hidden
// part of the mixing matrix, with the biases; the same of the confidences; and, if not all tokens
// can be drafted, logits of -infinity.
//
// Macros: see head.cuh; CONFIDENCE_BIAS, BLOCK_ROWS (of the matrix), CHUNKS (of 8 values that a
// thread has of a row), THREADS, FILL_BLOCKS. Grid: MIXED / BLOCK_ROWS blocks, one for confidences
// if there are any, FILL_BLOCKS.
#include "head.cuh"

constexpr int WARPS = THREADS / 32, MIX_BLOCKS = (MIXED + BLOCK_ROWS - 1) / BLOCK_ROWS;
constexpr int SUMS = GROUP * BLOCK_ROWS;

struct Shared {
  float sums[WARPS][SUMS];
};

INK_DEVICE void fill(float* logits, int part) {
  const size_t count = (size_t)GROUP * VOCAB, step = (size_t)FILL_BLOCKS * THREADS;
  for (size_t i = (size_t)part * THREADS + threadIdx.x; i < count; i += step)
    logits[i] = __uint_as_float(0xFF800000u);
}

// Sums of a block's threads, [SUMS], of which `count` count; thread i gets sum i.
INK_DEVICE float reduce(Shared& sm, const float (&own)[SUMS], int count) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < SUMS; i++) {
    const float sum = warp_sum(own[i]);
    if (lane == 0) sm.sums[warp][i] = sum;
  }
  __syncthreads();
  float sum = 0.f;
  if ((int)threadIdx.x < count)
#pragma unroll 1
    for (int q = 0; q < WARPS; q++) sum += sm.sums[q][threadIdx.x];
  return sum;
}

INK_DEVICE void products(Shared& sm, const bf16* hidden, const bf16* proj, const float* bias,
                         float* mixed) {
  const int thread = threadIdx.x, first = blockIdx.x * BLOCK_ROWS;
  uint4 w[CHUNKS][BLOCK_ROWS];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int i = 0; i < BLOCK_ROWS; i++) {
      const int chunk = c * THREADS + thread, row = first + i;
      w[c][i] = chunk < WIDTH / 8 && row < MIXED
                    ? load_weight16(proj + (size_t)row * MIX_STRIDE + OF_HIDDEN + 8 * chunk)
                    : make_uint4(0, 0, 0, 0);
    }
  pdl_wait();
  float sums[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; i++) sums[i] = 0.f;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int chunk = c * THREADS + thread;
    if (chunk >= WIDTH / 8) break;
    uint4 rows[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; g++) rows[g] = load_act16(hidden + (size_t)g * WIDTH + 8 * chunk);
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      float x[8], y[8];
      unpack8(x, rows[g]);
#pragma unroll
      for (int i = 0; i < BLOCK_ROWS; i++) {
        unpack8(y, w[c][i]);
#pragma unroll
        for (int e = 0; e < 8; e++)
          sums[g * BLOCK_ROWS + i] = fmaf(x[e], y[e], sums[g * BLOCK_ROWS + i]);
      }
    }
  }
  const float sum = reduce(sm, sums, SUMS);
  const int g = thread / BLOCK_ROWS, row = first + thread % BLOCK_ROWS;
  if (thread < SUMS && row < MIXED) mixed[g * MIXED + row] = sum + load_weight_float(bias + row);
}

INK_DEVICE void confidences(Shared& sm, const bf16* hidden, const float* proj, const float* bias,
                            float* confidence) {
  pdl_wait();
  float sums[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; i++) sums[i] = 0.f;
#pragma unroll 1
  for (int chunk = threadIdx.x; chunk < WIDTH / 8; chunk += THREADS) {
    float x[8], y[8];
    as_floats8(y, load_weight16(proj + 8 * chunk), load_weight16(proj + 8 * chunk + 4));
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      unpack8(x, load_act16(hidden + (size_t)g * WIDTH + 8 * chunk));
#pragma unroll
      for (int e = 0; e < 8; e++) sums[g] = fmaf(x[e], y[e], sums[g]);
    }
  }
  const float sum = reduce(sm, sums, GROUP);
  if (threadIdx.x < GROUP)
    confidence[threadIdx.x] = sum + (CONFIDENCE_BIAS ? load_weight_float(bias) : 0.f);
}

// mixed [GROUP][MIXED]; confidence [GROUP], before the token's part.
extern "C" __global__ void __launch_bounds__(THREADS)
    hidden_part(const bf16* hidden, const bf16* mix_proj, const float* mix_bias,
                const float* confidence_proj, const float* confidence_bias, float* mixed,
                float* confidence, float* logits) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int block = blockIdx.x;
  if (threadIdx.x == 0) pdl_trigger();
  if (block < MIX_BLOCKS) {
    products(sm, hidden, mix_proj, mix_bias, mixed);
  } else if (CONFIDENCE && block == MIX_BLOCKS) {
    confidences(sm, hidden, confidence_proj, confidence_bias, confidence);
  } else {
    pdl_wait();
    fill(logits, block - MIX_BLOCKS - (CONFIDENCE ? 1 : 0));
  }
}
