// One launch's exchange between ranks: every rank pushes its part into the inboxes of all others,
// and whoever reads waits for the words themselves.
//
// A word of an inbox is EMPTY until its sender has written it, a bit pattern that no arithmetic
// yields; a sender replaces it by another NaN. So there is no flag, no fence and no second trip
// over the link. An inbox has three buffers, which launches use in turn, with a slot for every
// rank:
//
//   launch i   fills and reads buffer i % 3, empties buffer (i - 1) % 3, which launch i + 2 fills
//
// That is safe without any further word between ranks. A rank empties what launch i - 1 read after
// that launch has ended. It sends its part of launch i + 1 after launch i has ended, and another
// rank starts launch i + 2 after its launch i + 1 has ended, which waits for that part. With two
// buffers it would fill in launch i + 1 what may not be emptied yet. tests/plugins/test_lamport.py
// runs all orders of small examples.
//
// Who receives may have sent in an earlier launch already, see push.cuh.
//
// Every launch of the engine takes part, with any size: `turn` holds the number of the buffer and
// how many bytes of every slot the launch before has filled. Sizes must be the same on all ranks.
// Each block has a turn of its own, which no other reads, so none has to wait for the others to
// have read it; those of blocks that a launch does not have, its blocks share among them.
#ifndef INK_LAMPORT_CUH
#define INK_LAMPORT_CUH
#include "all_reduce/push.cuh"

INK_DEVICE uint4 not_empty(const uint4& v) {
  return make_uint4(not_empty(v.x), not_empty(v.y), not_empty(v.z), not_empty(v.w));
}
INK_DEVICE bool has_empty(const uint4& v) {
  return max(max(v.x, v.y), max(v.z, v.w)) == EMPTY;
}

struct Exchange {
  u8* inbox[RANKS];
  u8* own_inbox;  // by itself: registers have no index
  u64 slot_bytes, own_slot, buffer_bytes, filling;
  u32 rank, buffer, filled, code;
  bool waits;  // for others; not behind a failure
  Turn* turns;
  int* error;
  const Peers* peers;

  // May be called before pdl_wait().
  INK_DEVICE Exchange(const Peers* peers, int* error) : error(error), peers(peers) {
    rank = (u32)peers->rank;
    slot_bytes = peers->slot_bytes;
    turns = peers->turns;
#pragma unroll
    for (int r = 0; r < RANKS; r++) inbox[r] = peers->inbox[r];
    own_inbox = peers->inbox[rank];
    own_slot = rank * slot_bytes;
    buffer_bytes = RANKS * slot_bytes;
  }
  // Behind pdl_wait(), or in front of it where the launch before has sent (push.cuh), by all threads
  // that send, receive or clear. It asks for what `ready` waits
  // for, so in between a thread should ask for what it will send.
  INK_DEVICE void begin() {
    const uint2 now = load_act8(turns + blockIdx.x);
    code = load_act4(error);
    buffer = now.x;
    filled = now.y;
    filling = buffer * buffer_bytes;
  }
  INK_DEVICE void ready() {
    waits = !code;
    // What a rank sends after a failure is worth nothing, and its peers must know before they see
    // it.
    if (code) fail(code >> 16 ? code : code | (rank + 1) << 16);
  }
  // Sixteen bytes of this rank's part to all others.
  INK_DEVICE void send16(u64 offset, uint4 v) const {
    v = not_empty(v);
#pragma unroll
    for (u32 r = 0; r < RANKS; r++)
      if (r != rank) store_inbox16(inbox[r] + own_slot + offset + filling, v);
  }
  // Sixteen bytes of every rank's part, in rank order, at N offsets; `own` are those of this one, if
  // its inbox does not have them (OWN_TOO). Places that are not wanted are left as they are.
  template <int N, bool OWN_TOO = false>
  INK_DEVICE void receive16(const u64 (&offset)[N], const bool (&is_wanted)[N],
                            const uint4 (&own)[N], uint4 (&parts)[N][RANKS]) {
    u32 missing = 0;
    const u8* const filled_now = own_inbox + filling;
    Patience patience;
#pragma unroll 1
    while (true) {
      bool is_complete = true;
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (u32 r = 0; r < RANKS; r++)
          if (is_wanted[n])
            parts[n][r] = !OWN_TOO && r == rank
                              ? not_empty(own[n])
                              : load_inbox16(filled_now + r * slot_bytes + offset[n]);
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (u32 r = 0; r < RANKS; r++)
          if (is_wanted[n] && (OWN_TOO || r != rank) && has_empty(parts[n][r])) {
            is_complete = false;
            missing = r;
          }
      if (is_complete) return;
      if (!waits || patience.is_over()) break;
    }
    if (waits) fail(ERROR_PEER | missing << 8 | (rank + 1) << 16);
    waits = false;
  }
  INK_DEVICE void receive16(u64 offset, const uint4& own, uint4 (&parts)[RANKS]) {
    const u64 offsets[1] = {offset};
    const bool is_wanted[1] = {true};
    const uint4 owns[1] = {own};
    uint4 all[1][RANKS];
    receive16<1>(offsets, is_wanted, owns, all);
#pragma unroll
    for (u32 r = 0; r < RANKS; r++) parts[r] = all[0][r];
  }
  // Empty what the launch before has filled: thread `first` of `count`.
  INK_DEVICE void clear(u32 first, u32 count) const {
    u8* const before = own_inbox + (buffer ? buffer - 1 : BUFFERS - 1) * buffer_bytes;
    const uint4 empty = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
#pragma unroll
    for (u32 r = 0; r < RANKS; r++)
      if (r != rank || filled & FILLED_OWN)
        for (u64 at = (u64)first * 16; at < (filled & ~FILLED_OWN); at += (u64)count * 16)
          store_inbox16(before + r * slot_bytes + at, empty);
  }
  // Returns when sixteen bytes of this rank's own part are there, that were sent, or for nothing.
  INK_DEVICE void await_own(u64 offset) const {
    const u8* const place = own_inbox + filling + own_slot + offset;
    Patience patience;
#pragma unroll 1
    while (waits && has_empty(load_inbox16(place)) && !patience.is_over()) {
    }
  }
  // By the first `threads` of each of the launch's first `blocks`, which are all that take part,
  // behind a barrier of the block that follows `begin`: the launch has filled num_bytes of a slot
  // (FILLED_OWN added: its own one, too).
  INK_DEVICE void end(u32 num_bytes, u32 blocks, u32 threads) const {
    for (u32 i = blockIdx.x + threadIdx.x * blocks; i < MAX_BLOCKS; i += threads * blocks)
      *(uint2*)(turns + i) = make_uint2(buffer + 1 < BUFFERS ? buffer + 1 : 0, num_bytes);
  }
  // All ranks learn of it, so that none hands on what it made of missing parts.
  INK_DEVICE void fail(u32 code) const {
#pragma unroll 1
    for (u32 r = 0; r < RANKS; r++) store_error(peers->error[r], (int)code);
  }
};

// Sum of float32 parts in rank order, as the references add them.
INK_DEVICE float4 sum_of_ranks(const uint4 (&parts)[RANKS]) {
  float4 sum;
#pragma unroll
  for (int r = 0; r < RANKS; r++) {
    const float4 part = make_float4(__uint_as_float(parts[r].x), __uint_as_float(parts[r].y),
                                    __uint_as_float(parts[r].z), __uint_as_float(parts[r].w));
    sum = r ? make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w) : part;
  }
  return sum;
}

#endif  // INK_LAMPORT_CUH
