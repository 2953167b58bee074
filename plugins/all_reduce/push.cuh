// The way into the inboxes of all ranks, and a launch that sends its results there itself.
//
// Such a launch, the sender, is followed by one that receives what it sends (allreduce_conv_mix),
// and the two are one exchange of lamport.cuh:
//
//   turn     The receiver's. The sender reads its block's turn behind its wait, when the exchange
//            before has ended, and writes none. The receiver reads the same, and writes the next
//            behind its own wait, when the sender has ended. So both use one buffer, and nobody asks
//            another.
//   buffers  As in lamport.cuh: a sender stores behind its wait, so all launches before have ended,
//            the exchange before among them, and what that has emptied is empty. It needs for that
//            no more than every launch of a step that waits before it ends.
//   waited   All that is sent is waited for on all ranks: rows from num_tokens on are not sent. A
//            word that nobody waits for could arrive behind the launch that empties its place.
//   own      A rank sends to itself, too, so the receiver waits for no launch to end.
//   early    The sender triggers behind its wait, so when blocks of the receiver run, all launches
//            before the sender have ended. They read what those wrote and wait for words; turns, which
//            the sender may still read, and results they write behind their own wait, without
//            which they would not end after the sender.
//   failure  A sender that knows of a failure tells all ranks before it sends. One that happens in
//            the sender itself is told by the next exchange; there is one behind the last mix of a
//            step, that of the head.
#ifndef INK_PUSH_CUH
#define INK_PUSH_CUH
#include "all_reduce/peer.cuh"

constexpr u32 NAN_WORD = 0x7FFF7FFFu;  // NaN as float and as two bf16
constexpr u32 BUFFERS = 3, MAX_BLOCKS = 132;
// Of a block. Buffer of the next launch, bytes of a slot that the last one filled; FILLED_OWN is
// added if the rank's own slot is among them.
struct Turn {
  u32 buffer, filled;
};
constexpr u32 FILLED_OWN = 1;
// Ranks do not start a step at the same time. By the clock, as polls take longer or less long with
// what else the GPU does.
constexpr u32 PATIENCE_NS = 3000000000u;
// Error word: kind, rank that was waited for, and 1 + rank that gave up, a byte each.
constexpr int ERROR_PEER = 3;

// What the executor writes (runtime/executor/peers.py); it does not change while kernels run.
// RANKS: of the engine.
struct Peers {
  u64 rank;        // of this GPU
  u64 slot_bytes;  // of an inbox
  Turn* turns;     // of this GPU, MAX_BLOCKS
  u8* inbox[RANKS];
  int* error[RANKS];  // error words
};

// Of a thread that polls for another rank's words, from its first poll in vain on.
struct Patience {
  u32 began = 0;  // one register, as some kernels have no more
  INK_DEVICE bool is_over() {
    const u32 now = clock_ns() | 1;
    if (!began) began = now;
    return now - began >= PATIENCE_NS;
  }
};

INK_DEVICE u32 not_empty(u32 v) {
  return v == EMPTY ? NAN_WORD : v;
}

// A sender's, in shared memory: the kernel's registers are for its products.
struct Push {
  u64 slots[RANKS];  // this rank's in all inboxes, of the first buffer
  u64 buffer_bytes;
  u32 words[3];  // buffer, error code, rows that are sent

  // Before the wait: `asked` by the first threads, `keep` by the same somewhat later, in front of a
  // barrier of the block.
  struct Asked {
    u64 slot, buffer_bytes;
    const void* word;
  };
  static INK_DEVICE Asked asked(const Peers* peers, const int* error, const int* num_tokens) {
    const u32 tid = threadIdx.x;
    Asked a = {0, 0, num_tokens};
    if (tid < RANKS) a.slot = (u64)peers->inbox[tid] + peers->rank * peers->slot_bytes;
    a.buffer_bytes = RANKS * peers->slot_bytes;
    if (tid == 0) a.word = &peers->turns[blockIdx.x].buffer;
    if (tid == 1) a.word = error;
    return a;
  }
  INK_DEVICE void keep(const Asked& a) {
    if (threadIdx.x < RANKS) slots[threadIdx.x] = a.slot;
    if (threadIdx.x == 0) buffer_bytes = a.buffer_bytes;
  }
  // Behind the wait: one load a thread, then `keep`, likewise.
  static INK_DEVICE u32 word_of(const Asked& a) { return threadIdx.x < 3 ? load_act4(a.word) : 0; }
  INK_DEVICE void keep(u32 word, const Peers* peers) {
    if (threadIdx.x < 3) words[threadIdx.x] = word;
    // All ranks must know of a failure before they see what is sent behind it.
    if (threadIdx.x == 1 && word) {
      const u32 code = word >> 16 ? word : word | ((u32)peers->rank + 1) << 16;
#pragma unroll 1
      for (u32 r = 0; r < RANKS; r++) store_error(peers->error[r], (int)code);
    }
  }
  // One value of the result, to all ranks.
  INK_DEVICE void send(int row, u64 element, float value) const {
    if (row >= (int)words[2]) return;
    const u64 at = words[0] * buffer_bytes + element * 4;
    const u32 word = not_empty(__float_as_uint(value));
#pragma unroll
    for (u32 r = 0; r < RANKS; r++) store_inbox4((u8*)(slots[r] + at), word);
  }
};

#endif  // INK_PUSH_CUH
