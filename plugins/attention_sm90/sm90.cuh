// PTX of sm_90a that attention and gated_input need beyond device.cuh. Knows nothing of either.
#pragma once
#include "device.cuh"

namespace sm90 {

INK_DEVICE u32 max_bf16x2(u32 a, u32 b) {  // -0 < +0
  u32 r;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// ---- barriers ----
// As named_barrier; true for all threads if it is for one.
INK_DEVICE bool named_barrier_or(int id, int threads, bool value) {
  u32 r;
  asm volatile(
      "{\n\t.reg .pred p, q;\n\tsetp.ne.u32 p, %1, 0;\n\tbar.red.or.pred q, %2, %3, p;\n\t"
      "selp.u32 %0, 1, 0, q;\n\t}"
      : "=r"(r)
      : "r"((u32)value), "r"(id), "r"(threads)
      : "memory");
  return r != 0;
}
// As mbar_wait, for bytes that other blocks of the cluster push.
INK_DEVICE void mbar_wait_cluster(u64* bar, u32 parity, int* error) {
#pragma unroll 1
  for (u32 i = 0; i < INK_SPIN_LIMIT; ++i) {
    u32 done;
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(smem_address(bar)), "r"(parity)
        : "memory");
    if (done) return;
  }
  report_error(error, ERROR_MBARRIER);
}

// ---- stores to another block of the cluster, whose bytes count on that block's barrier ----
INK_DEVICE u32 address_at(const void* here, int rank) {
  u32 r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(smem_address(here)), "r"(rank));
  return r;
}
INK_DEVICE void push(u32 to, float4 v, u32 bar) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar)
      : "memory");
}
INK_DEVICE void push(u32 to, float2 v, u32 bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(to),
               "f"(v.x), "f"(v.y), "r"(bar)
               : "memory");
}
INK_DEVICE void push(u32 to, float v, u32 bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(v),
               "r"(bar)
               : "memory");
}

// ---- global memory that blocks exchange while they run; every word stands for itself ----
INK_DEVICE void load_relaxed(const float4* p, float4& v) {
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
}
INK_DEVICE void load_relaxed(const float2* p, float2& v) {
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
}
INK_DEVICE void store_relaxed(float4* p, float4 v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
INK_DEVICE void store_relaxed(float2* p, float2 v) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1,%2};" ::"l"(p), "f"(v.x), "f"(v.y) : "memory");
}
INK_DEVICE void store_relaxed(uint2* p, uint2 v) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}

// ---- wgmma ----
// Two or four 8 x 8 tiles of bf16 to shared memory, transposed; the address is that of the lane's row.
INK_DEVICE void store_transposed(u32 to, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}
INK_DEVICE void store_transposed(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
// Descriptor of a tile in shared memory with 128-byte swizzle whose groups of eight rows are 1024 bytes
// apart, K-major or M-major. A step of n bytes inside it is added as n / 16.
INK_DEVICE u64 tile_descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
}
// Keeps the compiler from moving other uses of accumulators across wgmma_fence and wgmma_wait_all.
template <int C>
INK_DEVICE void pin(float (&d)[C][4]) {
#pragma unroll
  for (int c = 0; c < C; ++c) asm volatile("" : "+f"(d[c][0]), "+f"(d[c][1]), "+f"(d[c][2]), "+f"(d[c][3])::"memory");
}
INK_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INK_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
INK_DEVICE void wgmma_wait_all() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// d[64 x 8 C] (+)= a[64 x 16] b[16 x 8 C] for C = 1..8 groups of eight columns; bf16 in, float accumulation.
// kTransposeA: a is M-major. Operand numbers depend on C, hence the macro.
#define SM90_COLUMNS(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define SM90_WGMMA(C, N, REGISTERS, A, B, ADD, TRANSPOSE, ...)                                            \
  template <bool kTransposeA>                                                                             \
  INK_DEVICE void wgmma(float (&d)[C][4], u64 a, u64 b, bool add) {                                       \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " ADD ", 0;\n\t"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" REGISTERS "}, " A ", " B     \
                 ", p, 1, 1, " TRANSPOSE ", 0;\n\t}"                                                      \
                 : __VA_ARGS__                                                                            \
                 : "l"(a), "l"(b), "r"((int)add), "n"(kTransposeA ? 1 : 0));                              \
  }
#define SM90_R1 "%0,%1,%2,%3"
#define SM90_R2 SM90_R1 ",%4,%5,%6,%7"
#define SM90_R3 SM90_R2 ",%8,%9,%10,%11"
#define SM90_R4 SM90_R3 ",%12,%13,%14,%15"
#define SM90_R5 SM90_R4 ",%16,%17,%18,%19"
#define SM90_R6 SM90_R5 ",%20,%21,%22,%23"
#define SM90_R7 SM90_R6 ",%24,%25,%26,%27"
#define SM90_R8 SM90_R7 ",%28,%29,%30,%31"
SM90_WGMMA(1, "8", SM90_R1, "%4", "%5", "%6", "%7",
           SM90_COLUMNS(0))
SM90_WGMMA(2, "16", SM90_R2, "%8", "%9", "%10", "%11",
           SM90_COLUMNS(0), SM90_COLUMNS(1))
SM90_WGMMA(3, "24", SM90_R3, "%12", "%13", "%14", "%15",
           SM90_COLUMNS(0), SM90_COLUMNS(1), SM90_COLUMNS(2))
SM90_WGMMA(4, "32", SM90_R4, "%16", "%17", "%18", "%19",
           SM90_COLUMNS(0), SM90_COLUMNS(1), SM90_COLUMNS(2), SM90_COLUMNS(3))
SM90_WGMMA(5, "40", SM90_R5, "%20", "%21", "%22", "%23",
           SM90_COLUMNS(0), SM90_COLUMNS(1), SM90_COLUMNS(2), SM90_COLUMNS(3), SM90_COLUMNS(4))
SM90_WGMMA(6, "48", SM90_R6, "%24", "%25", "%26", "%27",
           SM90_COLUMNS(0), SM90_COLUMNS(1), SM90_COLUMNS(2), SM90_COLUMNS(3), SM90_COLUMNS(4),
           SM90_COLUMNS(5))
SM90_WGMMA(7, "56", SM90_R7, "%28", "%29", "%30", "%31",
           SM90_COLUMNS(0), SM90_COLUMNS(1), SM90_COLUMNS(2), SM90_COLUMNS(3), SM90_COLUMNS(4),
           SM90_COLUMNS(5), SM90_COLUMNS(6))
SM90_WGMMA(8, "64", SM90_R8, "%32", "%33", "%34", "%35",
           SM90_COLUMNS(0), SM90_COLUMNS(1), SM90_COLUMNS(2), SM90_COLUMNS(3), SM90_COLUMNS(4),
           SM90_COLUMNS(5), SM90_COLUMNS(6), SM90_COLUMNS(7))
#undef SM90_R1
#undef SM90_R2
#undef SM90_R3
#undef SM90_R4
#undef SM90_R5
#undef SM90_R6
#undef SM90_R7
#undef SM90_R8
#undef SM90_WGMMA
#undef SM90_COLUMNS

}  // namespace sm90
