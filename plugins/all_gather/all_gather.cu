// out[t] = the first COLUMNS words of [x_0[t] | x_1[t] | ...], x_r[t] being rank r's row t of
// ROW_WORDS words of 32 bits. HAS_BEST: words are floats, and each block finds the largest of those
// that it writes, and the lowest column of it, per row, as `stream` does for `argmax` and `sample`.
// IS_WIDE: of the NUM_TOKENS rows only num_tokens are there.
#include "all_reduce/lamport.cuh"
#if HAS_BEST
#include "w4a16/choice.cuh"
#endif

constexpr u32 WARPS = THREADS / 32;

INK_DEVICE u32 word_of(const uint4& v, u32 i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
// Words from 4 q on of `count`; zero behind their end.
INK_DEVICE uint4 load_quad(const u32* x, u32 q, u32 count) {
  if (ROW_WORDS % 4 == 0 || q * 4 + 3 < count) return load_act16(x + q * 4);
  return make_uint4(load_act4(x + q * 4), q * 4 + 1 < count ? load_act4(x + q * 4 + 1) : 0,
                    q * 4 + 2 < count ? load_act4(x + q * 4 + 2) : 0, 0);
}
// This thread's quads; with HAS_BEST row by row. A block waits for the same blocks of other ranks.
template <class F>
INK_DEVICE void for_quads(u32 rows, u32 quads, u32 first, u32 count, F f) {
  if (HAS_BEST) {
    for (u32 row = 0; row < rows; row++)
      for (u32 i = first; i < ROW_WORDS / 4; i += count) f(row * (ROW_WORDS / 4) + i);
  } else {
    for (u32 q = first; q < quads; q += count) f(q);
  }
}
#if HAS_BEST
INK_DEVICE void keep_quad(Choice& best, const uint4& v, u32 column) {
#pragma unroll
  for (u32 i = 0; i < 4; i++)
    if (column + i < COLUMNS) keep_better(best, __uint_as_float(word_of(v, i)), (int)(column + i));
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    all_gather(const u32* x, u32* out, const Peers* peers, const int* num_tokens, float* best_out,
               int* row_out, int* error) {
  Exchange exchange(peers, error);
  const u32 first = blockIdx.x * THREADS + threadIdx.x, count = gridDim.x * THREADS;
  pdl_trigger();
  pdl_wait();
  exchange.begin();
  const u32 rows = IS_WIDE ? min(load_act_int(num_tokens), NUM_TOKENS) : NUM_TOKENS;
  const u32 words = rows * ROW_WORDS, quads = (words + 3) / 4;
  uint4 v = make_uint4(0, 0, 0, 0);
  if (first < quads) v = load_quad(x, first, words);
  exchange.ready();
  for_quads(rows, quads, first, count, [&](u32 q) {
    exchange.send16(q * 16, q == first ? v : load_quad(x, q, words));
  });
  exchange.clear(first, count);
  __syncthreads();
  exchange.end(quads * 16, gridDim.x, THREADS);
#if HAS_BEST  // row by row
  __shared__ float values[WARPS];
  __shared__ int columns[WARPS];
  for (u32 row = 0; row < rows; row++) {
    Choice best = least_choice(0);
    for (u32 i = first; i < ROW_WORDS / 4; i += count) {
      const u32 q = row * (ROW_WORDS / 4) + i;
      uint4 parts[RANKS];
      exchange.receive16(q * 16, load_act16(x + q * 4), parts);
#pragma unroll
      for (u32 r = 0; r < RANKS; r++) {
        const u32 column = r * ROW_WORDS + i * 4;
        u32* to = out + (size_t)row * COLUMNS + column;
        if (COLUMNS % 4 == 0) {
          if (column < COLUMNS) *(uint4*)to = parts[r];
        } else {
#pragma unroll
          for (u32 k = 0; k < 4; k++)
            if (column + k < COLUMNS) to[k] = word_of(parts[r], k);
        }
        keep_quad(best, parts[r], column);
      }
    }
    keep_best_of_warp<1>(best);
    __syncthreads();  // the row before has been read
    if (threadIdx.x % 32 == 0) {
      values[threadIdx.x / 32] = best.value;
      columns[threadIdx.x / 32] = best.row;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (u32 w = 1; w < WARPS; w++) keep_better(best, values[w], columns[w]);
      best_out[row * gridDim.x + blockIdx.x] = best.value;
      row_out[row * gridDim.x + blockIdx.x] = best.row;
    }
  }
#else
  for_quads(rows, quads, first, count, [&](u32 q) {
    uint4 parts[RANKS];
    exchange.receive16(q * 16, load_quad(x, q, words), parts);
#pragma unroll
    for (u32 r = 0; r < RANKS; r++) {
      if (ROW_WORDS % 4 == 0 && COLUMNS == RANKS * ROW_WORDS) {
        const u32 row = q / (ROW_WORDS / 4), column = q % (ROW_WORDS / 4) * 4;
        *(uint4*)(out + (size_t)row * COLUMNS + r * ROW_WORDS + column) = parts[r];
        continue;
      }
#pragma unroll
      for (u32 k = 0; k < 4; k++) {
        const u32 word = q * 4 + k, column = r * ROW_WORDS + word % ROW_WORDS;
        if (word < words && column < COLUMNS)
          out[(size_t)(word / ROW_WORDS) * COLUMNS + column] = word_of(parts[r], k);
      }
    }
  });
#endif
}
