// The names of plugins/attention_sm90/sm90.cuh on a CPU. Included in front of kernels that use it.
//
// An address in shared memory is an offset in the block's; in a cluster the rank stands above it. A
// product reads its tiles when it is issued, so what is overwritten before its wait is not found.
#pragma once
#define sm90 sm90_of_gpu
#include "attention_sm90/sm90.cuh"
#undef sm90

namespace sm90 {
constexpr int kRankBit = 20;

static inline u32 max_bf16x2(u32 a, u32 b) {
  auto larger = [](u32 x, u32 y) {
    const float u = low_float(x), v = low_float(y);
    if (u != u) return y;
    if (v != v || u > v) return x;
    return u < v ? y : x & y;  // the sign of zero
  };
  return larger(a & 0xFFFF, b & 0xFFFF) | larger(a >> 16, b >> 16) << 16;
}
static inline bool named_barrier_or(int id, int threads, bool value) {
  static std::map<std::pair<emu::Block*, int>, std::array<bool, 2>> any;
  emu::Block* b = emu::current->block;
  emu::Meeting& m = b->named[id];
  auto& of_phase = any[{b, id}][m.phase & 1];
  if (m.arrived == 0) of_phase = false;
  of_phase |= value;
  named_barrier(id, threads);
  return of_phase;
}
static inline void mbar_wait_cluster(u64* bar, u32 parity, int* error) {
  mbar_wait(bar, parity, error);
}
static inline u32 address_at(const void* here, int rank) {
  return smem_address(here) | (u32)rank << kRankBit;
}
template <class T>
void push(u32 to, T v, u32 bar) {
  emu::Block* b = emu::current->block->cluster->blocks.at(to >> kRankBit).get();
  constexpr u32 kOffset = (1u << kRankBit) - 1;
  if (to % sizeof(T) || to >> kRankBit != bar >> kRankBit) emu::fail("no such push");
  memcpy(b->smem + (to & kOffset), &v, sizeof(T));
  const void* at = b->smem + (bar & kOffset);
  std::get<2>(b->mbarriers.at(at)) -= sizeof(T);
  emu_complete(b, at);
}
template <class T>
void load_relaxed(const T* p, T& v) {
  emu::yield();
  v = emu_load<T>(p);
}
template <class T>
void store_relaxed(T* p, T v) {
  if ((uintptr_t)p % sizeof(T)) emu::fail("misaligned store");
  memcpy(p, &v, sizeof(T));
}
static inline u8* at(u32 address) {
  return emu::current->block->smem + address;
}
// Lane 4 g + t has rows 2 t and 2 t + 1 of column g.
template <size_t N>
void store_matrices(u32 to, const u32 (&values)[N]) {
  auto all = emu::exchange(&to, 1);
  const int lane = emu::current->index.x % 32, g = lane / 4, t = lane % 4;
  for (size_t m = 0; m < N; m++)
    for (int i = 0; i < 2; i++)
      ((bf16*)at((u32)all[8 * m + 2 * t + i][0]))[g] = (bf16)(values[m] >> (16 * i));
  emu::exchange(&to, 1);
}
static inline void store_transposed(u32 to, u32 a, u32 b) {
  store_matrices<2>(to, {a, b});
}
static inline void store_transposed(u32 to, u32 a, u32 b, u32 c, u32 d) {
  store_matrices<4>(to, {a, b, c, d});
}
static inline u64 tile_descriptor(u32 address) {
  if (address % 1024) emu::fail("misaligned tile");
  return address >> 4;
}
template <int C>
void pin(float (&)[C][4]) {}
static inline void wgmma_fence() {}
static inline void wgmma_commit() {}
static inline void wgmma_wait_all() {}

// Byte `in_row` of a row of 128 bytes, its chunks swizzled.
static inline float element(u64 tile, int row, int in_row) {
  const u32 linear = (u32)(tile << 4) + row * 128 + in_row;
  return to_float(*(const bf16*)at(linear ^ (linear >> 7 & 7) << 4));
}
template <bool kTransposeA, int C>
void wgmma(float (&d)[C][4], u64 a, u64 b, bool add) {
  const int warp = emu::current->index.x / 32 % 4, lane = emu::current->index.x % 32;
  for (int c = 0; c < C; c++)
    for (int e = 0; e < 4; e++) {
      const int m = 16 * warp + lane / 4 + e / 2 * 8, n = 8 * c + lane % 4 * 2 + e % 2;
      float sum = add ? d[c][e] : 0.f;
      for (int k = 0; k < 16; k++)
        sum += (kTransposeA ? element(a, k, 2 * m) : element(a, m, 2 * k)) * element(b, n, 2 * k);
      d[c][e] = sum;
    }
}
}  // namespace sm90
