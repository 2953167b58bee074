// The names of plugins/device.cuh on a CPU. Included by cuda_on_cpu.h, which has the fibers.
#pragma once

static inline float to_float(bf16 x) {
  return __uint_as_float((u32)x << 16);
}
static inline float low_float(u32 pair) {
  return __uint_as_float(pair << 16);
}
static inline float high_float(u32 pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}
static inline bf16 to_bf16(float x) {
  const u32 b = __float_as_uint(x);
  if (x != x) return 0x7FFF;
  return (bf16)((b + 0x7FFFu + (b >> 16 & 1)) >> 16);
}
static inline u32 pack_bf16(float low, float high) {
  return (u32)to_bf16(high) << 16 | to_bf16(low);
}
static inline float round_bf16(float x) {
  return to_float(to_bf16(x));
}
static inline u32 mul_bf16x2(u32 a, u32 b) {
  return pack_bf16(low_float(a) * low_float(b), high_float(a) * high_float(b));
}
static inline float rsqrt_approx(float x) {
  return 1.f / sqrtf(x);
}
static inline float exp2_approx(float x) {
  return exp2f(x);
}
static inline float rcp_approx(float x) {
  return 1.f / x;
}

template <class T>
T emu_load(const void* p) {
  if ((uintptr_t)p % sizeof(T)) emu::fail("misaligned load");
  T v;
  memcpy(&v, p, sizeof(T));
  return v;
}
static inline uint4 load_weight16(const void* p) {
  return emu_load<uint4>(p);
}
static inline uint4 load_weight16_once(const void* p) {
  return emu_load<uint4>(p);
}
static inline uint2 load_weight8(const void* p) {
  return emu_load<uint2>(p);
}
static inline u32 load_weight4(const void* p) {
  return emu_load<u32>(p);
}
static inline u32 load_weight2(const void* p) {
  return emu_load<u16>(p);
}
static inline float load_weight_float(const float* p) {
  return emu_load<float>(p);
}
static inline uint4 load_act16(const void* p) {
  return emu_load<uint4>(p);
}
static inline uint2 load_act8(const void* p) {
  return emu_load<uint2>(p);
}
static inline u32 load_act4(const void* p) {
  return emu_load<u32>(p);
}
static inline int load_act_int(const int* p) {
  return emu_load<int>(p);
}
static inline float load_act_float(const float* p) {
  return emu_load<float>(p);
}
// Whoever waits for a word lets others run.
static inline u64 load_relaxed(const u64* p) {
  emu::yield();
  return emu_load<u64>(p);
}
static inline void store_relaxed(u64* p, u64 v) {
  *p = v;
}
// Of plugins/all_reduce/peer.cuh. Ranks are processes that share memory.
constexpr u32 EMPTY = 0xFFFFFFFFu;
static inline uint4 load_inbox16(const void* p) {
  if ((uintptr_t)p % 16) emu::fail("misaligned load");
  emu::yield();
  sched_yield();
  const u32* words = (const u32*)p;
  u32 v[4];
  for (int i = 0; i < 4; i++) v[i] = __atomic_load_n(words + i, __ATOMIC_ACQUIRE);
  return {v[0], v[1], v[2], v[3]};
}
static inline void store_inbox16(void* p, uint4 v) {
  if ((uintptr_t)p % 16) emu::fail("misaligned store");
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; i++) __atomic_store_n((u32*)p + i, words[i], __ATOMIC_RELEASE);
}
static inline void store_inbox4(void* p, u32 v) {
  __atomic_store_n((u32*)p, v, __ATOMIC_RELEASE);
}
// Ten times slower than the GPU's, as ranks are.
static inline u32 clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (u32)((now.tv_sec * 1000000000ull + now.tv_nsec) / 10);
}
// Of plugins/round/graph.cuh. A handle is the address of its value.
static inline void set_conditional(u64 handle, int value) {
  *(u32*)handle = (u32)value;
}
static inline void store_release_system(u64* p, u64 v) {
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
static inline void store_error(int* p, int code) {
  __atomic_store_n(p, code, __ATOMIC_SEQ_CST);
}
static inline void add_relaxed(u64* p, u64 v) {
  *p += v;
}
static inline void max_relaxed(u64* p, u64 v) {
  *p = max(*p, v);
}
static inline u32 arrive(u32* p) {
  return (*p)++;
}
static inline u32 load_arrivals(const u32* p) {
  emu::yield();
  return *p;
}
static inline u64 arrive(u64* p) {
  return (*p)++;
}
static inline u64 load_arrivals(const u64* p) {
  emu::yield();
  return *p;
}
// The bytes arrive at the wait.
static inline void copy_async4(void* to, const void* from) {
  emu::current->copies.emplace_back(to, from, 4);
}
static inline void copy_async16(void* to, const void* from) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16) emu::fail("misaligned copy");
  emu::current->copies.emplace_back(to, from, 16);
}
static inline void copy_async_commit() {  // a group ends
  emu::current->copies.emplace_back();
}
static inline void emu_copy_groups(long left) {
  auto& copies = emu::current->copies;
  long groups = std::count_if(copies.begin(), copies.end(), [](auto& c) { return !c.to; });
  size_t done = 0;
  for (; done < copies.size() && groups > left; done++) {
    if (!copies[done].to)
      groups--;
    else
      copies[done].land();
  }
  copies.erase(copies.begin(), copies.begin() + done);
}
template <int N>
static inline void copy_async_wait_but() {
  emu_copy_groups(N);
}
static inline void copy_async_wait() {
  copy_async_commit();
  emu_copy_groups(0);
}
static inline unsigned char* dynamic_smem() {
  return emu::current->block->smem;
}
static inline u32 smem_address(const void* p) {
  return (u32)((const u8*)p - emu::current->block->smem);
}

