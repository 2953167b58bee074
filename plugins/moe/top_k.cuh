// Routing: the TOP_K experts of each token, which of them this rank holds, and the step's distinct
// ones. Every block computes it for itself. Experts in falling order of score + bias, ties to the
// lowest id; weights are s / (sum s + 1e-20) * scale.
#ifndef INK_MOE_TOP_K_CUH
#define INK_MOE_TOP_K_CUH
#include "weights.cuh"

constexpr int SLOTS = MAX_TOKENS * TOP_K;
constexpr int LANE_EXPERTS = (EXPERTS + 31) / 32;  // of a lane: lane, lane + 32, ...
constexpr int WORDS = (OWN_EXPERTS + 31) / 32;
static_assert(EXPERTS <= 512 && OWN_EXPERTS <= EXPERTS, "at most 512 experts");
static_assert(TOP_K <= 8 && TOP_K <= EXPERTS, "at most 8 experts a token");
constexpr u8 NO_SLOT = 255;

// A token's slots are its experts of this rank in rising order; "own" numbers count from the rank's
// first expert.
struct Route {
  float weight[MAX_TOKENS][TOP_K];  // of each slot
  float gate_unit[SLOTS], down_unit[SLOTS];  // of each distinct expert: what a sum is multiplied by
  u32 bits[WORDS];
  int num_experts;        // distinct
  u16 expert[SLOTS];      // own numbers of the distinct experts, rising
  u8 slot[SLOTS][MAX_TOKENS];  // of a distinct expert for a token, or NO_SLOT
  u8 index[MAX_TOKENS][TOP_K];  // distinct expert of a slot
  u8 num_slots[MAX_TOKENS];
};

// What one lane knows of its token's choice, for `weigh`.
struct Choice {
  float score = 0;  // of rank `lane`
  int slot = -1;    // of rank `lane`, or none
};

// Bits that order as the floats do.
INK_DEVICE u32 ordered(float x) {
  const u32 bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A lane's experts, of their scores or of the bias.
struct PerExpert {
  float value[LANE_EXPERTS];
};
INK_DEVICE PerExpert load_bias(const float* bias, int lane) {
  const float* const from = bias + lane;
  PerExpert b;
#pragma unroll
  for (int i = 0; i < LANE_EXPERTS; i++)
    b.value[i] = i * 32 + lane < EXPERTS ? load_weight_float(from + i * 32) : 0.f;
  return b;
}
INK_DEVICE PerExpert load_scores(const float* scores, int lane) {
  const float* const from = scores + lane;
  PerExpert s;
#pragma unroll
  for (int i = 0; i < LANE_EXPERTS; i++)
    s.value[i] = i * 32 + lane < EXPERTS ? load_act_float(from + i * 32) : 0.f;
  return s;
}

// Lane k < TOP_K: the expert of rank k of a token.
INK_DEVICE int top_expert(const PerExpert& score, const PerExpert& bias, int lane) {
  u32 key[LANE_EXPERTS];
#pragma unroll
  for (int i = 0; i < LANE_EXPERTS; i++)
    key[i] = i * 32 + lane < EXPERTS ? ordered(score.value[i] + bias.value[i]) : 0;
  int mine = 0;
#pragma unroll 1  // few instructions, which a launch must fetch before it can run them
  for (int k = 0; k < TOP_K; k++) {
    u32 best = key[0];
#pragma unroll
    for (int i = 1; i < LANE_EXPERTS; i++) best = max(best, key[i]);
    best = __reduce_max_sync(INK_FULL_WARP, best);
    u32 id = EXPERTS - 1;  // within bounds whatever the scores are
#pragma unroll
    for (int i = LANE_EXPERTS - 1; i >= 0; i--) id = key[i] == best ? i * 32 + lane : id;
    id = ~__reduce_max_sync(INK_FULL_WARP, ~id);  // the lowest
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; i++) key[i] = id == i * 32 + lane ? 0 : key[i];
    if (lane == k) mine = (int)id;
  }
  return min(mine, EXPERTS - 1);
}

// One token's choice by all warps: the best TOP_K of every 32 experts are candidates, in falling
// order; a candidate's rank is the number of better ones, which COMPARERS threads count. Of two
// equal keys the one of the lower place has the lower id.
constexpr int CANDIDATES = LANE_EXPERTS * TOP_K;
struct Candidates {
  u32 key[CANDIDATES];
  u16 id[CANDIDATES];
  u16 best[TOP_K];  // experts by rank
  float gate_unit[OWN_EXPERTS], down_unit[OWN_EXPERTS];
};
// key: of expert `tid`, or 0. All threads; contains block barriers, also at the end.
template <int THREADS>
INK_DEVICE void top_experts(u32 key, Candidates& c) {
  constexpr int COMPARERS = CANDIDATES * 8 <= THREADS   ? 8
                            : CANDIDATES * 4 <= THREADS ? 4
                            : CANDIDATES * 2 <= THREADS ? 2
                                                        : 1;
  static_assert(CANDIDATES * COMPARERS <= THREADS, "a thread for each candidate");
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (tid < TOP_K) c.best[tid] = EXPERTS - 1;  // within bounds whatever the scores are
  if (warp < LANE_EXPERTS) {
    u32 mine = 0;
    int id = 0;
#pragma unroll
    for (int k = 0; k < TOP_K; k++) {
      const u32 best = __reduce_max_sync(INK_FULL_WARP, key);
      const int winner = __ffs(__ballot_sync(INK_FULL_WARP, key == best)) - 1;
      if (lane == k) mine = best, id = winner;
      if (lane == winner) key = 0;
    }
    if (lane < TOP_K) {
      c.key[warp * TOP_K + lane] = mine;
      c.id[warp * TOP_K + lane] = warp * 32 + id;
    }
  }
  __syncthreads();
  const int place = tid / COMPARERS, first = tid % COMPARERS;
  const bool has_place = place < CANDIDATES;
  const u32 own = c.key[has_place ? place : 0];
  int better = 0;
#pragma unroll
  for (int n = 0; n < (CANDIDATES + COMPARERS - 1) / COMPARERS; n++) {
    const int other = first + n * COMPARERS;
    if (CANDIDATES % COMPARERS && other >= CANDIDATES) break;
    const u32 of_other = c.key[other];
    better += of_other > own || (of_other == own && other < place);
  }
#pragma unroll
  for (int o = 1; o < COMPARERS; o <<= 1) better += __shfl_xor_sync(INK_FULL_WARP, better, o);
  if (has_place && first == 0 && better < TOP_K)
    c.best[better] = min((int)c.id[place], EXPERTS - 1);
  __syncthreads();
}

