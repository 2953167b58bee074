// The ratio test of a round's drafts, block verification: runtime/spec/accept.py has the formulas,
// the keys of the noise and the fallback, and these kernels decide as it does on the same logits,
// but for the rounding of float64.
//
//   ratio_rows   PARTS blocks a row: the row's filters, by the code of w4a16/sample.cu, and its
//                parts' sums of exp(scaled - max). Parts wait for each other only with filters.
//   ratio_test   BLOCKS blocks, each with the same tokens of all rows: the ratios P_i, sums R_i of
//                what P_i p has more than q, which all blocks wait for; then each decides for itself,
//                and together they draw the token behind the accepted drafts.
//
// Sums are float64 and added in an order that depends on the launch alone, so ranks that read the
// same logits decide the same. Where a row's largest logit is not finite the row is certain of it.
//
// A step's logits are of the drafts it has read: width in the state is at most DRAFT_ROWS.
#include "ratio.cuh"

constexpr u32 kListed = 256, kRanked = 1024;  // candidates of a part, and of a row
struct RowsShared {
  Shared sample;
  double sums[WARPS];
  u32 listed, ranked, is_full, unused;
};
// What the parts of a row hand to each other of a threshold's bin.
struct Lists {
  u32 counts[kRows][PARTS], keys[kRows][PARTS][kListed];
};
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

// Bins of 1/64 below the largest; the lowest one has all that is farther than 32 away.
INK_DEVICE u32 bin_of_key(u32 key, float largest) {
  const float distance = (largest - value_of(key)) * 64.f;
  return BINS - 1 - (u32)fminf(distance, (float)(BINS - 1));
}
template <bool TOP_P>
INK_DEVICE u64 fixed_weight(u32 key, float largest) {
  if (!TOP_P) return 1;
  return (u64)(weight_of(value_of(key), largest) * 70368744177664.0 + 0.5);  // 2^46
}

// What `select` of sample.cu finds, faster where few keys are near the threshold: a histogram by
// distance from the largest, then the keys of one bin against each other. The same whole numbers are
// added, so the key is the same. 0: the keys are too far away or too many.
template <bool TOP_P>
INK_DEVICE u32 find_threshold(Row& row, RowsShared& all_sm, Lists* lists, int number, u32 floor,
                              double goal, float largest) {
  Shared& sm = row.sm;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int count = min(PART_QUADS, QUADS - row.part * PART_QUADS);
  row.clear();
#pragma unroll 1
  for (int i = tid; i < count; i += THREADS) {
    const uint4 keys = sm.keys[i];
    if (max(max(keys.x, keys.y), max(keys.z, keys.w)) < floor) continue;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 key = word_of(keys, j), bin = bin_of_key(key, largest);
      if (key < floor || (!TOP_P && bin == 0)) continue;
      const u64 weight = fixed_weight<TOP_P>(key, largest);
      if (weight) row.add(bin, weight);
    }
  }
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
  if (tid == 0) sm.digit = all_sm.listed = all_sm.ranked = all_sm.is_full = 0;
  __syncthreads();
  u64 sum = up_to - own, all = 0;
  for (int q = 0; q < WARPS; q++) {
    if (q < warp) sum += sm.sums[q];
    all += sm.sums[q];
  }
  if (TOP_P) goal = fmax(goal * (double)all, 1.0);  // a share that is 0 in float32
#pragma unroll
  for (int i = 0; i < BINS_OF_THREAD; i++) {
    if ((double)sum < goal && (double)(sum + sums[i]) >= goal) {  // in one bin of one thread
      sm.above = sum;
      sm.digit = Row::bin_of(i);
    }
    sum += sums[i];
  }
  __syncthreads();
  const u32 bin = sm.digit;
  if (bin == 0) return 0;

  u32* list = lists->keys[number][row.part];
#pragma unroll 1
  for (int i = tid; i < 4 * count; i += THREADS) {
    const u32 key = ((const u32*)sm.keys)[i];
    if (key < floor || bin_of_key(key, largest) != bin) continue;
    const u32 place = atomicAdd(&all_sm.listed, 1);
    if (place < kListed) list[place] = key;
  }
  __syncthreads();
  if (tid == 0) lists->counts[number][row.part] = all_sm.listed;
  if (PARTS > 1) {
    row.meet();
    // As `gather` does, which knows only of its own meetings.
    if (row.meetings > 1)
      Row::wipe(row.exchange->bins[(row.meetings - 2) % REGIONS], row.part, PARTS);
  } else {
    __syncthreads();
  }
  // The histogram's memory holds the candidates, in any order, and their weights.
  u64* weights = (u64*)sm.high;
  for (int part = warp; part < PARTS; part += WARPS) {
    const u32 length = load_act4(&lists->counts[number][part]);
    u32 first = 0;
    if (lane == 0) first = atomicAdd(&all_sm.ranked, length);
    first = __shfl_sync(INK_FULL_WARP, first, 0);
    if (length > kListed || first + length > kRanked) {
      all_sm.is_full = 1;
      continue;
    }
    for (u32 i = lane; i < length; i += 32) {
      const u32 key = load_act4(&lists->keys[number][part][i]);
      sm.low[first + i] = key;
      if (TOP_P) weights[first + i] = fixed_weight<TOP_P>(key, largest);
    }
  }
  __syncthreads();
  if (all_sm.is_full) return 0;
  const u32 ranked = all_sm.ranked;
  for (u32 i = tid; i < ranked; i += THREADS) {
    const u32 key = sm.low[i];
    u64 above = sm.above, with = sm.above;
    for (u32 j = 0; j < ranked; j++) {
      const u64 weight = TOP_P ? weights[j] : 1;
      if (sm.low[j] > key) above += weight;
      if (sm.low[j] >= key) with += weight;
    }
    if ((double)above < goal && (double)with >= goal) sm.digit = key;  // equal keys alone do
  }
  __syncthreads();
  return sm.digit;
}