static inline void pdl_wait() {
  emu::Cluster* c = emu::current->block->cluster;
  // All threads meet here, so that what is touched in front of it is found; on a GPU they do not.
  if (!emu::some_rest) {
    if (emu::watched.empty())
      emu::meet(c->wait, [c] { return c->alive; });
    else
      emu::check_watched();
  }
  for (auto& p : emu::publish) memcpy(p.to, p.from, p.bytes);
  emu::publish.clear();
}
static inline void pdl_trigger() {}
static inline float warp_sum(float x) {
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(INK_FULL_WARP, x, o);
  return x;
}
static inline float warp_max(float x) {
  for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(INK_FULL_WARP, x, o));
  return x;
}
// Fragments as the PTX manual draws them for m16n8k16.
static inline void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  auto all = emu::exchange(mine, 6);
  const int lane = emu::current->index.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; i++) {
    const int row = g + 8 * (i / 2), col = 2 * t + i % 2;
    float sum = 0;
    for (int k = 0; k < 16; k++) {
      const u32 x = (u32)all[4 * (row % 8) + k % 8 / 2][row / 8 + 2 * (k / 8)];
      const u32 y = (u32)all[4 * col + k % 8 / 2][4 + k / 8];
      sum += (k & 1 ? high_float(x) : low_float(x)) * (k & 1 ? high_float(y) : low_float(y));
    }
    c[i] += sum;
  }
}
// Lane l gives row l % 8 of matrix l / 8.
static inline void emu_matrices(u32 (&r)[4], const void* row, bool transposed) {
  if ((uintptr_t)row % 16) emu::fail("misaligned matrix row");
  const u64 mine = (u64)(uintptr_t)row;
  auto all = emu::exchange(&mine, 1);
  const int lane = emu::current->index.x % 32, g = lane / 4, t = lane % 4;
  for (int m = 0; m < 4; m++) {
    auto element = [&](int i, int j) { return (u32)((const bf16*)all[8 * m + i][0])[j]; };
    r[m] = transposed ? element(2 * t, g) | element(2 * t + 1, g) << 16
                      : element(g, 2 * t) | element(g, 2 * t + 1) << 16;
  }
  emu::exchange(&mine, 1);  // all have read before one goes on
}
static inline void load_matrices(u32 (&r)[4], const void* row) {
  emu_matrices(r, row, false);
}
static inline void load_matrices_transposed(u32 (&r)[4], const void* row) {
  emu_matrices(r, row, true);
}
#define INK_SPIN_LIMIT (1u << 20)
enum ErrorCode { ERROR_NONE = 0, ERROR_MBARRIER = 1, ERROR_SENTINEL = 2 };
static inline void report_error(int* word, int code) {
  if (word) *word = code;
}
static inline void emu_complete(emu::Block* b, const void* bar) {
  auto& [arrivals, pending, bytes, phase] = b->mbarriers.at(bar);
  if (pending == 0 && bytes == 0) {
    pending = arrivals;
    phase++;
  }
}
static inline void mbar_init(u64* bar, u32 arrivals) {
  emu::current->block->mbarriers[bar] = {(int)arrivals, (int)arrivals, 0, 0};
}
static inline void mbar_expect(u64* bar, u32 num_bytes) {
  auto& state = emu::current->block->mbarriers.at(bar);
  std::get<1>(state)--;
  std::get<2>(state) += num_bytes;
  emu_complete(emu::current->block, bar);
}
static inline void mbar_arrive(u64* bar) {
  mbar_expect(bar, 0);
}
// Bulk copies arrive when somebody waits for them; in random orders at one of the looks.
static inline void emu_land(const void* bar) {
  emu::Block* b = emu::current->block;
  const auto found = b->on_their_way.find(bar);
  if (found == b->on_their_way.end() || (emu::is_random && emu::random_bits() & 1)) return;
  for (const auto& copy : found->second) {
    copy.land();
    std::get<2>(b->mbarriers.at(bar)) -= (long)copy.data.size();
  }
  b->on_their_way.erase(found);
  emu_complete(b, bar);
}
// Others go on before the answer.
static inline bool mbar_test(u64* bar, u32 parity) {
  auto& known = emu::current->block->mbarriers;
  if (!known.count(bar)) emu::fail("wait on a barrier that is not initialized");
  if ((std::get<3>(known.at(bar)) & 1) != parity) return true;
  emu_land(bar);
  emu::yield();
  return false;
}
static inline void mbar_wait(u64* bar, u32 parity, int*) {
  while (!mbar_test(bar, parity)) {
  }
}
static inline void bulk_load(void* to, const void* from, u32 num_bytes, u64* bar) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || num_bytes % 16)
    emu::fail("misaligned bulk copy");
  if (num_bytes == 0) emu::fail("a bulk copy of nothing");
  if (!emu::current->block->mbarriers.count(bar)) emu::fail("a copy without a barrier");
  emu::current->block->on_their_way[bar].emplace_back(to, from, num_bytes);
}
static inline void bulk_load_once(void* to, const void* from, u32 num_bytes, u64* bar) {
  bulk_load(to, from, num_bytes, bar);
}
static inline void bulk_prefetch(const void*, u32) {}
static inline void fence_async() {}
// Of plugins/attention_sm90/latency.cuh.
static inline void cluster_arrive();
static inline void cluster_wait();
template <class T>
const T* worked_out(const T* p) {
  return p;
}
static inline void used_from_here(u32 (&)[4]) {}
static inline void cluster_arrive_relaxed() {
  cluster_arrive();
}
static inline void cluster_wait_aligned() {
  cluster_wait();
}
static inline void cluster_arrive() {
  emu::Cluster* c = emu::current->block->cluster;
  emu::current->cluster_phase = c->barrier.phase;
  c->barrier.arrived++;
}
static inline void cluster_wait() {
  emu::Cluster* c = emu::current->block->cluster;
  while (c->barrier.phase == emu::current->cluster_phase) {
    if (c->barrier.arrived >= c->alive) {
      c->barrier.arrived = 0;
      c->barrier.phase++;
      break;
    }
    emu::yield();
  }
}
// cluster.cuh: the offset in a block's shared memory, and the block's rank above it.
static inline u32 cluster_address(const void* here, int rank) {
  return smem_address(here) | (u32)rank << 20;
}
static inline void cluster_store(u32 to, float v) {
  u8* const smem = emu::current->block->cluster->blocks.at(to >> 20)->smem;
  memcpy(smem + (to & ((1u << 20) - 1)), &v, sizeof v);
}
