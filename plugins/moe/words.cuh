// Activations that the blocks of one launch hand to each other: a bf16 value is its own flag, as in
// flint_layers/exchange.cuh a word. There are two slots, which launches use in turn. A launch
// empties the one that the launch before has used: nobody reads it any more, and the launch behind
// fills it only when this one has ended.
#ifndef INK_MOE_WORDS_CUH
#define INK_MOE_WORDS_CUH
#include "all_reduce/peer.cuh"

// Whether one of two values is EMPTY, of four words. (A NaN that arithmetic yields is 0x7FFF.)
INK_DEVICE u32 empty_half(u32 v) {  // nonzero if so: a zero half of ~v borrows
  return (~v - 0x00010001u) & v & 0x80008000u;
}
INK_DEVICE bool has_empty(const uint4& v) {
  return (empty_half(v.x) | empty_half(v.y) | empty_half(v.z) | empty_half(v.w)) != 0;
}

// PIECES of eight values: block `b` of `blocks` empties its share of `used`, and asks for its share
// of `next`, so that the L2 has those lines when they are filled and polled.
template <int THREADS>
INK_DEVICE void turn_over(bf16* used, const bf16* next, int pieces, int b, int blocks) {
  const int share = (pieces + blocks - 1) / blocks;
#pragma unroll 1
  for (int i = threadIdx.x; i < share; i += THREADS) {
    const int piece = b * share + i;
    if (piece >= pieces) break;
    *(uint4*)(used + piece * 8) = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
    load_act16(next + piece * 8);
  }
}
#endif  // INK_MOE_WORDS_CUH
