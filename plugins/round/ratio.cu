// The ratio test of a round's drafts, block verification: runtime/spec/accept.py has the formulas,
// the keys of the noise and the fallback, and these kernels decide as it does on the same logits,
// but for the rounding of float64.
//
//   ratio_rows   PARTS blocks a row: the row's filters, by the code of w4a16/sample.cu, and its
//                parts' sums of exp(scaled - max). Parts wait for each other only with filters.
//   ratio_test   BLOCKS blocks, each with the same tokens of all rows: the ratios P_i, sums R_i of
//                what P_i p has more than q, which all blocks wait for; then each decides for
//                itself, and together they draw the token behind the accepted drafts.
//
// Sums are float64 and added in an order that depends on the launch alone, so ranks that read the
// same logits decide the same. Where a row's largest logit is not finite the row is certain of it.
//
// A step's logits are of the drafts it has read: width in the state is at most DRAFT_ROWS.
#include "threshold.cuh"

static_assert(sizeof(RowsShared) == ROWS_SMEM, "as launches.py has it");

// Keys of the part's logits / temperature; this thread's best of them. Single words are loaded, as
// rows of an odd vocabulary are not aligned; those of a warp stand beside each other.
INK_DEVICE u64 load_part(Row& row, const float* logits, float temperature) {
  constexpr int kPlaces = 4 * PART_QUADS;
  u32* keys = (u32*)row.sm.keys;
  const int first = row.part * kPlaces;
  u64 best = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < kPlaces; i += kBatch * THREADS) {
    float x[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; j++) {
      const int place = i + j * THREADS;
      if (place < kPlaces && first + place < VOCAB) x[j] = load_act_float(logits + first + place);
    }
#pragma unroll
    for (int j = 0; j < kBatch; j++) {
      const int place = i + j * THREADS;
      if (place >= kPlaces) break;
      const bool is_token = first + place < VOCAB;
      const u32 key = is_token ? key_of(x[j] / temperature) : 0;
      keys[place] = key;
      if (is_token) best = max(best, best_of(key, first + place));
    }
  }
  return best;
}

// Over the block, for every thread.
INK_DEVICE u64 block_best(Shared& sm, u64 best) {
  best = warp_max_u64(best);
  if ((threadIdx.x & 31) == 0) sm.sums[threadIdx.x >> 5] = best;
  __syncthreads();
#pragma unroll
  for (int q = 0; q < WARPS; q++) best = max(best, sm.sums[q]);
  return best;
}

// The last part to arrive leaves the exchange as it was.
INK_DEVICE void leave(Row& row) {
  if (row.meetings == 0) return;
  Exchange& exchange = *row.exchange;
  if (threadIdx.x == 0) {
    row.sm.is_last = arrive(&exchange.arrived) == (row.meetings + 1) * PARTS - 1;
    if (row.sm.is_last) exchange.drawn = exchange.arrived = 0;
  }
  __syncthreads();
  if (row.sm.is_last) Row::wipe(exchange.bins[(row.meetings - 1) % REGIONS], 0, 1);
}

