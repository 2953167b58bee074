// Residual add, RMSNorm, query/key/value projection, RMSNorm of query and key heads, rotary
// positions, and the write of keys and values into the cache. T = 1..8 tokens; hidden size at most
// 2048.
//
// CLUSTER blocks own one head of 128 rows; tiles hold rows 8i.. and 64+8i.., so that rotary pairs
// meet in one thread and blocks exchange nothing but sums of squares. The weights are staged in
// shared memory before the wait. The position, the slot and the page table must not change within a
// step: they are read before the wait too.
//
// A cache page is 64 tokens of one head: [half of the head][token][64 values], the 16-byte piece c
// of a row at c ^ (token & 7); see docs/kernels.md. A ring of RING rows is RING / 64 pages of a
// slot; without (RING = 0) `where` is the page table.
#include "w4a16.cuh"

constexpr int HEAD = 128, HEAD_TILES = HEAD / 16, PAGE = 64, PAGE_BYTES = PAGE * HEAD * 2;
constexpr int WARPS = 16, THREADS = WARPS * 32;
constexpr int TILES = (HEAD_TILES + CLUSTER - 1) / CLUSTER;  // of a block, at most
constexpr int NV = vectors_per_warp(HIDDEN, WARPS), LIVE_WARPS = HIDDEN / VECTOR_K / NV;
constexpr int TILE_BYTES = tile_bytes(HIDDEN);
// Without a delta, eight rows at once would not fit the registers.
using InputNorm = Norm<HIDDEN, THREADS, HAS_DELTA ? MAX_TOKENS : 4, HAS_DELTA>;

// What a thread needs to finish its pair, kept in shared memory so that the norm has the registers.
struct Finish {
  float unit, norm_low, norm_high, sine, cosine;
  u64 row;  // byte offset of the token's row in the cache, or NOT_STORED
};
constexpr u64 NOT_STORED = ~0ull;

struct Shared {
  alignas(128) u8 weights[TILES * TILE_BYTES];
  InputNorm::Memory norm;
  alignas(16) float partial[TILES * LIVE_WARPS * 128];
  alignas(16) float squares[HEAD_TILES * MAX_TOKENS];  // of all tiles of the head, from every block
  Finish finish[TILES * 64];
  u64 bar;
};

#if ROPE
__constant__ float INVERSE_FREQUENCIES[HEAD / 2] = {INV_FREQ};

// Sine and cosine of a float32 angle >= 0, rounded once from double: the angle is reduced by pi/2
// in two parts (exact enough below 2^30), then polynomials up to |x| = pi/4. Tested to be rounded
// correctly for all positions below 2^18.
INK_DEVICE void sin_cos(float angle, float& sine, float& cosine) {
  const double a = angle, n = rint(a * 0.63661977236758134308);
  double x = fma(-n, 1.5707963267948965580, a);
  x = fma(-n, 6.1232339957367658e-17, x);
  const double y = x * x;
  double s = 1.5896230157654656e-10, c = -1.1359647557788195e-11;
  s = fma(s, y, -2.5052108385441719e-08), c = fma(c, y, 2.0876756987868099e-09);
  s = fma(s, y, 2.7557319223985893e-06), c = fma(c, y, -2.7557319223985888e-07);
  s = fma(s, y, -1.9841269841269841e-04), c = fma(c, y, 2.4801587301587302e-05);
  s = fma(s, y, 8.3333333333333332e-03), c = fma(c, y, -1.3888888888888889e-03);
  s = fma(s, y, -1.6666666666666666e-01), c = fma(c, y, 4.1666666666666664e-02);
  s = fma(s * y, x, x), c = fma(fma(c, y, -0.5), y, 1.0);
  const int quadrant = (int)n & 3;
  const float u = (float)s, v = (float)c;
  sine = quadrant & 1 ? v : u;
  cosine = quadrant & 1 ? u : v;
  if (quadrant & 2) sine = -sine;
  if ((quadrant + 1) & 2) cosine = -cosine;
}
#endif

extern "C" __global__ void __maxnreg__(56)
    qkv(const bf16* x, const bf16* delta, const bf16* norm_weight, const u8* weights,
        const float* scale, const bf16* q_norm, const bf16* k_norm, u8* k_cache, u8* v_cache,
        const int* where, const int* position, const int* num_tokens, bf16* q_out, bf16* residual,
        int* error, int T, float eps) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int head = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  const int first = rank * HEAD_TILES / CLUSTER, count = (rank + 1) * HEAD_TILES / CLUSTER - first;
  const bool is_value = head >= HEADS + KV_HEADS, is_query = head < HEADS;
  trigger_first();
  if (tid == 0) {
    mbar_init(&sm.bar, 1);
    mbar_expect(&sm.bar, count * TILE_BYTES);
    bulk_load(sm.weights, weights + (size_t)(head * HEAD_TILES + first) * TILE_BYTES,
              count * TILE_BYTES, &sm.bar);
  }
