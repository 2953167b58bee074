// Constants of the relative bias in attention.cuh, and its part of shared memory, which lies behind `Smem`.
//
// Macros, set by tactics.py where ATTN_RELATIVE is 1:
//   ATTN_EXTENT               distances that have a bias, from 0 on
//   ATTN_RELATIVE_SMEM_BYTES  shared memory of the kernel in all
#pragma once
#include "shape.cuh"

namespace attention {

constexpr int kExtent = ATTN_EXTENT;
constexpr int kStates = 16;  // relative states of a head: one step of an mma

struct RelativeSmem {
  static constexpr int kRowBytes = 2 * kStates;
  // Distances from a page's keys to the block's tokens: at most kPage - 1 and the tokens.
  static constexpr int kBankRows = kPage + kGroup - 1;
  static constexpr int kBankBytes = kBankRows * kRowBytes;

  static constexpr int kRel = (Smem::kBytes + 15) & ~15;          // [t][head of 8][state]
  static constexpr int kBank = kRel + kGroup * 8 * kRowBytes;     // [stage][distance][state]
  static constexpr int kBytes = kBank + kStages * kBankBytes;
};
static_assert(RelativeSmem::kBytes <= 232448, "shared memory");
static_assert(RelativeSmem::kBytes == ATTN_RELATIVE_SMEM_BYTES, "tactics.py and relative_shape.cuh disagree");

}  // namespace attention
