// Width policies by one warp, bit for bit those of runtime/spec/width.py: double arithmetic in the
// same order, and no product is fused with a sum. All lanes take part and get the same answers.
#ifndef INK_ROUND_POLICY_CUH
#define INK_ROUND_POLICY_CUH
#include "device.cuh"
#include "state.cuh"

namespace round_policy {

// Lane j holds what is known of draft j; the rest is the same in all lanes.
struct Policy {
  double reached, accepted, unread;
  int num_rounds, num_plain, drafts_pay, last_width;
};
// Of one context; lane w holds the seconds of a round with w drafts.
struct Costs {
  double plain, seconds;
};

INK_DEVICE double broadcast(double x, int lane) {
  return __shfl_sync(INK_FULL_WARP, x, lane);
}
// How many lanes from the first on say yes.
INK_DEVICE int leading(bool yes) {
  const u32 all = __ballot_sync(INK_FULL_WARP, yes);
  return ~all ? __ffs(~all) - 1 : 32;
}
INK_DEVICE bool is_number(double x) {
  return x == x;
}
INK_DEVICE double no_number() {
  return __longlong_as_double(0x7FF8000000000000ll);
}

INK_DEVICE Policy load(const PolicyState& from, int lane) {
  const int place = min(lane, kMaxDrafts - 1);  // lanes behind hold what is not used
  return {from.reached[place], from.accepted[place], from.unread,    from.num_rounds,
          from.num_plain,      from.drafts_pay,      from.last_width};
}
INK_DEVICE void store(PolicyState& to, const Policy& policy, int lane) {
  if (lane < kMaxDrafts) {
    to.reached[lane] = policy.reached;
    to.accepted[lane] = policy.accepted;
  }
  if (lane == 0) {
    to.unread = policy.unread;
    to.num_rounds = policy.num_rounds;
    to.num_plain = policy.num_plain;
    to.drafts_pay = policy.drafts_pay;
    to.last_width = policy.last_width;
  }
}

// `round_costs`: the nearest context from above, behind the last that one's.
INK_DEVICE Costs find_costs(const RoundState& state, int context, int lane) {
  // A lane's own context, so that all loads are under way at once.
  double plain = state.plain[lane], seconds[kMaxDrafts + 1];
#pragma unroll
  for (int w = 0; w <= kMaxDrafts; w++) seconds[w] = state.rounds[lane][w];
  const int count = state.num_contexts;
  const bool is_below = lane < count && state.contexts[lane] < context;
  // Policies that know no costs may have no contexts.
  const int place = max(min(__popc(__ballot_sync(INK_FULL_WARP, is_below)), count - 1), 0);
  Costs costs = {broadcast(plain, place), 1.0};
#pragma unroll
  for (int w = 0; w <= kMaxDrafts; w++) {
    const double of_width = broadcast(seconds[w], place);
    if (lane == w) costs.seconds = of_width;
  }
  return costs;
}

// Whether the next round verifies everything.
INK_DEVICE bool is_exploring(const Policy& policy, int num_first, int explore_every) {
  return policy.num_rounds < num_first || (policy.num_rounds + 1) % explore_every == 0;
}
INK_DEVICE void see(Policy& policy, double acceptance) {
  policy.reached = __dadd_rn(__dmul_rn(0.98, policy.reached), 1.0);
  policy.accepted = __dadd_rn(__dmul_rn(0.98, policy.accepted), acceptance);
}

// Most tokens per second of widths 1..most, going by earlier rounds.
INK_DEVICE double best_expected(double rate, const Costs& costs, int most, int lane) {
  double survival = 1.0, tokens = 1.0, mine = 0.0;
#pragma unroll
  for (int place = 0; place < kMaxDrafts; place++) {
    survival = __dmul_rn(survival, broadcast(rate, place));
    tokens = __dadd_rn(tokens, survival);
    if (lane == place) mine = tokens;
  }
  double best = __ddiv_rn(mine, broadcast(costs.seconds, min(lane + 1, kMaxDrafts)));
  if (lane >= most) best = 0.0;
#pragma unroll
  for (int o = 4; o; o >>= 1) {  // of eight lanes, of which the last has nothing
    const double other = __shfl_xor_sync(INK_FULL_WARP, best, o);
    best = other > best ? other : best;
  }
  return broadcast(best, 0);
}

// `CostAware.skip`: plain steps to take from here on.
INK_DEVICE int skip(Policy& policy, const RoundState& state, const Costs& costs, int lane) {
  if (policy.num_plain == 0) {
    const int every = state.explore_every;
    if (is_exploring(policy, state.num_first, every)) return 0;
    const double rate = __ddiv_rn(policy.accepted, policy.reached);
    const double gain = __dmul_rn(best_expected(rate, costs, state.most, lane), costs.plain);
    const double above = __dadd_rn(1.0, state.margin);
    policy.drafts_pay = gain > (policy.drafts_pay ? __ddiv_rn(1.0, above) : above);
    if (policy.drafts_pay) return 0;
    policy.num_plain = every;
    // The round behind these explores.
    policy.num_rounds += (every - (policy.num_rounds + 1) % every) % every;
  }
  const int left = policy.num_plain--;
  if (policy.reached > 2.0) {
    policy.reached = __dmul_rn(policy.reached, 0.98);
    policy.accepted = __dmul_rn(policy.accepted, 0.98);
  }
  return left;
}

// `CostAware.choose`: lane j holds the confidence of draft j.
//
// For a width w that is reached, the wider ones v are compared with it independently of other
// widths. There are 28 pairs of 0 <= w < v <= 7, one a lane: rows of 7, row a has those of w = a
// and behind them those of w = 7 - a.
INK_DEVICE int choose(Policy& policy, const RoundState& state, double seconds, bool has_confidence,
                      double confidence, int most, int lane) {
  static_assert(kMaxDrafts == 7, "28 pairs");
  const bool explores = is_exploring(policy, state.num_first, state.explore_every);
  policy.num_rounds++;
  policy.unread = no_number();
  if (explores) return most;
  const double known = __ddiv_rn(policy.accepted, policy.reached);
  const double rate = has_confidence ? confidence : known;
  const int row = lane / 7, column = lane % 7;
  const bool is_first = column < 7 - row;
  const int from = is_first ? row : 7 - row, to = is_first ? row + 1 + column : column + 1;

  // tokens[w] = 1 + survival[0] + ... + survival[w - 1]
  double survival = 1.0, tokens = 1.0, here = 0.0, pair_survival = 0.0, pair_tokens = 0.0;
#pragma unroll
  for (int width = 0; width < kMaxDrafts; width++) {
    survival = __dmul_rn(survival, broadcast(rate, width));
    if (lane == width) here = tokens;
    if (from == width) pair_survival = survival, pair_tokens = tokens;
    tokens = __dadd_rn(tokens, survival);
  }
  here = __ddiv_rn(here, seconds);
#pragma unroll
  for (int wider = 1; wider <= kMaxDrafts; wider++) {
    const double rate_of_last = broadcast(known, wider - 1);
    if (wider > from + 1 && wider <= to) pair_survival = __dmul_rn(pair_survival, rate_of_last);
    if (wider > from && wider <= to) pair_tokens = __dadd_rn(pair_tokens, pair_survival);
  }
  const double pair = __ddiv_rn(pair_tokens, broadcast(seconds, min(to, kMaxDrafts)));
  double beyond = 0.0;
#pragma unroll
  for (int wider = 1; wider <= kMaxDrafts; wider++) {
    const int at = lane < 4 ? 7 * lane + wider - 1 - lane : 7 * (7 - lane) + wider - 1;
    const bool counts = lane < wider && wider <= most;
    const double other = broadcast(pair, counts ? at : 0);
    if (counts && other > beyond) beyond = other;
  }
  const double above = __dadd_rn(1.0, state.margin);
  const bool is_wider_better = lane < policy.last_width ? __dmul_rn(beyond, above) > here
                                                        : beyond > __dmul_rn(here, above);
  const int width = leading(lane < most && is_wider_better);
  policy.last_width = width;
  const double unread = broadcast(confidence, min(width, kMaxDrafts - 1));
  if (has_confidence && width < most) policy.unread = unread;
  if (width == 0 && is_number(policy.unread) && lane == 0) see(policy, policy.unread);
  return width;
}

// `CostAware.observe`.
INK_DEVICE void observe(Policy& policy, int drafted, int accepted, int lane) {
  if (lane < min(drafted, accepted + 1)) see(policy, lane < accepted ? 1.0 : 0.0);
  if (lane == drafted && accepted == drafted && is_number(policy.unread))
    see(policy, policy.unread);
}

}  // namespace round_policy

#endif  // INK_ROUND_POLICY_CUH
