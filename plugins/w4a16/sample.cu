// The token of each row: sampling as sample/op.py defines it, of float32 logits [T, VOCAB], or the
// greedy token of the candidates of `stream` where the temperature is 0. Which of the two, and all
// parameters, are read from the device, so one graph serves every request.
//
// PARTS blocks share a row. Everything they combine is a whole number: order-preserving bits of
// scaled logits and scores, counts, and probabilities in fixed point. So the result depends neither
// on PARTS nor on T nor on the order in which blocks arrive.
//
//   max     from the candidates: no pass over the logits
//   min-p   a threshold from max
//   top-k   the k-th largest key: a histogram of 11, 11 and 10 bits of it, from the top
//   top-p   likewise the key at which the sum of exp(scaled - max) reaches its share
//   draw    the largest scaled logit + Gumbel noise among the keys at or above the thresholds
//
// A histogram is summed up by all parts, which wait for each other (`meet`); without top-k and
// top-p none waits.
//
// A term of top-p is rounded to a multiple of 2^-46, max being 1: with V tokens, the threshold can
// differ from that of the reference only where a sum of the largest probabilities lies within
// V x 2^-47 of top_p times the sum of all, in units of the largest (1.5e-9 for 201024 tokens).
#include "choice.cuh"
#include "noise.cuh"

constexpr int WARPS = THREADS / 32, BINS = 2048, BINS_OF_THREAD = BINS / THREADS;
constexpr int QUADS = (VOCAB + 3) / 4;  // of tokens; a block function of Philox serves one
constexpr int PART_QUADS = (QUADS + PARTS - 1) / PARTS;
constexpr int REGIONS = 3;
constexpr u32 NAN_KEY = 0xFFFFFFFFu;

struct Shared {
  uint4 keys[PART_QUADS];
  u32 low[BINS], high[BINS];  // halves of the part's histogram
  u64 sums[WARPS];
  BestOf<WARPS> candidates;
  u64 above;  // sum over the bins above the chosen one
  u32 digit, is_last;
};
// What the parts of a row hand to each other; all zero between launches.
struct Exchange {
  u64 drawn;
  u32 arrived, unused;
  u64 bins[REGIONS][BINS];
};

