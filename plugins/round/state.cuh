// What the kernels of a round share. Little-endian, natural alignment, so the host writes the same.
#ifndef INK_ROUND_STATE_CUH
#define INK_ROUND_STATE_CUH

constexpr int kMaxDrafts = 7, kMaxStopIds = 64, kMaxContexts = 32, kRingRecords = 64;

struct PolicyState {  // of CostAware; other policies leave it alone
  double reached[kMaxDrafts], accepted[kMaxDrafts];
  double unread;  // NaN: none
  int num_rounds, num_plain, drafts_pay, last_width;
};

struct RoundState {  // one per rank; the host writes all of it when a chain of rounds begins
  int policy;        // 0 fixed, 1 confidence threshold, 2 cost
  int rule;          // 0 coupled, 1 probabilistic, 2 forced
  int most;          // most drafts of a round, 1..7
  int num_left;      // tokens the caller can still use
  int writable_end;  // positions below may be written
  int finished;      // further rounds do nothing
  int round;         // number of the next round of this chain, from 0
  int num_stop_ids, stop_ids[kMaxStopIds];
  int explore_every, num_first, num_contexts, contexts[kMaxContexts];
  double threshold, margin;
  double plain[kMaxContexts], rounds[kMaxContexts][kMaxDrafts + 1];
  double forced[kMaxDrafts];  // conditional acceptance of draft j
  PolicyState policy_state;
  // Within a round; the last two are the verdict of the ratio test.
  int room, width, drafted, proposed;
  int accepted, token;
};

struct RoundRecord {  // pinned host memory, by round number modulo kRingRecords; rank 0 writes it
  int num_tokens, tokens[kMaxDrafts + 1];
  int drafted, proposed, accepted, status;  // status 0 ok, 1 had finished, 2 a kernel gave up
  int position;                             // behind the round: of the new anchor
  PolicyState policy_state;
  unsigned long long sequence;  // round + 1, stored last
};

#endif  // INK_ROUND_STATE_CUH