// p_logits [TARGET_ROWS, VOCAB], q_logits [DRAFT_ROWS, VOCAB]; exchange: kRows of `Exchange`. Block
// b is part b / kRows of row b % kRows. State and parameters do not change during a step.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    ratio_rows(const float* p_logits, const float* q_logits, const RoundState* state,
               const float* temperature, const int* top_k, const float* top_p, const float* min_p,
               RowParts* rows, Lists* lists, void* exchange, int* error) {
  RowsShared& sm = *(RowsShared*)dynamic_smem();
  const int thread = threadIdx.x, number = (int)blockIdx.x % kRows;
  Row row = {sm.sample, (Exchange*)exchange + number, error, (int)blockIdx.x / kRows, 0};
  pdl_trigger();
  const bool is_target = number < TARGET_ROWS;
  const int width = load_act_int(&state->width);
  if (is_target ? number > width : number - TARGET_ROWS >= width) return;
  const float scale = load_act_float(temperature), p = load_act_float(top_p);
  const float least_p = load_act_float(min_p);
  const int k = load_act_int(top_k);
  const bool is_filtered = least_p > 0 || (k > 0 && k < VOCAB) || p < 1;
  sm.exponential.fill();
  pdl_wait();

  const float* logits = is_target ? p_logits + (size_t)number * VOCAB
                                  : q_logits + (size_t)(number - TARGET_ROWS) * VOCAB;
  u64 best = block_best(sm.sample, load_part(row, logits, scale));
  if (is_filtered && PARTS > 1) {
    if (thread == 0) max_relaxed(&row.exchange->drawn, best);
    row.meet();
    best = load_relaxed(&row.exchange->drawn);
  }
  __syncthreads();
  const float largest = largest_of(best);
  u32 floor = 1;
  double sum = 0;
  if (is_finite(largest)) {
    if (is_filtered) floor = find_floor(row, sm, lists, number, largest, k, p, least_p);
    const int count = min(PART_QUADS, QUADS - row.part * PART_QUADS);
#pragma unroll 1  // short code: it is met for the first time in every round
    for (int i = thread; i < count; i += THREADS) {
      const uint4 keys = sm.sample.keys[i];
      if (max(max(keys.x, keys.y), max(keys.z, keys.w)) < floor) continue;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 key = word_of(keys, j);
        sum += key >= floor ? sm.exponential.weight(value_of(key), largest) : 0.0;
      }
    }
  }
  sum = warp_sum_double(sum);
  if (thread % 32 == 0) sm.sums[thread / 32] = sum;
  __syncthreads();
  if (thread == 0) {
    for (int q = 1; q < WARPS; q++) sum += sm.sums[q];
    rows->parts[number][row.part] = {best, sum};
    if (row.part == 0) rows->floors[number] = floor;
  }
  leave(row);
}

constexpr int kTestQuads = (QUADS + BLOCKS - 1) / BLOCKS, kTestPlaces = 4 * kTestQuads;
constexpr int kWidths = DRAFT_ROWS ? DRAFT_ROWS : 1;

struct TestShared {
  uint4 keys[kRows][kTestQuads];
  Distribution rows[kRows];
  double shares[kWidths + 1], rests[kWidths], sums[kWidths][WARPS];
  Exponential exponential;
  Drawn drawn[WARPS];
  u32 is_last, unused;
};
static_assert(sizeof(TestShared) == TEST_SMEM, "as launches.py has it");
// What the blocks hand to each other; `arrived` is zero between launches.
struct TestExchange {
  double rests[kWidths][BLOCKS];
  Drawn drawn[BLOCKS];
  u32 arrived, unused;
};

// Keys of the block's tokens in all rows that count, of which row i is number row_of(i).
struct Loading {
  static constexpr int kOfThread = (kTestPlaces + THREADS - 1) / THREADS;
  static constexpr int kAtOnce = kBatch / kOfThread ? kBatch / kOfThread : 1;  // rows
  float x[kAtOnce][kOfThread];
  int width;

  INK_DEVICE int num_rows() const { return 2 * width + 1; }
  INK_DEVICE int row_of(int i) const { return i <= width ? i : TARGET_ROWS + i - width - 1; }
  INK_DEVICE void load(int row, const float* p_logits, const float* q_logits) {
    const int first = (int)blockIdx.x * kTestPlaces;
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      if (row + i >= num_rows()) break;
      const int r = row_of(row + i);
      const float* from = (r < TARGET_ROWS ? p_logits + (size_t)r * VOCAB
                                           : q_logits + (size_t)(r - TARGET_ROWS) * VOCAB) +
                          first;
#pragma unroll
      for (int j = 0; j < kOfThread; j++) {
        const int place = j * THREADS + (int)threadIdx.x;
        if (place < kTestPlaces && first + place < VOCAB) x[i][j] = load_act_float(from + place);
      }
    }
  }
  INK_DEVICE void keep(int row, TestShared& sm, float temperature) const {
    const int first = (int)blockIdx.x * kTestPlaces;
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      if (row + i >= num_rows()) break;
      u32* keys = (u32*)sm.keys[row_of(row + i)];
#pragma unroll
      for (int j = 0; j < kOfThread; j++) {
        const int place = j * THREADS + (int)threadIdx.x;
        if (place < kTestPlaces)
          keys[place] = first + place < VOCAB ? key_of(x[i][j] / temperature) : 0;
      }
    }
  }
};