// Bits that order floats: -0 equals 0, and NaN is the largest.
INK_DEVICE u32 key_of(float x) {
  if (x != x) return NAN_KEY;
  const u32 bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
INK_DEVICE float value_of(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}
INK_DEVICE u32 word_of(const uint4& v, int i) {  // i is a constant after unrolling
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// One row as a block sees it.
struct Row {
  Shared& sm;
  Exchange* exchange;
  int* error;
  int part;
  u32 meetings;  // so far

  INK_DEVICE void clear() {
    for (int i = threadIdx.x; i < BINS; i += THREADS) sm.low[i] = sm.high[i] = 0;
    __syncthreads();
  }
  INK_DEVICE void add(u32 bin, u64 weight) {
    const u32 low = (u32)weight, old = atomicAdd(&sm.low[bin], low);
    const u32 high = (u32)(weight >> 32) + (old + low < old);  // with the carry
    if (high) atomicAdd(&sm.high[bin], high);
  }
  // The row's sum of this thread's bin i of BINS_OF_THREAD, falling from the top.
  static INK_DEVICE int bin_of(int i) {
    return BINS - 1 - (threadIdx.x * BINS_OF_THREAD + i);
  }
  INK_DEVICE void gather(u64 (&sums)[BINS_OF_THREAD]) {
    __syncthreads();
    u64* bins = PARTS > 1 ? exchange->bins[meetings % REGIONS] : nullptr;
#pragma unroll
    for (int i = 0; i < BINS_OF_THREAD; i++) {
      const int bin = bin_of(i);
      sums[i] = (u64)sm.high[bin] << 32 | sm.low[bin];
      if (PARTS > 1 && sums[i]) add_relaxed(bins + bin, sums[i]);
    }
    if (PARTS == 1) return;
    meet();
    // All have read the region of the meeting before, which is next used after the next meeting.
    if (meetings > 1) wipe(exchange->bins[(meetings - 2) % REGIONS], part, PARTS);
#pragma unroll
    for (int i = 0; i < BINS_OF_THREAD; i++) sums[i] = load_relaxed(bins + bin_of(i));
  }
  INK_DEVICE void meet() {
    meetings++;
    __syncthreads();
    if (threadIdx.x == 0) {
      arrive(&exchange->arrived);
      u32 tries = 0;
#pragma unroll 1
      while (load_arrivals(&exchange->arrived) < meetings * PARTS)
        if (++tries == INK_SPIN_LIMIT) {
          report_error(error, ERROR_SENTINEL);
          break;
        }
    }
    __syncthreads();
  }
  static INK_DEVICE void wipe(u64* bins, int first, int step) {
    for (int i = first * THREADS + threadIdx.x; i < BINS; i += step * THREADS)
      store_relaxed(bins + i, 0);
  }
};

// This thread's quads of the part, and their tokens.
template <class F>
INK_DEVICE void for_quads(int part, F f) {
  const int first = part * PART_QUADS;
  for (int i = threadIdx.x; i < PART_QUADS && first + i < QUADS; i += THREADS) f(i, first + i);
}

// Keys of the part's logits / temperature; 0, which no number has, past the vocabulary.
INK_DEVICE void load_keys(Row& row, const float* logits, float temperature) {
  for_quads(row.part, [&](int i, int quad) {
    uint4 v;
    if (VOCAB % 4 == 0) {
      v = load_act16(logits + quad * 4);
    } else {
      const float* p = logits + quad * 4;
      v.x = load_act4(p);
      v.y = quad * 4 + 1 < VOCAB ? load_act4(p + 1) : 0;
      v.z = quad * 4 + 2 < VOCAB ? load_act4(p + 2) : 0;
      v.w = quad * 4 + 3 < VOCAB ? load_act4(p + 3) : 0;
    }
    v.x = key_of(__uint_as_float(v.x) / temperature);
    v.y = key_of(__uint_as_float(v.y) / temperature);
    v.z = key_of(__uint_as_float(v.z) / temperature);
    v.w = key_of(__uint_as_float(v.w) / temperature);
    if (quad * 4 + 1 >= VOCAB) v.y = 0;
    if (quad * 4 + 2 >= VOCAB) v.z = 0;
    if (quad * 4 + 3 >= VOCAB) v.w = 0;
    row.sm.keys[i] = v;
  });
}

// The largest key at which the sum of weights, taken from the largest key down, reaches a goal.
// Keys below `floor` weigh nothing. TOP_P: weights are probabilities in fixed point, max being
// 2^46, and the goal is their sum times `goal`; else weights are 1.
template <bool TOP_P>
INK_DEVICE u32 select(Row& row, u32 floor, double goal, float max) {
  Shared& sm = row.sm;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  u64 above = 0;
  u32 prefix = 0;
#pragma unroll 1
  for (int level = 0; level < 3; level++) {
    const int bits = level == 2 ? 10 : 11, shift = level == 0 ? 21 : level == 1 ? 10 : 0;
    row.clear();
    for_quads(row.part, [&](int i, int) {
      const uint4 quad = sm.keys[i];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 key = word_of(quad, j);
        if (key < floor || (u32)((u64)key >> (shift + bits)) != prefix) continue;
        u64 weight = 1;
        if (TOP_P) {
          const double term = exp((double)value_of(key) - (double)max);
          weight = (u64)(term * 70368744177664.0 + 0.5);  // 2^46
        }
        if (weight) row.add(key >> shift & ((1u << bits) - 1), weight);
      }
    });
    u64 sums[BINS_OF_THREAD];
    row.gather(sums);
    u64 own = 0;
#pragma unroll
    for (int i = 0; i < BINS_OF_THREAD; i++) own += sums[i];
    u64 up_to = own;  // and with the lanes below, whose bins are higher
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const u64 other = __shfl_up_sync(INK_FULL_WARP, up_to, o);
      if (lane >= o) up_to += other;
    }
    if (lane == 31) sm.sums[warp] = up_to;
    __syncthreads();
    u64 sum = above + up_to - own, all = 0;
    for (int q = 0; q < WARPS; q++) {
      if (q < warp) sum += sm.sums[q];
      all += sm.sums[q];
    }
    if (TOP_P && level == 0) goal = fmax(goal * (double)all, 1.0);  // a share that is 0 in float32
#pragma unroll
    for (int i = 0; i < BINS_OF_THREAD; i++) {
      if ((double)sum < goal && (double)(sum + sums[i]) >= goal) {  // in one bin of one thread
        sm.above = sum;
        sm.digit = Row::bin_of(i);
      }
      sum += sums[i];
    }
    __syncthreads();
    above = sm.above;
    prefix = prefix << bits | sm.digit;
  }
  return prefix;
}

