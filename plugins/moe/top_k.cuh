// Routing: the TOP_K experts of each token, which of them this rank holds, and the step's distinct
// ones. Every block computes it for itself. Experts in falling order of score + bias, ties to the
// lowest id; weights are s / (sum s + 1e-20) * scale.
#ifndef INK_MOE_TOP_K_CUH
#define INK_MOE_TOP_K_CUH
#include "weights.cuh"

// NARROW: places for no more tokens than there can be, so that another block fits beside this one.
#ifndef NARROW
#define NARROW 0
#endif
constexpr int ROUTED = NARROW ? TOKENS : MAX_TOKENS, SLOTS = ROUTED * TOP_K;
constexpr int WORDS = (OWN_EXPERTS + 31) / 32;
// CHOICE_WARPS share the choice of a token's experts, LANE_EXPERTS in a row a lane.
constexpr int LANE_EXPERTS = EXPERTS > 384 ? 8 : 4;
constexpr int CHOICE_WARPS = (EXPERTS + LANE_EXPERTS * 32 - 1) / (LANE_EXPERTS * 32);
constexpr int CANDIDATES = CHOICE_WARPS * TOP_K;  // of a token
static_assert(EXPERTS <= 512 && OWN_EXPERTS <= EXPERTS, "at most 512 experts");
static_assert(HAS_RANK || OWN_EXPERTS == EXPERTS, "all experts, or some of them");
static_assert(TOP_K <= 8 && TOP_K <= EXPERTS, "at most 8 experts a token");
static_assert(WORDS <= WARPS, "a warp for each word");
static_assert(CHOICE_WARPS * TOKENS <= WARPS && CANDIDATES <= WARPS, "a warp for each");
constexpr u8 NO_SLOT = 255;
// Whether it is known ahead how many experts are distinct, and so all of a stage but its expert.
constexpr bool IS_KNOWN = ONE_TOKEN && !HAS_RANK;

// A token's slots are its experts of this rank in rising order; "own" numbers count from the rank's
// first expert. Distinct experts are in rising order, too, or, if their number is known, in that of
// their ranks, which are there first.
struct Route {
  float weight[ROUTED][TOP_K];  // of each slot
  float gate_unit[SLOTS], down_unit[SLOTS];  // of each distinct expert: what a sum is multiplied by
  u32 bits[WORDS];
  u16 expert[SLOTS];      // own numbers of the distinct experts
  u8 slot[SLOTS][MAX_TOKENS];  // of a distinct expert for a token, or NO_SLOT
  u8 index[ROUTED][TOP_K];  // distinct expert of a slot
  u8 num_slots[MAX_TOKENS];
};

// What one lane of warp t < T knows of token t: the expert of rank `lane`.
struct Choice {
  float score = 0;
  int expert = 0;
};

