// Entry points of the decode and verify attention of sm_90a; attention.cuh is the kernel, shape.cuh its macros.
// Grid (ATTN_CLUSTER * ATTN_CLUSTERS, ATTN_KV_HEADS, groups of tokens), clusters of ATTN_CLUSTER, 256 threads.
#include "attention.cuh"

// entries: the page table int32 [max_pages], or the slot int32 [1] of a ring.
#if ATTN_RELATIVE
extern "C" __global__ void __launch_bounds__(attention::kThreads, 1)
    relative_attention(const bf16* q, const bf16* rel, const bf16* bank, const bf16* sinks, const bf16* gate,
                       const u8* k_cache, const u8* v_cache, const int* entries, const int* position,
                       const int* num_tokens, bf16* out, float4* partials, float2* partial_sums, int* error,
                       float scale) {
  attention::attend({q, sinks, k_cache, v_cache, entries, position, num_tokens, entries, rel, bank, gate, out, partials,
                     partial_sums, error, scale});
}
#else
extern "C" __global__ void __launch_bounds__(attention::kThreads, 1)
    sink_attention(const bf16* q, const float* sinks, const u8* k_cache, const u8* v_cache, const int* entries,
                   const int* position, const int* num_tokens, bf16* out, float4* partials, float2* partial_sums,
                   int* error, float scale) {
  attention::attend({q, sinks, k_cache, v_cache, entries, position, num_tokens, entries, nullptr, nullptr, nullptr, out,
                     partials, partial_sums, error, scale});
}
#endif
