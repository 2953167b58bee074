// kv_write: a thread stores four values of a key and those of the value (layout: kv_layout.cuh).
#include "kv_layout.cuh"
#include "vector.cuh"

constexpr int FOURS = KV_HEADS * HEAD / 4;  // of a token
using Tile = kv_layout::Tile<HEAD>;

extern "C" __global__ void __launch_bounds__(128)
    kv_write(const bf16* k, const bf16* v, u8* k_cache, u8* v_cache, const int* page_table,
             const int* position, const int* num_tokens, const int* slot) {
  pdl_trigger();
  const int i = blockIdx.x * 128 + threadIdx.x, count = load_act_int(num_tokens);
  // Of a step wider than the ring the rows that stay.
  const int token = i / FOURS + (KV_RING ? max(count - KV_RING, 0) : 0);
  const int head = i % FOURS / (HEAD / 4), dim = i % (HEAD / 4) * 4;
  const bool is_live = token < count;
  size_t to = 0;
  if (is_live) {
    const int p = load_act_int(position) + token;
    const int page = kv_layout::page_of(p, KV_RING ? nullptr : page_table, load_act_int(slot),
                                        KV_RING ? KV_RING : 1);
    to = Tile::begin(page, KV_HEADS, head) + Tile::dim(p % kv_layout::kPageTokens, dim);
  }
  pdl_wait();
  if (!is_live) return;
  const size_t from = ((size_t)token * KV_HEADS + head) * HEAD + dim;
  *(uint2*)(k_cache + to) = load_act8(k + from);
  *(uint2*)(v_cache + to) = load_act8(v + from);
}
