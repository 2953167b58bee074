// A round of speculative decoding but for its steps: what `Speculator.run` decides on the host
// (runtime/spec/round.py), for a graph that needs no host. state.cuh has the order of the kernels.
//
// Every rank decides for itself, from the same bits. What a kernel reads of the state before
// pdl_wait() was written in front of a conditional node or the graph, so by a kernel that has
// ended.
#include "device.cuh"
#include "graph.cuh"
#include "noise.cuh"
#include "policy.cuh"
#include "state.cuh"

using round_policy::leading;
using round_policy::Policy;

// runtime/noise.py's ACCEPT, of draft j of a round: the coins of the ratio test.
INK_DEVICE double acceptance_coin(u64 seed, int anchor, int j) {
  constexpr u32 kAccept = 2;
  const u32 place = (u32)anchor + 1 + j;
  const u32 bits =
      philox4x32(make_uint4(0, place, kAccept, (u32)anchor), (u32)seed, (u32)(seed >> 32)).x;
  return __dmul_rn(__dadd_rn((double)bits, 0.5), 1.0 / 4294967296.0);
}

// What a record has beside the policy's state.
struct Outcome {
  int num_tokens, drafted, proposed, accepted, status, position;
};

// Shows the host what became of a round; lane i < num_tokens holds token i.
INK_DEVICE void publish(RoundRecord* ring, int round, const Outcome& outcome, int token,
                        const Policy& policy, int lane) {
  constexpr int kWords = (int)(sizeof(RoundRecord) / 8) - 1;
  static_assert(kWords <= 32 && sizeof(RoundRecord) % 8 == 0, "a word a lane");
  __shared__ RoundRecord record;
  if (ring == nullptr) return;
  if (lane <= kMaxDrafts) record.tokens[lane] = lane < outcome.num_tokens ? token : 0;
  if (lane == 0) {
    record.num_tokens = outcome.num_tokens;
    record.drafted = outcome.drafted;
    record.proposed = outcome.proposed;
    record.accepted = outcome.accepted;
    record.status = outcome.status;
    record.position = outcome.position;
  }
  round_policy::store(record.policy_state, policy, lane);
  __syncwarp();
  RoundRecord* to = ring + round % kRingRecords;
  if (lane < kWords) ((u64*)to)[lane] = ((const u64*)&record)[lane];  // at once, over the bus
  __syncwarp();
  if (lane == 0) store_release_system(&to->sequence, (u64)round + 1);
}

extern "C" __global__ void __launch_bounds__(32)
    begin_round(RoundState* state, int* num_tokens, const int* position, RoundRecord* ring,
                const int* error, u64 draft_handle, u64 width_handle) {
  const int lane = threadIdx.x;
  Policy policy = round_policy::load(state->policy_state, lane);
  const int start = *position, round = state->round;
  const round_policy::Costs costs = round_policy::find_costs(*state, start, lane);
  const int writable = state->writable_end - start;

  const int status = load_act_int(error) ? STATUS_ERROR
                     : state->finished   ? STATUS_FINISHED
                     : writable < 1      ? STATUS_FULL
                                         : STATUS_OK;
  if (status != STATUS_OK) {
    publish(ring, round, {0, 0, 0, 0, status, start}, 0, policy, lane);
    if (lane == 0) {
      state->round = round + 1;
      if (status == STATUS_ERROR) state->finished = 1;
    }
    return;
  }
  // The last row needs no draft of its own; its token is written in the next round.
  const int room = min(min(state->most, state->num_left - 1), writable - 1);
  bool is_plain = room < 1;
  if (!is_plain && state->policy == POLICY_COST) {
    is_plain = round_policy::skip(policy, *state, costs, lane) > 0;
    round_policy::store(state->policy_state, policy, lane);
    if (lane <= kMaxDrafts) state->seconds[lane] = costs.seconds;
  }
  if (lane == 0) {
    state->room = room;
    state->width = state->proposed = 0;
    *num_tokens = 1;
    if (is_plain)
      set_conditional(width_handle, state->case_of_width[0]);
    else
      set_conditional(draft_handle, 1);
  }
}

