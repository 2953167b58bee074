// The filters of a row of logits that PARTS blocks share: the least key that they keep.
#pragma once
#include "ratio.cuh"

constexpr u32 kListed = 256, kRanked = 1024;  // candidates of a part, and of a row
struct RowsShared {
  Shared sample;
  double sums[WARPS];
  Exponential exponential;
  u32 listed, ranked, is_full, unused;
};
// What the parts of a row hand to each other of a threshold's bin.
struct Lists {
  u32 counts[kRows][PARTS], keys[kRows][PARTS][kListed];
};

// Bins of 1/64 below the largest; the lowest one has all that is farther than 32 away.
INK_DEVICE u32 bin_of_key(u32 key, float largest) {
  const float distance = (largest - value_of(key)) * 64.f;
  return BINS - 1 - (u32)fminf(distance, (float)(BINS - 1));
}
template <bool TOP_P>
INK_DEVICE u64 fixed_weight(const RowsShared& sm, u32 key, float largest) {
  if (!TOP_P) return 1;
  return (u64)(sm.exponential.weight(value_of(key), largest) * 70368744177664.0 + 0.5);  // 2^46
}

// What `select` of sample.cu finds, faster where few keys are near the threshold: a histogram by
// distance from the largest, then the keys of one bin against each other. Whole numbers are
// added, as there. 0: the keys are too far away or too many.
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
      const u64 weight = fixed_weight<TOP_P>(all_sm, key, largest);
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
#pragma unroll 1
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
      if (TOP_P) weights[first + i] = fixed_weight<TOP_P>(all_sm, key, largest);
    }
  }
  __syncthreads();
  if (all_sm.is_full) return 0;
  const u32 ranked = all_sm.ranked;
#pragma unroll 1
  for (u32 i = tid; i < ranked; i += THREADS) {
    const u32 key = sm.low[i];
    u64 above = sm.above, with = sm.above;
#pragma unroll 1
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
