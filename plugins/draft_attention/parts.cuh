// What the kernels of `draft_attention` know of each other: the parts of the context.
//
// Macros: GROUP (rows of the block), KV_HEADS, HEADS_PER_KV, DIM, WINDOW (0: none), PARTS.
#pragma once
#include "device.cuh"
#include "kv_layout.cuh"

constexpr int ROWS = GROUP * HEADS_PER_KV, PAGE = kv_layout::kPageTokens;
constexpr float NO_KEY = -1e30f;

// Pages that some row sees: first .. first + count.
struct Pages {
  int first, count;
};
INK_DEVICE Pages pages_of(int position) {
  const int oldest = WINDOW ? max(position - WINDOW + 1, 0) : 0, first = oldest / PAGE;
  return {first, position > oldest ? (position + PAGE - 1) / PAGE - first : 0};
}
// First page, counted from the first, of a part; floor, so part 0 has no more than any other.
INK_DEVICE int begin_of(int part, int count) {
  return (int)((long long)count * part / PARTS);
}
