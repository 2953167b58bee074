// The rows of a drafted block over context keys in pages and over the block's own keys.
//
// A block of threads is one part of the pages of one kv head, for ROWS of the kv head's
// G x HEADS_PER_KV rows (row r is block row r / HEADS_PER_KV, head r % HEADS_PER_KV). Pages come as
// bulk copies, STAGES ahead, the first ones before the wait: a draft step writes no cache. A warp
// has 16 rows and 64 / GROUPS keys of every page, a softmax of its own over them, and the sums of
// its groups are added at the end. Part 0 also has the block's own keys, as one page more. Every
// part leaves unnormalized sums, their reference point and denominator.
//
// Macros: GROUP (rows of the block), KV_HEADS, HEADS_PER_KV, DIM, WINDOW (0: none), CAUSAL, SINKS,
// PARTS, TILES (of 16 rows in a block of threads), GROUPS, STAGES. Grid: for every block of
// rows, kv head and part, the last running fastest.
#include "parts.cuh"

constexpr int BLOCK_ROWS = 16 * TILES, THREADS = 32 * TILES * GROUPS, KEYS = PAGE / GROUPS;
constexpr int DIMS = DIM / 8, TILE_BYTES = kv_layout::Tile<DIM>::kBytes;
using Tile = kv_layout::Tile<DIM>;

struct Shared {
  u8 k[STAGES + 1][TILE_BYTES], v[STAGES + 1][TILE_BYTES];  // the last: keys of the block
  float m[GROUPS][BLOCK_ROWS], l[GROUPS][BLOCK_ROWS];
  u64 full[STAGES];
};
static_assert(GROUPS * BLOCK_ROWS * DIM * 4 <= 2 * (STAGES + 1) * TILE_BYTES, "sums of groups");

INK_DEVICE void load_page(Shared& sm, const u8* k_cache, const u8* v_cache, const int* page_table,
                          int page, int kv_head, int stage) {
  const long long tile = Tile::begin(load_act_int(page_table + page), KV_HEADS, kv_head);
  mbar_expect(&sm.full[stage], 2 * TILE_BYTES);
  bulk_load(sm.k[stage], k_cache + tile, TILE_BYTES, &sm.full[stage]);
  bulk_load(sm.v[stage], v_cache + tile, TILE_BYTES, &sm.full[stage]);
}

// Sums of one warp: 16 rows, of which a lane has lane / 4 and 8 more.
struct Sums {
  float o[DIMS][4];
  float m[2], l[2];
};

// One page for a warp. sees(row, key): whether row 0 or 1 of the lane sees a key of the page.
template <class F>
INK_DEVICE void attend_page(Sums& sums, const u32 (&q)[DIM / 16][4], const u8* k, const u8* v,
                            int first_key, float scale, F sees) {
  const int lane = threadIdx.x % 32;
  float s[KEYS / 8][4];
#pragma unroll
  for (int n = 0; n < KEYS / 16; n++) {
    float a[4] = {0.f, 0.f, 0.f, 0.f}, b[4] = {0.f, 0.f, 0.f, 0.f};
    const int token = first_key + 16 * n + lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
      u32 x[4];
      load_matrices(x, k + Tile::chunk(token, 2 * i + lane / 8 % 2));
      mma_bf16(a, q[i], x[0], x[1]);
      mma_bf16(b, q[i], x[2], x[3]);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) s[2 * n][e] = a[e], s[2 * n + 1][e] = b[e];
  }
  float top[2] = {sums.m[0], sums.m[1]};
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int key = first_key + 8 * n + lane % 4 * 2 + e % 2;
      s[n][e] = sees(e / 2, key) ? s[n][e] * scale : 2 * NO_KEY;
      top[e / 2] = fmaxf(top[e / 2], s[n][e]);
    }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    top[i] = fmaxf(top[i], __shfl_xor_sync(INK_FULL_WARP, top[i], 1));
    top[i] = fmaxf(top[i], __shfl_xor_sync(INK_FULL_WARP, top[i], 2));
    const float f = exp2_approx(sums.m[i] - top[i]);
    sums.m[i] = top[i];
    sums.l[i] *= f;
#pragma unroll
    for (int n = 0; n < DIMS; n++) sums.o[n][2 * i] *= f, sums.o[n][2 * i + 1] *= f;
  }
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      s[n][e] = exp2_approx(s[n][e] - top[e / 2]);
      sums.l[e / 2] += s[n][e];
    }
#pragma unroll
  for (int n = 0; n < KEYS / 16; n++) {
    const u32 p[4] = {pack_bf16(s[2 * n][0], s[2 * n][1]), pack_bf16(s[2 * n][2], s[2 * n][3]),
                      pack_bf16(s[2 * n + 1][0], s[2 * n + 1][1]),
                      pack_bf16(s[2 * n + 1][2], s[2 * n + 1][3])};
    const int token = first_key + 16 * n + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
      u32 x[4];
      load_matrices_transposed(x, v + Tile::chunk(token, 2 * i + lane / 16));
      mma_bf16(sums.o[2 * i], p, x[0], x[1]);
      mma_bf16(sums.o[2 * i + 1], p, x[2], x[3]);
    }
  }
}