// The part's best score and its token as one number, larger for the lower token.
INK_DEVICE u64 draw(Row& row, u32 floor, u64 seed, u32 position) {
  u64 best = 0;
  for_quads(row.part, [&](int i, int quad) {
    const uint4 keys = row.sm.keys[i];
    if (max(max(keys.x, keys.y), max(keys.z, keys.w)) < floor) return;
    const uint4 bits = token_bits(seed, position, PURPOSE_SAMPLE, quad);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 key = word_of(keys, j);
      if (key < floor) continue;
      const float score = value_of(key) + gumbel(word_of(bits, j));
      best = max(best, (u64)key_of(score) << 32 | ~(u32)(quad * 4 + j));
    }
  });
#pragma unroll
  for (int o = 16; o; o >>= 1) best = max(best, __shfl_xor_sync(INK_FULL_WARP, best, o));
  Shared& sm = row.sm;
  if ((threadIdx.x & 31) == 0) sm.sums[threadIdx.x >> 5] = best;
  __syncthreads();
#pragma unroll
  for (int q = 0; q < WARPS; q++) best = max(best, sm.sums[q]);
  return best;
}

// The best of all parts becomes the token; the last part to arrive leaves the exchange as it was.
INK_DEVICE void finish(Row& row, u64 best, int* token) {
  if (PARTS == 1) {
    if (threadIdx.x == 0) *token = (int)~(u32)best;
    return;
  }
  Exchange& exchange = *row.exchange;
  if (threadIdx.x == 0) {
    max_relaxed(&exchange.drawn, best);
    row.sm.is_last = arrive(&exchange.arrived) == (row.meetings + 1) * PARTS - 1;
    if (row.sm.is_last) {
      *token = (int)~(u32)load_relaxed(&exchange.drawn);
      exchange.drawn = 0;
      exchange.arrived = 0;
    }
  }
  __syncthreads();
  if (row.sm.is_last && row.meetings) Row::wipe(exchange.bins[(row.meetings - 1) % REGIONS], 0, 1);
}

// best and best_row [T, count]; exchange: T of `Exchange`. Block b is part b / T of row b % T, so
// that the blocks that a greedy step needs start first. The parameters do not change during a step.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    sample(const float* best, const int* best_row, const float* logits, const float* temperature,
           const int* top_k, const float* top_p, const float* min_p, const u64* seed,
           const int* position, const int* num_tokens, int* tokens, void* exchange, int* error,
           int count) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int num_rows = gridDim.x / PARTS, number = blockIdx.x % num_rows;
  Row row = {sm, (Exchange*)exchange + number, error, (int)blockIdx.x / num_rows, 0};
  pdl_trigger();
  const float scale = load_act_float(temperature);
  if (scale == 0 && row.part > 0) return;
  const float p = load_act_float(top_p), least_p = load_act_float(min_p);
  const int k = load_act_int(top_k);
  const uint2 seed_words = load_act8(seed);
  // Of the token being drawn.
  const u32 place = load_act_int(position) + (LAST_ROW ? load_act_int(num_tokens) : 1 + number);
  pdl_wait();
  const size_t first = (size_t)number * count;
  const Choice greedy = sm.candidates.run(best + first, best_row + first, count);
  if (scale == 0) {
    if (threadIdx.x == 0) tokens[number] = greedy.row;
    return;
  }

  load_keys(row, logits + (size_t)number * VOCAB, scale);
  const float largest = greedy.value / scale;
  u32 floor = 1;
  if (least_p > 0) {
    const float threshold = largest + (float)log((double)least_p);
    if (threshold == threshold) floor = max(floor, key_of(threshold));
  }
  if (k > 0 && k < VOCAB) floor = max(floor, select<false>(row, 1, k, largest));
  if (p < 1 && fabsf(largest) < __uint_as_float(0x7F800000u)) {
    // Farther down than 47 ln 2 a term is 0.
    const u32 weightless = key_of(largest - 33.f);
    floor = max(floor, select<true>(row, max(floor, weightless), p, largest));
  }
  // Noise is between -3.2 and 22.9: what is farther than 26.1 below the largest cannot win, nor,
  // with some units in the last place between, tie with it.
  const float hopeless = largest - (27.f + fabsf(largest) * 1e-6f);
  if (hopeless == hopeless) floor = max(floor, key_of(hopeless));
  const u64 seed_of_row = (u64)seed_words.y << 32 | seed_words.x;
  finish(row, draw(row, floor, seed_of_row, place), tokens + number);
}
