// Device helpers that all CUDA kernels share, with their PTX. It includes nothing, so NVRTC alone
// compiles a kernel.
//
// Conventions: bf16 is held as its 16 bits. "Activations" are what an earlier kernel of the same
// step wrote: they are read through L2 only (ld.global.cg), after pdl_wait(). "Weights" never
// change: they may be read at any time, also through the non-coherent path.
#ifndef INK_DEVICE_CUH
#define INK_DEVICE_CUH

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef u16 bf16;

#define INK_DEVICE __device__ __forceinline__
#define INK_FULL_WARP 0xFFFFFFFFu

// ---- bf16 ----
INK_DEVICE float to_float(bf16 x) {
  return __uint_as_float((u32)x << 16);
}
INK_DEVICE float low_float(u32 pair) {
  return __uint_as_float(pair << 16);
}
INK_DEVICE float high_float(u32 pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}
INK_DEVICE bf16 to_bf16(float x) {  // to nearest even
  bf16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
INK_DEVICE u32 pack_bf16(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
INK_DEVICE float round_bf16(float x) {
  return to_float(to_bf16(x));
}
// Packed product. Subnormal inputs and results are kept.
INK_DEVICE u32 mul_bf16x2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// ---- fast arithmetic of the hardware; use plain operators and expf where the model asks for exact
// ones ----
INK_DEVICE float rsqrt_approx(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
INK_DEVICE float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
INK_DEVICE float rcp_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// ---- memory ----
// Weights, read once per step: kept out of L1.
INK_DEVICE uint4 load_weight16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
// The same for what is the first to leave the L2, see `bulk_load_once`.
INK_DEVICE uint4 load_weight16_once(const void* p) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  uint4 v;
  asm volatile(
      "ld.global.nc.L1::no_allocate.L2::cache_hint.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p), "l"(policy));
  return v;
}
INK_DEVICE uint2 load_weight8(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0,%1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(p));
  return v;
}
INK_DEVICE u32 load_weight4(const void* p) {
  u32 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
INK_DEVICE u32 load_weight2(const void* p) {
  u16 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}
INK_DEVICE float load_weight_float(const float* p) {
  return __uint_as_float(load_weight4(p));
}
// Activations.
INK_DEVICE uint4 load_act16(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
INK_DEVICE uint2 load_act8(const void* p) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
INK_DEVICE u32 load_act4(const void* p) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
INK_DEVICE int load_act_int(const int* p) {
  return (int)load_act4(p);
}
INK_DEVICE float load_act_float(const float* p) {
  return __uint_as_float(load_act4(p));
}
// Words that blocks of one kernel hand to each other: value and its mark in one access, so that no
// fence is needed. Such a kernel's blocks must all fit the GPU at once.
INK_DEVICE u64 load_relaxed(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
INK_DEVICE void store_relaxed(u64* p, u64 v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Sums and maxima that blocks of one kernel make together: of whole numbers, so that the order does
// not matter.
INK_DEVICE void add_relaxed(u64* p, u64 v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
INK_DEVICE void max_relaxed(u64* p, u64 v) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Arrivals: who has seen a count sees what its arrivers' blocks wrote before a barrier and arrived.
INK_DEVICE u32 arrive(u32* p) {  // gives the arrivals before this one
  u32 v;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(p) : "memory");
  return v;
}
INK_DEVICE u32 load_arrivals(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
INK_DEVICE u64 arrive(u64* p) {  // for counters that are never reset
  u64 v;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(v) : "l"(p) : "memory");
  return v;
}
INK_DEVICE u64 load_arrivals(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
INK_DEVICE unsigned char* dynamic_smem() {
  extern __shared__ __align__(1024) unsigned char ink_dynamic_smem[];
  return ink_dynamic_smem;
}
INK_DEVICE u32 smem_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}

// A barrier of some of the block's threads, whole warps; 0 is __syncthreads.
INK_DEVICE void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Four bytes to shared memory without a register; other threads see them after a block barrier that
// follows this thread's wait.
INK_DEVICE void copy_async4(void* to_smem, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_address(to_smem)), "l"(from)
               : "memory");
}
INK_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
// Sixteen bytes, past the L1, in groups: a thread's copies since its last commit are a group, and
// it can wait for all but the N latest ones.
INK_DEVICE void copy_async16(void* to_smem, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(smem_address(to_smem)),
               "l"(from)
               : "memory");
}
INK_DEVICE void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N>
INK_DEVICE void copy_async_wait_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- programmatic dependent launch ----
// Returns when every kernel that this one depends on has ended and its writes are visible.
INK_DEVICE void pdl_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Once every block has called this (or ended), blocks of the next kernel may start.
INK_DEVICE void pdl_trigger() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- warps: every lane takes part, every lane has the result; the order of additions is fixed
// ----
INK_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(INK_FULL_WARP, x, o);
  return x;
}
INK_DEVICE float warp_max(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(INK_FULL_WARP, x, o));
  return x;
}

// ---- tensor cores: c += a b, a 16 x 16 row major, b 16 x 8 column major, bf16 in, fp32
// accumulation ----
INK_DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of bf16 from shared memory; lane l gives the address of row l % 8 of matrix
// l / 8. Lane 4g + t gets elements 2t, 2t + 1 of row g, transposed: of column g.
INK_DEVICE void load_matrices(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_address(row))
               : "memory");
}
INK_DEVICE void load_matrices_transposed(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_address(row))
               : "memory");
}