// scale: in powers of two. o [KV_HEADS][PARTS][ROWS][DIM], ml [KV_HEADS][PARTS][ROWS][2].
extern "C" __global__ void __launch_bounds__(THREADS)
    attend(const bf16* q, const bf16* k, const bf16* v, const u8* k_cache, const u8* v_cache,
           const int* page_table, const int* position, float* o, float* ml, int* error,
           float scale) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int part = blockIdx.x % PARTS, kv_head = blockIdx.x / PARTS % KV_HEADS;
  const int tile = warp % TILES, group = warp / TILES;
  const int first_row = blockIdx.x / (PARTS * KV_HEADS) * BLOCK_ROWS;
  if (thread == 0) {
    pdl_trigger();
    for (int i = 0; i < STAGES; i++) mbar_init(&sm.full[i], 1);
  }
  const int place = load_act_int(position);
  const Pages pages = pages_of(place);
  const int begin = begin_of(part, pages.count), end = begin_of(part + 1, pages.count);
  if (thread == 0)
    for (int i = begin; i < end && i < begin + STAGES; i++)
      load_page(sm, k_cache, v_cache, page_table, pages.first + i, kv_head, i - begin);
  if (part == 0)
    for (int i = GROUP * DIMS + thread; i < PAGE * DIMS; i += THREADS) {
      const int to = Tile::chunk(i / DIMS, i % DIMS);
      *(uint4*)(sm.k[STAGES] + to) = *(uint4*)(sm.v[STAGES] + to) = make_uint4(0, 0, 0, 0);
    }
  pdl_wait();
  if (begin == end && part > 0) return;

  // Rows behind the last are zeros, and keys of the block behind the last too.
  int row[2], block_row[2];
  u32 a[DIM / 16][4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    row[i] = first_row + 16 * tile + lane / 4 + 8 * i;
    block_row[i] = row[i] / HEADS_PER_KV;
    const size_t head =
        ((size_t)block_row[i] * KV_HEADS + kv_head) * HEADS_PER_KV + row[i] % HEADS_PER_KV;
#pragma unroll
    for (int j = 0; j < DIM / 16; j++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        a[j][i + 2 * half] =
            row[i] < ROWS ? load_act4(q + head * DIM + 16 * j + 8 * half + lane % 4 * 2) : 0;
  }
  if (part == 0) {
    for (int i = thread; i < GROUP * DIMS; i += THREADS) {
      const int token = i / DIMS, chunk = i % DIMS, to = Tile::chunk(token, chunk);
      const size_t from = ((size_t)token * KV_HEADS + kv_head) * DIM + 8 * chunk;
      const uint4 key = load_act16(k + from), value = load_act16(v + from);
      *(uint4*)(sm.k[STAGES] + to) = key;
      *(uint4*)(sm.v[STAGES] + to) = value;
    }
  }
  __syncthreads();  // barriers of copies, too

  Sums sums;
#pragma unroll
  for (int i = 0; i < 2; i++) sums.m[i] = NO_KEY, sums.l[i] = 0.f;
#pragma unroll
  for (int n = 0; n < DIMS; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) sums.o[n][e] = 0.f;
  if (part == 0)
    attend_page(sums, a, sm.k[STAGES], sm.v[STAGES], group * KEYS, scale, [&](int i, int key) {
      return key < GROUP && (!CAUSAL || key <= block_row[i]);
    });
#pragma unroll 1
  for (int i = begin; i < end; i++) {
    const int stage = (i - begin) % STAGES, first = (pages.first + i) * PAGE;
    mbar_wait(&sm.full[stage], (i - begin) / STAGES & 1, error);
    if (first + PAGE > place) {  // the last page: nobody has written its end, and 0 x NaN is NaN
      for (int j = thread; j < PAGE * DIMS; j += THREADS)
        if (first + j / DIMS >= place)
          *(uint4*)(sm.v[stage] + Tile::chunk(j / DIMS, j % DIMS)) = make_uint4(0, 0, 0, 0);
      __syncthreads();
    }
    attend_page(sums, a, sm.k[stage], sm.v[stage], group * KEYS, scale, [&](int e, int key) {
      return first + key < place &&
             (!WINDOW || first + key > place + block_row[e] - WINDOW);
    });
    __syncthreads();
    if (thread == 0 && i + STAGES < end)
      load_page(sm, k_cache, v_cache, page_table, pages.first + i + STAGES, kv_head, stage);
  }

  // Sums of the groups, in shared memory in place of pages.
  float* shared_o = (float*)sm.k;  // [GROUPS][BLOCK_ROWS][DIM]
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    sums.l[i] += __shfl_xor_sync(INK_FULL_WARP, sums.l[i], 1);
    sums.l[i] += __shfl_xor_sync(INK_FULL_WARP, sums.l[i], 2);
    const int in_block = 16 * tile + lane / 4 + 8 * i;
    if (lane % 4 == 0) sm.m[group][in_block] = sums.m[i], sm.l[group][in_block] = sums.l[i];
#pragma unroll
    for (int n = 0; n < DIMS; n++)
      *(float2*)(shared_o + (group * BLOCK_ROWS + in_block) * DIM + 8 * n + lane % 4 * 2) =
          make_float2(sums.o[n][2 * i], sums.o[n][2 * i + 1]);
  }
  __syncthreads();
  const size_t out = ((size_t)kv_head * PARTS + part) * ROWS;
  for (int i = thread; i < BLOCK_ROWS * DIM; i += THREADS) {
    const int r = i / DIM;
    if (first_row + r >= ROWS) break;
    float m = sm.m[0][r], l = 0.f, sum = 0.f;
#pragma unroll
    for (int g = 1; g < GROUPS; g++) m = fmaxf(m, sm.m[g][r]);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      const float f = exp2_approx(sm.m[g][r] - m);
      l = fmaf(sm.l[g][r], f, l);
      sum = fmaf(shared_o[(g * BLOCK_ROWS + r) * DIM + i % DIM], f, sum);
    }
    o[(out + first_row + r) * DIM + i % DIM] = sum;
    if (i % DIM == 0) *(float2*)(ml + (out + first_row + r) * 2) = make_float2(m, l);
  }
}