// A route without a choice. All threads, before `route` and a block barrier.
template <int THREADS>
INK_DEVICE void clear_route(Route& r) {
  const int tid = threadIdx.x;
  if (tid < WORDS) r.bits[tid] = 0;
#pragma unroll 1
  for (int i = tid; i < SLOTS * MAX_TOKENS / 4; i += THREADS) ((u32*)r.slot)[i] = 0xFFFFFFFFu;
  if (tid < SLOTS) (&r.index[0][0])[tid] = 0;  // slots that are not there are read, too
}

// Of a warp, of its token: `expert` of rank `lane` gets its place among the rank's own ones.
// Gives its own number, or -1.
INK_DEVICE int slot_of(int expert, int first_expert, int lane, Choice& choice, int& count) {
  int own = -1, below = 0;
  if (lane < TOP_K) own = expert - first_expert;
  if (own < 0 || own >= OWN_EXPERTS) own = -1;
  count = 0;
#pragma unroll
  for (int k = 0; k < TOP_K; k++) {
    const int other = __shfl_sync(INK_FULL_WARP, own, k);
    below += other >= 0 && other < own;
    count += other >= 0;
  }
  if (own >= 0) choice.slot = below;
  return own;
}

// The route of one token whose experts are known; warp 0 writes it, for all to read behind a block
// barrier.
INK_DEVICE Choice route_one(const float* scores, const Candidates& c, int first_expert, Route& r) {
  const int lane = threadIdx.x & 31;
  Choice choice;
  if (threadIdx.x >= 32) return choice;
  const int expert = c.best[lane < TOP_K ? lane : 0];
  if (lane < TOP_K) choice.score = load_act_float(scores + expert);
  int count;
  const int own = slot_of(expert, first_expert, lane, choice, count);
  if (own >= 0) {
    r.expert[choice.slot] = own;
    r.slot[choice.slot][0] = choice.slot;
    r.index[0][choice.slot] = choice.slot;
    r.gate_unit[choice.slot] = c.gate_unit[own];
    r.down_unit[choice.slot] = c.down_unit[own];
  }
  if (lane == 0) r.num_slots[0] = r.num_experts = count;
  return choice;
}
// T tokens, all threads of the block; contains block barriers, also at the end. score: of token
// `warp`. weights: those of the slots come later, see `weigh`. gate_unit, down_unit: of own expert
// number `tid`.
template <int THREADS>
INK_DEVICE Choice route(const float* scores, const PerExpert& score, const PerExpert& bias,
                        int first_expert, int T, float gate_unit, float down_unit, Route& r) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  Choice choice;
  int own = -1;  // own number of rank `lane`
  if (warp < T) {
    const int expert = top_expert(score, bias, lane);
    if (lane < TOP_K) choice.score = load_act_float(scores + warp * EXPERTS + expert);
    int count;
    own = slot_of(expert, first_expert, lane, choice, count);
    if (lane == 0) r.num_slots[warp] = count;
    if (own >= 0) atomicOr(&r.bits[own >> 5], 1u << (own & 31));
  }
  __syncthreads();
  // A distinct expert's place is the number of those below it.
  auto place_of = [&](int e) {
    int place = __popc(r.bits[e >> 5] & ((1u << (e & 31)) - 1));
#pragma unroll
    for (int w = 0; w < WORDS; w++) place += w < e >> 5 ? __popc(r.bits[w]) : 0;
    return place;
  };
  if (tid < OWN_EXPERTS && r.bits[tid >> 5] >> (tid & 31) & 1) {
    const int place = place_of(tid);
    r.expert[place] = tid;
    r.gate_unit[place] = gate_unit;
    r.down_unit[place] = down_unit;
  }
  if (own >= 0) {
    const int place = place_of(own);
    r.slot[place][warp] = choice.slot;
    r.index[warp][choice.slot] = place;
  }
  if (tid == THREADS - 1) {
    int count = 0;
#pragma unroll
    for (int w = 0; w < WORDS; w++) count += __popc(r.bits[w]);
    r.num_experts = count;
  }
  __syncthreads();
  return choice;
}
// The weights, from what `route` gave; to be read behind a block barrier.
INK_DEVICE void weigh(const Choice& choice, float scale, int T, Route& r) {
  const int warp = threadIdx.x >> 5;
  if (warp >= T) return;
  float sum = 0;
#pragma unroll
  for (int k = 0; k < TOP_K; k++) sum += __shfl_sync(INK_FULL_WARP, choice.score, k);
  if (choice.slot >= 0) r.weight[warp][choice.slot] = choice.score / (sum + 1e-20f) * scale;
}
#endif  // INK_MOE_TOP_K_CUH