// Bits that order as the floats do.
INK_DEVICE u32 ordered(float x) {
  const u32 bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Of a lane's experts, from `first` on: scores or biases.
struct PerExpert {
  float value[LANE_EXPERTS];
};
INK_DEVICE int first_of_lane() {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  return (warp % CHOICE_WARPS * 32 + lane) * LANE_EXPERTS;
}
INK_DEVICE int token_of_warp() { return (int)(threadIdx.x >> 5) / CHOICE_WARPS; }
INK_DEVICE PerExpert load_bias(const float* bias) {
  const int first = first_of_lane();
  PerExpert b;
#pragma unroll
  for (int i = 0; i < LANE_EXPERTS; i++)
    b.value[i] = first + i < EXPERTS ? load_weight_float(bias + first + i) : 0.f;
  return b;
}
// scores: of the warp's token.
INK_DEVICE PerExpert load_scores(const float* scores) {
  const int first = first_of_lane();
  PerExpert s;
#pragma unroll
  for (int i = 0; i < LANE_EXPERTS; i++)
    s.value[i] = first + i < EXPERTS ? load_act_float(scores + first + i) : 0.f;
  return s;
}

struct Candidates {
  u32 key[TOKENS][CANDIDATES];
  u16 id[TOKENS][CANDIDATES];
  u16 best[TOKENS][TOP_K];  // experts by rank
  u8 place[OWN_EXPERTS];    // of the distinct experts
};

// A route without a choice. All threads, before `top_experts` and a block barrier.
INK_DEVICE void clear_route(Candidates& c, Route& r) {
  const int tid = threadIdx.x;
  // Within bounds whatever the scores are.
  if (tid < TOKENS * TOP_K) (&c.best[0][0])[tid] = EXPERTS - 1;
  if (tid < WORDS) r.bits[tid] = 0;
#pragma unroll 1
  for (int i = tid; i < SLOTS * MAX_TOKENS / 4; i += WARPS * 32) ((u32*)r.slot)[i] = 0xFFFFFFFFu;
  if (tid < SLOTS) (&r.index[0][0])[tid] = 0;  // slots that are not there are read, too
}

// The choice of T tokens. The best TOP_K of a warp's experts are candidates, in falling order; a
// candidate's rank is the number of better ones of its token, which a warp counts. Of two equal
// keys the one of the lower place has the lower id. Gives `best`, and the bits of the route. All
// threads; contains block barriers, also at the end.
INK_DEVICE void top_experts(const PerExpert& score, const PerExpert& bias, int first_expert, int T,
                            Candidates& c, Route& r) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = token_of_warp();
  if (token < T) {
    u32 key[LANE_EXPERTS];
    int id[LANE_EXPERTS];
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; i++) {
      id[i] = first_of_lane() + i;
      key[i] = id[i] < EXPERTS ? ordered(score.value[i] + bias.value[i]) : 0;
    }
    // In falling order, of equal ones the lower id first: a round is about the lanes' first ones.
#pragma unroll
    for (int n = LANE_EXPERTS - 1; n > 0; n--)
#pragma unroll
      for (int i = 0; i < n; i++) {
        const bool is_less = key[i] < key[i + 1];
        const u32 low = min(key[i], key[i + 1]);
        const int id_of_low = is_less ? id[i] : id[i + 1];
        key[i] = max(key[i], key[i + 1]);
        id[i] = is_less ? id[i + 1] : id[i];
        key[i + 1] = low;
        id[i + 1] = id_of_low;
      }
    const int at = warp % CHOICE_WARPS * TOP_K;
    const u32 lower_lanes = (1u << lane) - 1;
#pragma unroll
    for (int k = 0; k < TOP_K; k++) {
      const u32 best = __reduce_max_sync(INK_FULL_WARP, key[0]);
      const u32 holders = __ballot_sync(INK_FULL_WARP, key[0] == best);
      if (key[0] == best && (holders & lower_lanes) == 0) {
        c.key[token][at + k] = best;
        c.id[token][at + k] = id[0];
#pragma unroll
        for (int i = 0; i < LANE_EXPERTS; i++) {
          key[i] = i + 1 < LANE_EXPERTS ? key[i + 1] : 0;
          id[i] = id[i + 1 < LANE_EXPERTS ? i + 1 : i];
        }
      }
    }
  }
  __syncthreads();
  int rank = TOP_K;  // lane t: of candidate `warp` of token t
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    const u32 key = lane < CANDIDATES ? c.key[t][lane] : 0;
    const u32 own = warp < CANDIDATES ? c.key[t][warp] : 0;
    const bool is_better = key > own || (key == own && lane < warp);
    const int num_better = __popc(__ballot_sync(INK_FULL_WARP, is_better && lane < CANDIDATES));
    if (lane == t) rank = num_better;
  }
  if (lane < T && warp < CANDIDATES && rank < TOP_K) {
    const int expert = min((int)c.id[lane][warp], EXPERTS - 1), own = expert - first_expert;
    c.best[lane][rank] = expert;
    if (IS_KNOWN) c.place[expert] = rank;
    if (!HAS_RANK || (u32)own < OWN_EXPERTS) atomicOr(&r.bits[own >> 5], 1u << (own & 31));
  }
  __syncthreads();
}

// Asks for the scores of the ranks.
INK_DEVICE Choice load_choice(const float* scores, int T, const Candidates& c) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Choice choice;
  if (warp < T && lane < TOP_K) {
    choice.expert = c.best[warp][lane];
    choice.score = load_act_float(scores + warp * EXPERTS + choice.expert);
  }
  return choice;
}

// The distinct experts, from the bits, to be read behind a block barrier. gate_unit, down_unit: of
// own expert number `tid`. All threads; gives the number of distinct experts.
INK_DEVICE int route(float gate_unit, float down_unit, Candidates& c, Route& r) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const u32 word = lane < WORDS ? r.bits[lane] : 0, count = (u32)__popc(word);
  // An expert's place is the number of those below it, or its rank.
  const int before = (int)__reduce_add_sync(INK_FULL_WARP, lane < warp ? count : 0u);
  const u32 own = __shfl_sync(INK_FULL_WARP, word, warp);
  if (own >> lane & 1) {
    const int place = IS_KNOWN ? c.place[tid] : before + __popc(own & ((1u << lane) - 1));
    c.place[tid] = place;
    r.expert[place] = tid;
    r.gate_unit[place] = gate_unit;
    r.down_unit[place] = down_unit;
  }
  return (int)__reduce_add_sync(INK_FULL_WARP, count);
}

// Slots and weights, once `route` can be read; to be read behind another block barrier.
INK_DEVICE void weigh(const Choice& choice, int first_expert, float scale, int T,
                      const Candidates& c, Route& r) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (warp >= T) return;
  int own = lane < TOP_K ? choice.expert - first_expert : -1;  // own number, or -1
  if (own < 0 || own >= OWN_EXPERTS) own = -1;
  int slot = 0, count = 0;
  float sum = 0;
#pragma unroll
  for (int k = 0; k < TOP_K; k++) {
    const int other = __shfl_sync(INK_FULL_WARP, own, k);
    slot += other >= 0 && other < own;
    count += other >= 0;
    sum += __shfl_sync(INK_FULL_WARP, choice.score, k);
  }
  if (lane == 0) r.num_slots[warp] = count;
  if (own < 0) return;
  const int place = c.place[own];
  r.slot[place][warp] = slot;
  r.index[warp][slot] = place;
  r.weight[warp][slot] = choice.score / (sum + 1e-20f) * scale;
}
#endif  // INK_MOE_TOP_K_CUH