// The least key that the filters of plugins/sampling.py keep; `largest` is finite.
INK_DEVICE u32 find_floor(Row& row, RowsShared& sm, Lists* lists, int number, float largest,
                          int top_k, float top_p, float min_p) {
  u32 floor = 1;
  if (min_p > 0) floor = max(floor, key_of(largest + (float)log((double)min_p)));
  if (top_k > 0 && top_k < VOCAB) {
    u32 key = find_threshold<false>(row, sm, lists, number, 1, top_k, largest);
    if (key == 0) key = select<false>(row, 1, top_k, largest);
    floor = max(floor, key);
  }
  if (top_p < 1) {
    const u32 weightless = max(floor, key_of(largest - 33.f));  // as in `sample`
    u32 key = find_threshold<true>(row, sm, lists, number, weightless, top_p, largest);
    if (key == 0) key = select<true>(row, weightless, top_p, largest);
    floor = max(floor, key);
  }
  return floor;
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
        sum += key >= floor ? weight_of(value_of(key), largest) : 0.0;
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

// exp(logit - largest) * inverse is the probability, unless the row is certain of a token.
struct Distribution {
  double inverse;
  float largest;
  u32 floor;
  int token, is_certain;

  INK_DEVICE double probability(u32 key, int its_token) const {
    if (is_certain) return its_token == token ? 1.0 : 0.0;
    return key >= floor ? weight_of(value_of(key), largest) * inverse : 0.0;
  }
};
// The best score and its token.
struct Drawn {
  u64 score;  // 0: none
  int token, unused;

  INK_DEVICE void keep(u64 other, int its_token) {
    if (other > score || (other == score && its_token < token)) score = other, token = its_token;
  }
  INK_DEVICE void keep_best_of_warp() {
    const u64 best = warp_max_u64(score);
    token = (int)~__reduce_max_sync(INK_FULL_WARP, score == best ? ~(u32)token : 0u);
    score = best;
  }
};
struct TestShared {
  uint4 keys[kRows][kTestQuads];
  Distribution rows[kRows];
  double shares[kWidths + 1], rests[kWidths], sums[kWidths][WARPS];
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

// A row's distribution from its parts, by a warp.
INK_DEVICE Distribution combine(const RowParts* rows, int number) {
  constexpr int kOfLane = (PARTS + 31) / 32;
  const RowPart* parts = rows->parts[number];
  u64 own[kOfLane], best = 0;
  double sums[kOfLane], sum = 0;
#pragma unroll
  for (int j = 0; j < kOfLane; j++) {
    const int part = j * 32 + (int)threadIdx.x % 32;
    own[j] = part < PARTS ? load_act_u64(&parts[part].best) : 0;
    sums[j] = part < PARTS ? load_act_double(&parts[part].sum) : 0.0;
    best = max(best, own[j]);
  }
  const u32 floor = load_act4(rows->floors + number);
  best = warp_max_u64(best);
  const float largest = largest_of(best);
  if (is_finite(largest)) {
#pragma unroll
    for (int j = 0; j < kOfLane; j++)
      if (own[j]) sum += sums[j] * weight_of(largest_of(own[j]), largest);
  }
  sum = warp_sum_double(sum);
  return {1.0 / sum, largest, floor, token_of(best), !is_finite(largest)};
}

// Keys of the block's tokens in all rows that count, of which row i is number row_of(i).
struct Loading {
  static constexpr int kOfThread = (kTestPlaces + THREADS - 1) / THREADS;
  static constexpr int kAtOnce = kBatch / kOfThread ? kBatch / kOfThread : 1;  // rows
  float x[kAtOnce][kOfThread];
  int width;

  INK_DEVICE int num_rows() const {
    return 2 * width + 1;
  }
  INK_DEVICE int row_of(int i) const {
    return i <= width ? i : TARGET_ROWS + i - width - 1;
  }
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
  const double p = sm.rows[place].probability(p_keys[i], token);
  if (is_whole || p == 0) return p;
  const u32* q_keys = (const u32*)sm.keys[TARGET_ROWS + place];
  return fmax(share * p - sm.rows[TARGET_ROWS + place].probability(q_keys[i], token), 0.0);
}

// drafts: of the step's tokens those behind the anchor. The verdict goes to `state`, which nothing
// else writes meanwhile.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
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
      const Distribution row = combine(rows, r);
      if (lane == 0) sm.rows[r] = row;
    }
    loading.keep(i, sm, scale);
  }
  __syncthreads();
  if (warp == 0) {
    double ratio = 0;
    if (has_draft) {
      const double q = sm.rows[TARGET_ROWS + lane].probability(key_of(q_logit / scale), draft);
      // A draft that q cannot give never counts.
      if (q > 0) ratio = sm.rows[lane].probability(key_of(p_logit / scale), draft) / q;
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

  Drawn best = {0, 0x7FFFFFFF, 0};
  const int first = block * kTestPlaces;
#pragma unroll 1
  for (int i = thread; i < kTestPlaces; i += THREADS) {
    const double weight = excess_of(sm, i, accepted, sm.shares[accepted], is_whole);
    if (weight <= 0) continue;
    const int token = first + i;
    const uint4 bits = round_bits(seed, anchor + accepted + 1, kPurposeResidual, anchor, token / 4);
    const u32 low = token & 1 ? bits.y : bits.x, high = token & 1 ? bits.w : bits.z;
    best.keep(order_of(log(weight) + (double)gumbel(token & 2 ? high : low)), token);
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
