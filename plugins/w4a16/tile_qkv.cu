// Query/key/value projection of a wide step behind `tile_norm`: RMSNorm of query and key heads,
// rotary positions, and the write of keys and values into the cache (layout: qkv.cu). A block takes
// one head, whose rows are its eight tiles, and BLOCK_TOKENS tokens. Rows of q from num_tokens on
// are left as they are, and such tokens are not written to the cache.
#include "tile.cuh"

constexpr int HEAD = 128, PAGE = 64, PAGE_BYTES = PAGE * HEAD * 2;
constexpr int ALL_HEADS = HEADS + 2 * KV_HEADS;
static_assert(BLOCK_ROWS == HEAD, "a block takes one head");

struct Shared {
  union {
    Stage stages[STAGES];
    Staged<HEAD> out;
  };
  int rows[BLOCK_TOKENS];
};

extern "C" __global__ void __launch_bounds__(THREADS)
    tile_qkv(const bf16* z, const u8* weights, const float* scale, const bf16* q_norm,
             const bf16* k_norm, const float2* angles, u8* k_cache, u8* v_cache, const int* where,
             const int* position, const int* num_tokens, bf16* q, float eps) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, head = blockIdx.x / TOKEN_BLOCKS;
  const TokenBlock tokens = token_block(blockIdx.x % TOKEN_BLOCKS, num_tokens);
  const Product<ALL_HEADS * HEAD, HIDDEN> product = {weights, head * BLOCK_TILES};
  const float unit = begin(product, tokens, sm.stages, sm.rows, scale);
  if (tokens.count <= 0) return;
  Sums c;
  product.run(c, sm.stages, z, sm.rows, tokens.tiles());
  // Tile i has rows 8i.. and 64 + 8i.. of the head, see packing.py.
  {
    const int g = lane >> 2;
#pragma unroll
    for (int r = 0; r < WARP_TILES; r++)
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (n < tokens.tiles())
            sm.out.y[(n * 8 + (lane & 3) * 2 + i % 2) * Staged<HEAD>::STRIDE +
                     (warp * WARP_TILES + r) * 8 + i / 2 * 64 + g] = to_bf16(c[r][n][i] * unit);
    __syncthreads();
  }
  const bool is_query = head < HEADS, is_value = head >= HEADS + KV_HEADS;
  const int kv = is_value ? head - HEADS - KV_HEADS : head - HEADS;
  const int pair = 2 * lane;  // and the one after it: values `pair` and `pair` + 64
  const bf16* head_norm = is_query ? q_norm : k_norm;
  const float2 norm_low = make_float2(to_float(head_norm[pair]), to_float(head_norm[pair + 1]));
  const float2 norm_high =
      make_float2(to_float(head_norm[pair + 64]), to_float(head_norm[pair + 65]));
  const int first_position = load_act_int(position) + tokens.first;
  for (int token = warp; token < tokens.count; token += WARPS) {
    const bf16* y = sm.out.y + token * Staged<HEAD>::STRIDE + pair;
    u32 low_pair = *(const u32*)y, high_pair = *(const u32*)(y + 64);
    if (!is_value) {
      float low[2] = {low_float(low_pair), high_float(low_pair)};
      float high[2] = {low_float(high_pair), high_float(high_pair)};
      const float squares =
          fmaf(high[0], high[0], low[0] * low[0]) + fmaf(high[1], high[1], low[1] * low[1]);
      const float r = inverse_rms(warp_sum(squares), 1.f / HEAD, eps);
      const float weights_low[2] = {norm_low.x, norm_low.y};
      const float weights_high[2] = {norm_high.x, norm_high.y};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        low[i] = round_bf16(low[i] * r * weights_low[i]);
        high[i] = round_bf16(high[i] * r * weights_high[i]);
#if ROPE
        const float2* angle = angles + (size_t)(tokens.first + token) * 64 + pair + i;
        const uint2 bits = load_act8(angle);
        const float sine = __uint_as_float(bits.x), cosine = __uint_as_float(bits.y);
        const float a = __fsub_rn(__fmul_rn(low[i], cosine), __fmul_rn(high[i], sine));
        high[i] = __fadd_rn(__fmul_rn(high[i], cosine), __fmul_rn(low[i], sine));
        low[i] = a;
#endif
      }
      low_pair = pack_bf16(low[0], low[1]);
      high_pair = pack_bf16(high[0], high[1]);
    }
    if (is_query) {
      bf16* out = q + ((size_t)(tokens.first + token) * HEADS + head) * HEAD + pair;
      *(u32*)out = low_pair;
      *(u32*)(out + 64) = high_pair;
    } else {
      const int p = first_position + token, r = p % PAGE;
#if RING
      const int page = load_act_int(where) * (RING / PAGE) + p % RING / PAGE;
#else
      const int page = load_act_int(where + p / PAGE);
#endif
      u8* out = (is_value ? v_cache : k_cache) + ((u64)page * KV_HEADS + kv) * PAGE_BYTES +
                r * 128 + (((pair >> 3) ^ (r & 7)) << 4) + (pair & 7) * 2;
      *(u32*)out = low_pair;
      *(u32*)(out + PAGE_BYTES / 2) = high_pair;
    }
  }
}