// ---- bounded waiting ----
// A wait that gives up writes a code to the error word (if there is one) and goes on: results are
// then wrong, but the step ends.
#define INK_SPIN_LIMIT (1u << 20)
enum ErrorCode { ERROR_NONE = 0, ERROR_MBARRIER = 1, ERROR_SENTINEL = 2 };
INK_DEVICE void report_error(int* word, int code) {
  if (word) *(volatile int*)word = code;
}

// ---- bulk copies and their barriers (shared memory, one barrier = 8 bytes) ----
INK_DEVICE void mbar_init(u64* bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(arrivals)
               : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
INK_DEVICE void mbar_expect(u64* bar, u32 num_bytes) {  // one arrival, and num_bytes are to come
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(bar)),
               "r"(num_bytes)
               : "memory");
}
INK_DEVICE void mbar_arrive(u64* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(bar)) : "memory");
}
INK_DEVICE bool mbar_test(u64* bar, u32 parity) {
  u32 done;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, "
      "1, 0, p;\n\t}"
      : "=r"(done)
      : "r"(smem_address(bar)), "r"(parity)
      : "memory");
  return done != 0;
}
INK_DEVICE void mbar_wait(u64* bar, u32 parity, int* error) {
#pragma unroll 1  // else 32 copies, which push other code out of the instruction cache
  for (u32 i = 0; i < INK_SPIN_LIMIT; i++)
    if (mbar_test(bar, parity)) return;
  report_error(error, ERROR_MBARRIER);
}
// Addresses and num_bytes are multiples of 16.
INK_DEVICE void bulk_load(void* to_smem, const void* from, u32 num_bytes, u64* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_address(to_smem)),
      "l"(from), "r"(num_bytes), "r"(smem_address(bar))
      : "memory");
}
// The same for what is read once a step: it is the first to leave the L2, so that what is read again
// stays.
INK_DEVICE void bulk_load_once(void* to_smem, const void* from, u32 num_bytes, u64* bar) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], "
      "%2, [%3], %4;" ::"r"(smem_address(to_smem)),
      "l"(from), "r"(num_bytes), "r"(smem_address(bar)), "l"(policy)
      : "memory");
}

// To the L2 only.
INK_DEVICE void bulk_prefetch(const void* from, u32 num_bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(num_bytes) : "memory");
}
// Orders this thread's writes to shared memory with bulk copies and wgmma that follow.
INK_DEVICE void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- clusters ----
// arrive publishes this thread's writes to the cluster; wait returns when all threads of the
// cluster have arrived.
INK_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
INK_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

#endif  // INK_DEVICE_CUH
