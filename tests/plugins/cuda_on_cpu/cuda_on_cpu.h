// Runs CUDA kernels written against plugins/device.cuh on a CPU, for tests: every thread is a
// fiber, warp and block operations are meeting points. It stands in for device.cuh (same names, no
// PTX), is slow, and knows nothing of timing. Included first by the compiler's command line.
//
// What it finds beside wrong arithmetic: deadlocks, accesses past a block's shared memory (a guard
// page), reads before pdl_wait() of what a predecessor writes (such inputs are filled at the wait),
// asynchronous copies that are read too early or go where a stage is still in use (the place is full
// of NaN from request to wait), bulk copies that outlive their block, and, by running fibers in other
// orders, missing barriers.
#pragma once
#define INK_DEVICE_CUH
#define INK_LATENCY_CUH
#define INK_PEER_CUH
#define INK_ROUND_GRAPH_CUH
#define INK_CLUSTER_CUH
#include <sched.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef u16 bf16;
#define __device__
#define __global__
#define __constant__ static const
#define __shared__ static  // of one block at a time, unless blocks run together
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define INK_DEVICE inline
#define INK_FULL_WARP 0xFFFFFFFFu

struct alignas(8) uint2 {
  u32 x, y;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
static inline uint2 make_uint2(u32 x, u32 y) {
  return {x, y};
}
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) {
  return {x, y, z, w};
}
static inline float2 make_float2(float x, float y) {
  return {x, y};
}
static inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
using std::max;
using std::min;

