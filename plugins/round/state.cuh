// What rounds of speculative decoding keep on the device, so that a round is one graph launch.
// `runtime/executor/round_state.py` mirrors it field by field; plain structs, so that host code and
// CPU tests compile it too.
//
// The graph of a round; these kernels are one block of one warp each:
//   begin_round(RoundState*, int* num_tokens, const int* position, RoundRecord* ring,
//               const int* error, handle draft, handle width)
//   IF(draft)      the plan of the draft step, then
//                  choose_width(RoundState*, const int* drafts, const float* confidences,
//                               int num_drafts, int* tokens, int* num_tokens, handle width)
//   SWITCH(width)  the plan of a row step, the ratio test if `rule` asks for it, then
//                  commit_round(RoundState*, const int* drawn, int* tokens, int* position,
//                               RoundRecord* ring, const int* error)
// `ring` may be null, `confidences` is where the drafter has none. Both handles are
// assigned a default at each launch: 0 to `draft`, a value above all cases to `width`. The first
// kernel needs no programmatic edge; the others may have one.
#ifndef INK_ROUND_STATE_CUH
#define INK_ROUND_STATE_CUH

constexpr int kMaxDrafts = 7, kMaxStopIds = 64, kMaxContexts = 32, kRingRecords = 64;

enum RoundPolicy : int { POLICY_FIXED = 0, POLICY_THRESHOLD = 1, POLICY_COST = 2 };
enum RoundRule : int { RULE_COUPLED = 0, RULE_PROBABILISTIC = 1, RULE_FORCED = 2 };
enum RoundStatus : int {
  STATUS_OK = 0,
  STATUS_FINISHED = 1,  // before this round
  STATUS_ERROR = 2,     // the error word is set: no round of the chain runs any more
  STATUS_FULL = 3,      // no position may be written; rounds go on when `writable_end` is raised
};

// Of `CostAware` (runtime/spec/width.py); other policies leave it alone.
struct PolicyState {
  double reached[kMaxDrafts], accepted[kMaxDrafts];
  double unread;  // NaN: none
  int num_rounds, num_plain, drafts_pay, last_width;
};

// One per rank in device memory. The host writes all of it when a chain of rounds begins.
struct RoundState {
  int policy, rule;
  int most;          // drafts of a round, 1..kMaxDrafts; with POLICY_COST, widths of its costs
  int num_left;      // tokens that the caller can still use; at least 1 when a chain begins
  int writable_end;  // positions below may be written; the host raises it as it reserves pages
  int finished;      // a stop id was emitted, num_left is 0, or an error: rounds do nothing
  int round;         // number of the next round of the chain, from 0
  int num_stop_ids, stop_ids[kMaxStopIds];
  int explore_every, num_first;
  int num_contexts, contexts[kMaxContexts];  // rising, at least one
  int vocab_size;                            // a draft that is not below it ends the proposal
  int case_of_width[kMaxDrafts + 1];         // w drafts to the case of the switch that reads w + 1
  double threshold, margin;
  double plain[kMaxContexts], rounds[kMaxContexts][kMaxDrafts + 1];  // RoundCosts by context
  double forced[kMaxDrafts];  // RULE_FORCED: probability of draft j if those before it are accepted
  unsigned long long seed;    // of the request; RULE_FORCED draws with it
  PolicyState policy_state;
  // Within a round.
  int room;             // drafts that there is room for
  int width;            // drafts that are verified
  int proposed;         // drafts that there were
  int accepted, token;  // RULE_PROBABILISTIC: what the ratio test says of `width` drafts, if any
  int reserved;         // zero: every byte has a name, so that bytes of copies can be compared
  double seconds[kMaxDrafts + 1];  // POLICY_COST: the row of `rounds` for the round's context
};

// In pinned host memory, a ring by round number; every rank has one, the host reads rank 0's.
struct RoundRecord {
  int num_tokens, tokens[kMaxDrafts + 1];  // accepted drafts and one more; none unless STATUS_OK
  int drafted, proposed, accepted, status;
  int position;                 // of the anchor behind the round
  PolicyState policy_state;     // behind the round
  unsigned long long sequence;  // round + 1; stored last, with release at system scope
};

#endif  // INK_ROUND_STATE_CUH