#if CLUSTER > 1
  cluster_arrive();  // "this block runs": before that, nobody may write to its shared memory
#endif
  InputNorm::load_weight(sm.norm, norm_weight);

  // Each thread below 64 count finishes one rotary pair of one token: rows `pair` and `pair` + 64.
  const int piece = tid >> 6, token = tid >> 3 & 7, pair = (first + piece) * 8 + (tid & 7);
  const bool busy = piece < count;
  if (busy) {
    Finish f = {0, 0, 0, 0, 1, NOT_STORED};
    f.unit = tensor_unit(scale);
    const bf16* head_norm = is_query ? q_norm : k_norm;
    f.norm_low = to_float(head_norm[pair]);
    f.norm_high = to_float(head_norm[pair + HEAD / 2]);
    const int p = load_act_int(position) + token;
#if ROPE
    sin_cos(__fmul_rn((float)p, INVERSE_FREQUENCIES[pair]), f.sine, f.cosine);
#endif
    if (!is_query && token < min(T, load_act_int(num_tokens))) {
#if RING
      const int page = load_act_int(where) * (RING / PAGE) + p % RING / PAGE;
#else
      const int page = load_act_int(where + p / PAGE);
#endif
      const int kv = is_value ? head - HEADS - KV_HEADS : head - HEADS, r = p % PAGE;
      f.row = ((u64)page * KV_HEADS + kv) * PAGE_BYTES + r * 128 + (((pair >> 3) ^ (r & 7)) << 4) +
              (pair & 7) * 2;
    }
    sm.finish[tid] = f;
  }

  wait_and_trigger();
  InputNorm::run(sm.norm, x, delta, eps, residual, nullptr, T,
                 blockIdx.x < T ? (int)blockIdx.x : -1);
  mbar_wait(&sm.bar, 0, error);
  if (warp < LIVE_WARPS) {
    Activations<NV> b;
    load_tokens_shared<NV>(b, sm.norm.z + min(lane >> 2, T - 1) * InputNorm::STRIDE, warp * NV,
                           lane);
#pragma unroll
    for (int d = 0; d < TILES; d++)
      if (d < count) {
        Tile tile = zero_tile();
        multiply_shared<NV>(tile, sm.weights + d * TILE_BYTES, b, warp * NV, lane);
        store_tile(sm.partial + (d * LIVE_WARPS + warp) * 128, tile, lane);
      }
  }
  __syncthreads();

  float low = 0, high = 0;
  Finish f = {0, 0, 0, 0, 1, NOT_STORED};
  if (busy) {
    f = sm.finish[tid];
    const float* p = sm.partial + piece * LIVE_WARPS * 128 + (tid & 7) * 8 + token;
    low = round_bf16(strided_sum<LIVE_WARPS>(p, 128) * f.unit);
    high = round_bf16(strided_sum<LIVE_WARPS>(p + 64, 128) * f.unit);
  }
#if CLUSTER > 1
  cluster_wait();
#endif
  if (is_value) {
    if (f.row != NOT_STORED) {
      *(bf16*)(v_cache + f.row) = to_bf16(low);
      *(bf16*)(v_cache + f.row + PAGE_BYTES / 2) = to_bf16(high);
    }
    return;
  }
  float squares = fmaf(high, high, low * low);
#pragma unroll
  for (int o = 1; o < 8; o <<= 1) squares += __shfl_xor_sync(INK_FULL_WARP, squares, o);
  float* mine = sm.squares + (first + piece) * MAX_TOKENS + token;
  if (busy && (tid & 7) == 0) {
#if CLUSTER > 1
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) store_to_block(mine, r, squares);
#else
    *mine = squares;
#endif
  }
#if CLUSTER > 1
  cluster_arrive();
  cluster_wait();
#else
  __syncthreads();
#endif
  if (!busy || token >= T) return;
  const float mean = strided_sum<HEAD_TILES>(sm.squares + token, MAX_TOKENS) * (1.f / HEAD);
  const float r = rsqrt_approx(mean + eps);
  low = round_bf16(low * r * f.norm_low);
  high = round_bf16(high * r * f.norm_high);
#if ROPE
  const float a = __fsub_rn(__fmul_rn(low, f.cosine), __fmul_rn(high, f.sine));
  high = __fadd_rn(__fmul_rn(high, f.cosine), __fmul_rn(low, f.sine));
  low = a;
#endif
  if (is_query) {
    bf16* out = q_out + (size_t)token * HEADS * HEAD + head * HEAD + pair;
    out[0] = to_bf16(low);
    out[HEAD / 2] = to_bf16(high);
  } else if (f.row != NOT_STORED) {
    *(bf16*)(k_cache + f.row) = to_bf16(low);
    *(bf16*)(k_cache + f.row + PAGE_BYTES / 2) = to_bf16(high);
  }
}