namespace emu {
struct Index {
  unsigned x = 0, y = 0, z = 0;
};
struct Block;
struct Publish {
  void* to;
  const void* from;
  size_t bytes;
};
// Memory that no thread may have written when all wait for the kernels before.
struct Watch {
  const void* at;
  std::vector<u8> before;
  Watch(const void* at, size_t bytes) : at(at), before((const u8*)at, (const u8*)at + bytes) {}
};
// An asynchronous copy, of what is there when it is requested. Its place is full of NaN until it
// lands.
struct Copy {
  void* to;
  std::vector<u8> data;
  Copy() : to(nullptr) {}
  Copy(void* to, const void* from, size_t bytes)
      : to(to), data((const u8*)from, (const u8*)from + bytes) {
    memset(to, 0xFF, bytes);
  }
  void land() const { memcpy(to, data.data(), data.size()); }
};
struct Thread {
  ucontext_t context;
  Index index;
  std::vector<Copy> copies;
  Block* block = nullptr;
  bool done = false;
  u64 cluster_phase = 0;
};
struct Meeting {
  u64 arrived = 0, phase = 0;
};
struct Warp {
  Meeting meeting;
  u64 slots[2][32][12];
};
struct Cluster;
struct Block {
  Index index;
  Cluster* cluster = nullptr;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Warp> warps;
  u8* smem = nullptr;
  Meeting barrier;
  std::map<int, Meeting> named;
  u64 alive = 0;
  std::map<const void*, std::tuple<int, int, long, u32>>
      mbarriers;  // arrivals, pending, bytes, phase
  std::map<const void*, std::vector<Copy>> on_their_way;  // bulk copies, by barrier
};
struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  Meeting barrier, wait;
  u64 alive = 0;
};
inline Thread* current = nullptr;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline Index grid_size;
inline std::vector<Publish> publish;
inline std::vector<Watch> watched;
// Clusters that run at the same time, and where their threads meet in front of the wait if memory
// is watched.
inline std::vector<std::unique_ptr<Cluster>>* running = nullptr;
inline Meeting all_wait;
inline bool is_checked = false;

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "cuda_on_cpu: %s (block %u, thread %u)\n", what,
          current ? current->block->index.x : 0, current ? current->index.x : 0);
  abort();
}
inline void yield() {
  swapcontext(&current->context, &scheduler);
}
// Waits until `expected()` threads have arrived.
template <class F>
void meet(Meeting& m, F expected) {
  const u64 phase = m.phase;
  m.arrived++;
  while (m.phase == phase) {
    if (m.arrived >= expected()) {
      m.arrived = 0;
      m.phase++;
      break;
    }
    yield();
  }
}
// Meets all threads that run in front of their wait; what is watched is as it was.
inline void check_watched() {
  meet(all_wait, [] {
    u64 alive = 0;
    for (auto& cluster : *running) alive += cluster->alive;
    return alive;
  });
  if (!is_checked)
    for (auto& watch : watched)
      if (memcmp(watch.at, watch.before.data(), watch.before.size()))
        fail("a store in front of the wait");
  is_checked = true;
}
// Every lane hands in values and sees those of all lanes.
template <class T>
const u64 (*exchange(const T* mine, int count))[12] {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "32 or 64 bits");
  Warp& w = current->block->warps[current->index.x / 32];
  const u64 phase = w.meeting.phase;
  u64* slot = w.slots[phase & 1][current->index.x % 32];
  for (int i = 0; i < count; i++) {
    u64 bits = 0;
    memcpy(&bits, mine + i, sizeof(T));
    slot[i] = bits;
  }
  meet(w.meeting, [] { return 32u; });
  return w.slots[phase & 1];
}
template <class T>
T as(u64 bits) {
  T v;
  memcpy(&v, &bits, sizeof(T));  // the low bytes
  return v;
}
inline void enter() {
  body();
  current->done = true;
  if (--current->block->alive == 0 && !current->block->on_their_way.empty())
    fail("a block ends before its bulk copies are there");
  current->block->cluster->alive--;
  swapcontext(&current->context, &scheduler);
}
// Shared memory of a block, full of NaN. It ends less than 1 KB before a page without access.
struct Guarded {
  static constexpr size_t PAGE = 4096;
  size_t whole;
  u8 *base, *data;
  explicit Guarded(size_t bytes) : whole((bytes + PAGE - 1) / PAGE * PAGE) {
    base = (u8*)mmap(nullptr, whole + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                     0);
    mprotect(base + whole, PAGE, PROT_NONE);
    memset(base, 0xFF, whole);
    data = base + (whole - bytes) / 1024 * 1024;
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() { munmap(base, whole + PAGE); }
};
// Memory of fibers' stacks; pages that none touches cost nothing.
struct Stacks {
  static constexpr size_t SIZE = 1 << 16;
  size_t whole;
  char* base;
  explicit Stacks(size_t count) : whole(count * SIZE) {
    base = (char*)mmap(nullptr, whole, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) fail("no memory for stacks");
  }
  Stacks(const Stacks&) = delete;
  ~Stacks() { munmap(base, whole); }
};
// Of random orders.
inline std::mt19937 random_bits;
inline bool is_random = false;
inline bool some_rest = false;

// Whether a thread sits out a round: of a third of the warps the first lane mostly does.
inline bool rests(const Thread& t, int order) {
  return t.index.x % 32 == 0 && (t.index.x / 32 + order) % 3 == 0 && random_bits() % 256;
}

// A cluster at a time; `together`: all of them at once, for kernels whose blocks wait for each
// other. order: 0 rising, 1 falling, above a new one every round, drawn from it; below 0 with
// threads that rest.
inline void launch(Index grid, unsigned threads, unsigned cluster_size, size_t smem_bytes,
                   int order, bool together) {
  grid_size = grid;
  const unsigned blocks = grid.x * grid.y * grid.z;
  const unsigned at_once = together ? blocks : cluster_size;
  Stacks stacks(threads * at_once);
  for (unsigned first = 0; first < blocks; first += at_once) {
    std::vector<std::unique_ptr<Guarded>> areas;
    std::vector<std::unique_ptr<Cluster>> clusters;
    std::vector<Thread*> all;
    for (unsigned b = 0; b < at_once; b++) {
      if (b % cluster_size == 0) clusters.push_back(std::make_unique<Cluster>());
      Cluster& cluster = *clusters.back();
      auto block = std::make_unique<Block>();
      const unsigned number = first + b;
      block->index = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
      block->cluster = &cluster;
      block->warps.resize((threads + 31) / 32);
      block->alive = threads;
      areas.push_back(std::make_unique<Guarded>(smem_bytes ? smem_bytes : 1));
      block->smem = areas.back()->data;
      for (unsigned t = 0; t < threads; t++) {
        auto thread = std::make_unique<Thread>();
        thread->index = {t, 0, 0};
        thread->block = block.get();
        getcontext(&thread->context);
        thread->context.uc_stack.ss_sp = stacks.base + all.size() * Stacks::SIZE;
        thread->context.uc_stack.ss_size = Stacks::SIZE;
        thread->context.uc_link = nullptr;
        makecontext(&thread->context, enter, 0);
        all.push_back(thread.get());
        block->threads.push_back(std::move(thread));
      }
      cluster.alive += threads;
      cluster.blocks.push_back(std::move(block));
    }
    running = &clusters;
    all_wait = {};
    is_checked = false;
    for (auto& watch : watched) watch = Watch(watch.at, watch.before.size());
    if (order == 1) std::reverse(all.begin(), all.end());
    some_rest = order < 0;
    is_random = order > 1 || some_rest;
    random_bits.seed((unsigned)order);
    auto is_running = [](const auto& cluster) { return cluster->alive > 0; };
    for (u64 rounds = 0; std::any_of(clusters.begin(), clusters.end(), is_running); rounds++) {
      if (rounds > (some_rest ? 100000u : 2000000u)) {
        current = nullptr;
        fail("deadlock");
      }
      if (is_random) std::shuffle(all.begin(), all.end(), random_bits);
      for (Thread* t : all)
        if (!t->done && !(some_rest && rests(*t, -order))) {
          current = t;
          swapcontext(&scheduler, &t->context);
        }
    }
    current = nullptr;
  }
  watched.clear();
}
template <class... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
  kernel(*(std::remove_reference_t<A>*)args[I]...);
}
template <class... A>
void call(void (*kernel)(A...), void** args) {
  call(kernel, args, std::index_sequence_for<A...>());
}
}  // namespace emu