extern "C" __global__ void __launch_bounds__(32)
    choose_width(RoundState* state, const int* drafts, const float* confidences, int num_drafts,
                 int* tokens, int* num_tokens, u64 width_handle) {
  const int lane = threadIdx.x;
  const int count = min(num_drafts, state->room), rule = state->rule, kind = state->policy;
  const int vocab_size = state->vocab_size;
  const double forced = state->forced[min(lane, kMaxDrafts - 1)], threshold = state->threshold;
  const double seconds = lane <= kMaxDrafts ? state->seconds[lane] : 1.0;
  const int my_case = state->case_of_width[min(lane, kMaxDrafts)];
  Policy policy = round_policy::load(state->policy_state, lane);
  pdl_wait();
  const int draft = lane < count ? load_act_int(drafts + lane) : 0;
  double confidence = forced;
  if (rule != RULE_FORCED && confidences != nullptr)
    confidence = lane < count ? (double)load_act_float(confidences + lane) : 0.0;

  // Prompts may hold tokens that have no logit, outputs not.
  const int proposed = leading(lane < count && (u32)draft < (u32)vocab_size);
  int width = proposed;
  if (proposed > 0 && kind == POLICY_THRESHOLD)
    width = leading(lane < proposed && !(confidence < threshold));
  if (proposed > 0 && kind == POLICY_COST) {
    const bool has_confidence = rule == RULE_FORCED || confidences != nullptr;
    width = round_policy::choose(policy, *state, seconds, has_confidence, confidence, proposed,
                                 lane);
    round_policy::store(state->policy_state, policy, lane);
  }
  if (lane < width) tokens[1 + lane] = draft;
  if (lane == 0) {
    state->width = width;
    state->proposed = proposed;
    *num_tokens = 1 + width;
  }
  if (lane == width) set_conditional(width_handle, my_case);
}

extern "C" __global__ void __launch_bounds__(32)
    commit_round(RoundState* state, const int* drawn, int* tokens, int* position, RoundRecord* ring,
                 const int* error) {
  const int lane = threadIdx.x;
  const int rule = state->rule, width = state->width, proposed = state->proposed;
  const int kind = state->policy, round = state->round, num_left = state->num_left;
  const int start = *position, num_stops = state->num_stop_ids;
  const int draft = lane < width ? tokens[1 + lane] : 0;
  const int stops[2] = {state->stop_ids[lane], state->stop_ids[32 + lane]};
  static_assert(kMaxStopIds == 64, "two a lane");
  Policy policy = round_policy::load(state->policy_state, lane);
  const bool is_forced = rule == RULE_FORCED && lane < width &&
                         acceptance_coin(state->seed, start, lane) < state->forced[lane];
  pdl_wait();
  const bool has_failed = load_act_int(error) != 0;
  const int next = lane <= width ? load_act_int(drawn + lane) : 0;

  int accepted, last;
  if (rule == RULE_PROBABILISTIC && width > 0) {
    accepted = load_act_int(&state->accepted);
    last = load_act_int(&state->token);
  } else {
    accepted = leading(lane < width && (rule == RULE_FORCED ? is_forced : draft == next));
    last = __shfl_sync(INK_FULL_WARP, next, accepted);
  }
  Outcome outcome = {0, width, proposed, 0, STATUS_ERROR, start};
  if (!has_failed) {
    outcome = {accepted + 1, width, proposed, accepted, STATUS_OK, start + accepted + 1};
    if (kind == POLICY_COST && width > 0) round_policy::observe(policy, width, accepted, lane);
  }
  const int token = lane < accepted ? draft : last;
  bool stops_here = false;
#pragma unroll
  for (int i = 0; i <= kMaxDrafts; i++) {
    const int emitted = __shfl_sync(INK_FULL_WARP, token, i);
#pragma unroll
    for (int half = 0; half < 2; half++)
      stops_here |= i <= accepted && 32 * half + lane < num_stops && stops[half] == emitted;
  }
  const bool is_stopped = __ballot_sync(INK_FULL_WARP, stops_here) != 0;
  const int left = num_left - outcome.num_tokens;

  round_policy::store(state->policy_state, policy, lane);
  if (lane == 0) {
    state->round = round + 1;
    state->num_left = left;
    state->finished = has_failed || is_stopped || left <= 0;
    if (!has_failed) {
      tokens[0] = last;
      *position = outcome.position;
    }
  }
  publish(ring, round, outcome, token, policy, lane);
}
