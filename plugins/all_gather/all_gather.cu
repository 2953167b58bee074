// out[t] = the first COLUMNS words of [x_0[t] | x_1[t] | ...], x_r[t] being rank r's row t of
// ROW_WORDS words of 32 bits. HAS_BEST: words are floats, and each of the PARTS blocks of a row
// finds the largest of those that it writes, and the lowest column of it, as `stream` does for
// `argmax` and `sample`; up to eight rows are sent and received at once.
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
#if HAS_BEST
INK_DEVICE void keep_quad(Choice& best, const uint4& v, u32 column) {
#pragma unroll
  for (u32 i = 0; i < 4; i++)
    if (column + i < COLUMNS) keep_better(best, __uint_as_float(word_of(v, i)), (int)(column + i));
}

static_assert(ROW_WORDS % 4 == 0, "rows of whole quads");
constexpr u32 ROW_QUADS = ROW_WORDS / 4;

// Words of a rank's quad to a row of COLUMNS, which begin at word `at` of all, `column` of the row.
INK_DEVICE void store_quad(u32* out, size_t at, u32 column, const uint4& v) {
  if (column + 3 < COLUMNS && (COLUMNS % 4 == 0 || at % 4 == 0)) {
    *(uint4*)(out + at) = v;
  } else if (column + 3 < COLUMNS && COLUMNS % 2 == 0) {
    *(uint2*)(out + at) = make_uint2(v.x, v.y);
    *(uint2*)(out + at + 2) = make_uint2(v.z, v.w);
  } else {
#pragma unroll
    for (u32 k = 0; k < 4; k++)
      if (column + k < COLUMNS) out[at + k] = word_of(v, k);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    all_gather(const u32* x, u32* out, const Peers* peers, const int* num_tokens, float* best_out,
               int* row_out, int* error) {
  Exchange exchange(peers, error);
  const u32 first = blockIdx.x * THREADS + threadIdx.x, count = gridDim.x * THREADS;
  pdl_trigger();
  pdl_wait();
  exchange.begin();
  const u32 rows = IS_WIDE ? min(load_act_int(num_tokens), NUM_TOKENS) : NUM_TOKENS;
  const u32 words = rows * ROW_WORDS, quads = (words + 3) / 4;
#if HAS_BEST
  // PARTS blocks have a row at a time, and wait for the same blocks of other ranks.
  const u32 groups = gridDim.x / PARTS, part = blockIdx.x % PARTS;
  const u32 row0 = blockIdx.x / PARTS, begin = part * THREADS + threadIdx.x;
  uint4 v = make_uint4(0, 0, 0, 0);
  if (row0 < rows && begin < ROW_QUADS) v = load_act16(x + (size_t)(row0 * ROW_QUADS + begin) * 4);
  exchange.ready();
  for (u32 row = row0; row < rows; row += groups)
#pragma unroll 1
    for (u32 i = begin; i < ROW_QUADS; i += PARTS * THREADS) {
      const u32 q = row * ROW_QUADS + i;
      if (row != row0 || i != begin) v = load_act16(x + (size_t)q * 4);
      exchange.send16((u64)q * 16, v);
    }
  exchange.clear(first, count);
  __syncthreads();
  exchange.end(quads * 16, gridDim.x, THREADS);
  __shared__ float values[WARPS];
  __shared__ int columns[WARPS];
  for (u32 row = row0; row < rows; row += groups) {
    Choice best = least_choice(0);
#pragma unroll 1
    for (u32 i = begin; i < ROW_QUADS; i += PARTS * THREADS) {
      const u32 q = row * ROW_QUADS + i;
      uint4 parts[RANKS];
      exchange.receive16((u64)q * 16, load_act16(x + (size_t)q * 4), parts);
#pragma unroll
      for (u32 r = 0; r < RANKS; r++) {
        const u32 column = r * ROW_WORDS + i * 4;
        store_quad(out, (size_t)row * COLUMNS + column, column, parts[r]);
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
      best_out[row * PARTS + part] = best.value;
      row_out[row * PARTS + part] = best.row;
    }
  }
#else
  uint4 v = make_uint4(0, 0, 0, 0);
  if (first < quads) v = load_quad(x, first, words);
  exchange.ready();
  for (u32 q = first; q < quads; q += count)
    exchange.send16(q * 16, q == first ? v : load_quad(x, q, words));
  exchange.clear(first, count);
  __syncthreads();
  exchange.end(quads * 16, gridDim.x, THREADS);
  for (u32 q = first; q < quads; q += count) {
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
  }
#endif
}