#define threadIdx (emu::current->index)
#define blockIdx (emu::current->block->index)
#define gridDim (emu::grid_size)
static inline void __syncthreads() {
  emu::Block* b = emu::current->block;
  emu::meet(b->barrier, [b] { return b->alive; });
}
static inline void named_barrier(int id, int threads) {
  if (id < 1 || id > 15 || threads % 32) emu::fail("no such barrier");
  emu::meet(emu::current->block->named[id], [threads] { return (u64)threads; });
}
static inline void __syncwarp() {
  const u32 none = 0;
  emu::exchange(&none, 1);
}
template <class T>
T __shfl_xor_sync(u32, T v, int mask) {
  return emu::as<T>(emu::exchange(&v, 1)[(emu::current->index.x % 32) ^ mask][0]);
}
template <class T>
T __shfl_sync(u32, T v, int lane) {
  if (lane < 0 || lane > 31) emu::fail("a shuffle from no lane");
  return emu::as<T>(emu::exchange(&v, 1)[lane][0]);
}
template <class T>
T __shfl_up_sync(u32, T v, int distance) {
  auto all = emu::exchange(&v, 1);
  const int from = (int)(emu::current->index.x % 32) - distance;
  return from < 0 ? v : emu::as<T>(all[from][0]);
}
static inline u32 __reduce_max_sync(u32, u32 v) {
  auto all = emu::exchange(&v, 1);
  u32 best = 0;
  for (int i = 0; i < 32; i++) best = max(best, (u32)all[i][0]);
  return best;
}
static inline u32 __reduce_add_sync(u32, u32 v) {
  auto all = emu::exchange(&v, 1);
  u32 sum = 0;
  for (int i = 0; i < 32; i++) sum += (u32)all[i][0];
  return sum;
}
static inline u32 __ballot_sync(u32, bool yes) {
  const u32 mine = yes;
  auto all = emu::exchange(&mine, 1);
  u32 bits = 0;
  for (int i = 0; i < 32; i++) bits |= (u32)all[i][0] << i;
  return bits;
}
static inline int __ffs(u32 v) {
  return __builtin_ffs((int)v);
}
static inline int __popc(u32 v) {
  return __builtin_popcount(v);
}
static inline int __clz(int v) {
  return v ? __builtin_clz((u32)v) : 32;
}
static inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const u64 bytes = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++)
    r |= (u32)(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
  return r;
}
static inline u32 __funnelshift_r(u32 lo, u32 hi, u32 n) {
  return (u32)(((u64)hi << 32 | lo) >> (n & 31));
}
static inline float __uint_as_float(u32 v) {
  return emu::as<float>(v);
}
static inline u32 __float_as_uint(float v) {
  u32 r;
  memcpy(&r, &v, 4);
  return r;
}
static inline float rsqrtf(float x) {
  return 1.f / sqrtf(x);
}
static inline float __int_as_float(int v) {
  return emu::as<float>((u32)v);
}
static inline float __fmul_rn(float a, float b) {
  return a * b;
}
static inline float __fadd_rn(float a, float b) {
  return a + b;
}
static inline float __fsub_rn(float a, float b) {
  return a - b;
}
static inline double __dmul_rn(double a, double b) {
  return a * b;
}
static inline double __dadd_rn(double a, double b) {
  return a + b;
}
static inline double __ddiv_rn(double a, double b) {
  return a / b;
}
static inline double __longlong_as_double(long long v) {
  return emu::as<double>((u64)v);
}
static inline void __threadfence_block() {}
static inline u32 atomicOr(u32* p, u32 v) {
  const u32 old = *p;
  *p |= v;
  return old;
}
static inline u32 atomicAdd(u32* p, u32 v) {
  const u32 old = *p;
  *p += v;
  return old;
}
static inline int atomicExch(int* p, int v) {
  return std::exchange(*p, v);
}

#include "device_on_cpu.h"