// What P p has more than q of the block's token i, or p itself. `place`: drafts in front of it.
INK_DEVICE double excess_of(const TestShared& sm, int i, int place, double share, bool is_whole) {
  const int token = (int)blockIdx.x * kTestPlaces + i;
  const u32* p_keys = (const u32*)sm.keys[place];
  const double p = sm.rows[place].probability(sm.exponential, p_keys[i], token);
  if (is_whole || p == 0) return p;
  const u32* q_keys = (const u32*)sm.keys[TARGET_ROWS + place];
  const Distribution& q = sm.rows[TARGET_ROWS + place];
  return fmax(share * p - q.probability(sm.exponential, q_keys[i], token), 0.0);
}

// A bound of log(weight) + gumbel(word), in units of log 2: -log(-log u) < -log(1 - u).
INK_DEVICE int most_score(double weight, u32 word) {
  const int exponent = (int)(bits_of(weight) >> 52) - 1023;
  return exponent + 1 + __clz((int)~word) + 1;
}

// drafts: of the step's tokens those behind the anchor. The verdict goes to `state`, which nothing
// else writes meanwhile.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    ratio_test(const float* p_logits, const float* q_logits, const int* drafts, RoundState* state,
               const float* temperature, const u64* seed_at, const int* position,
               const RowParts* rows, TestExchange* exchange, int* error) {
  TestShared& sm = *(TestShared*)dynamic_smem();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, block = blockIdx.x;
  pdl_trigger();
  const int width = load_act_int(&state->width);
  const float scale = load_act_float(temperature);
  const u64 seed = load_act_u64(seed_at);
  const u32 anchor = load_act_int(position);
  // Lane i serves draft i + 1: its coin, and its keys in both rows.
  const bool has_draft = lane < width;
  const int draft = has_draft ? load_act_int(drafts + lane) : 0;
  const u32 coin_bits = round_bits(seed, anchor + 1 + lane, kPurposeAccept, anchor, 0).x;
  const double coin = ((double)coin_bits + 0.5) * (1.0 / 4294967296.0);
  sm.exponential.fill();
  __syncthreads();
  pdl_wait();

  float p_logit = 0, q_logit = 0;
  if (warp == 0 && has_draft) {
    p_logit = load_act_float(p_logits + (size_t)lane * VOCAB + draft);
    q_logit = load_act_float(q_logits + (size_t)lane * VOCAB + draft);
  }
  Loading loading;
  loading.width = width;
#pragma unroll 1
  for (int i = 0; i < loading.num_rows(); i += Loading::kAtOnce) {
    loading.load(i, p_logits, q_logits);
#pragma unroll 1
    for (int j = warp; i == 0 && j < loading.num_rows(); j += WARPS) {  // meanwhile
      const int r = loading.row_of(j);
      const Distribution row = combine(sm.exponential, rows, r);
      if (lane == 0) sm.rows[r] = row;
    }
    loading.keep(i, sm, scale);
  }
  __syncthreads();
  if (warp == 0) {
    double ratio = 0;
    if (has_draft) {
      const u32 p_key = key_of(p_logit / scale), q_key = key_of(q_logit / scale);
      const double p = sm.rows[lane].probability(sm.exponential, p_key, draft);
      const double q = sm.rows[TARGET_ROWS + lane].probability(sm.exponential, q_key, draft);
      if (q > 0) ratio = p / q;  // a draft that q cannot give never counts
    }
    double share = 1;
    if (lane == 0) sm.shares[0] = 1;
#pragma unroll 1
    for (int i = 0; i < width; i++) {
      share = fmin(1.0, share * __shfl_sync(INK_FULL_WARP, ratio, i));
      if (lane == 0) sm.shares[i + 1] = share;
    }
  }
  __syncthreads();

  // R_0 .. R_{w-1}; the first only tells whether anything is left.
#pragma unroll 1
  for (int place = 0; place < width; place++) {
    double sum = 0;
#pragma unroll 1
    for (int i = thread; i < kTestPlaces; i += THREADS)
      sum += excess_of(sm, i, place, sm.shares[place], false);
    sum = warp_sum_double(sum);
    if (lane == 0) sm.sums[place][warp] = sum;
  }
  __syncthreads();
  u32 meetings = 0;
  if (width > 0) {
    if (thread < width) {
      double sum = 0;
      for (int q = 0; q < WARPS; q++) sum += sm.sums[thread][q];
      exchange->rests[thread][block] = sum;
    }
    meetings = 1;
    __syncthreads();
    if (thread == 0) {
      arrive(&exchange->arrived);
      u32 tries = 0;
#pragma unroll 1
      while (load_arrivals(&exchange->arrived) < BLOCKS)
        if (++tries == INK_SPIN_LIMIT) {
          report_error(error, ERROR_SENTINEL);
          break;
        }
    }
    __syncthreads();
    for (int place = warp; place < width; place += WARPS) {
      double sum = 0;
      for (int b = lane; b < BLOCKS; b += 32) sum += load_act_double(&exchange->rests[place][b]);
      sum = warp_sum_double(sum);
      if (lane == 0) sm.rests[place] = sum;
    }
    __syncthreads();
  }

  // Every warp decides for itself, a draft a lane.
  int accepted = 0;
  if (has_draft) {
    const double share = sm.shares[lane + 1];
    double limit = share;
    if (lane + 1 < width) {
      const double rest = sm.rests[lane + 1], whole = rest + (1.0 - share);
      limit = whole > 0 ? rest / whole : 1.0;
    }
    if (coin < limit) accepted = lane + 1;
  }
  accepted = (int)__reduce_max_sync(INK_FULL_WARP, (u32)accepted);
  // Where rounding leaves nothing, p and q are equal up to rounding.
  const bool is_whole = accepted == width || sm.rests[accepted] <= 0;

  // The best score of all is less than log(sum of weights) - 5 once in 10^64 draws. Scores that are
  // less for certain are not computed: few are left, and a score takes three logarithms.
  const double whole = is_whole ? 1.0 : sm.rests[accepted];
  const int least = (int)floor((log(whole) - 5.0) * 1.4426950408889634);
  Drawn best = {0, 0x7FFFFFFF, 0};
  const int first = block * kTestPlaces;
#pragma unroll 1
  for (int i = thread; i < kTestPlaces; i += THREADS) {
    const double weight = excess_of(sm, i, accepted, sm.shares[accepted], is_whole);
    if (weight <= 0) continue;
    const int token = first + i;
    const uint4 bits = round_bits(seed, anchor + accepted + 1, kPurposeResidual, anchor, token / 4);
    const u32 low = token & 1 ? bits.y : bits.x, high = token & 1 ? bits.w : bits.z;
    const u32 word = token & 2 ? high : low;
    if (most_score(weight, word) < least) continue;
    best.keep(order_of(log(weight) + (double)gumbel(word)), token);
  }
  best.keep_best_of_warp();
  if (lane == 0) sm.drawn[warp] = best;
  __syncthreads();
  if (thread == 0) {
    for (int q = 1; q < WARPS; q++) best.keep(sm.drawn[q].score, sm.drawn[q].token);
    exchange->drawn[block] = best;
    sm.is_last = arrive(&exchange->arrived) == (meetings + 1) * BLOCKS - 1;
  }
  __syncthreads();
  if (!sm.is_last || warp > 0) return;
  best = {0, 0x7FFFFFFF, 0};
  for (int b = lane; b < BLOCKS; b += 32)
    best.keep(load_act_u64(&exchange->drawn[b].score), load_act_int(&exchange->drawn[b].token));
  best.keep_best_of_warp();
  if (lane) return;
  exchange->arrived = 0;
  state->accepted = accepted;
  state->token = best.token;
}
