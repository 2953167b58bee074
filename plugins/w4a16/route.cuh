// Routing: the TOP_K experts of each token from its bf16 logits, and the step's distinct experts.
// Every block computes it for itself. Order of logits, ties to the lowest index; w = bf16(s / (sum
// s + 1e-20)) with the exact sigmoid s of the bf16 logit, summed in that order.
#ifndef INK_ROUTE_CUH
#define INK_ROUTE_CUH
#include "w4a16.cuh"

constexpr int SLOTS = MAX_TOKENS * TOP_K;
static_assert(EXPERTS <= 256 && EXPERTS % 8 == 0, "at most 256 experts, a multiple of 8");
static_assert(TOP_K <= 8 && TOP_K <= EXPERTS, "at most 8 experts a token");
constexpr int ROUTE_WARPS = 8;
constexpr u8 NO_RANK = 255;

struct Route {
  float weight[MAX_TOKENS][TOP_K];
  u32 bits[8];
  int num_experts;
  alignas(8) u8 rank[SLOTS][MAX_TOKENS];  // rank of distinct expert u for a token, or NO_RANK
  u16 expert[SLOTS];                      // distinct experts in rising order
  u16 chosen[MAX_TOKENS][TOP_K];
  u8 index[MAX_TOKENS][TOP_K];  // distinct expert of a token's rank
};
// Of one token. Each warp has its own list, so that no block barrier is needed.
struct SoloRoute {
  int expert[ROUTE_WARPS][8];
  float weight[8];
};

// Eight logits of each lane as numbers that order as they do, ties to the lowest index: (bits of
// the logit made to rise with it, 255 - index).
struct Keys {
  u32 key[8];
};
INK_DEVICE uint4 load_logits(const bf16* logits, int lane) {
  return lane * 8 < EXPERTS ? load_act16(logits + lane * 8) : make_uint4(0, 0, 0, 0);
}
INK_DEVICE u32 key_of(u32 logit, int index) {  // bits of a bf16
  return (logit & 0x8000 ? ~logit & 0xFFFF : logit | 0x8000) << 8 | (255 - index);
}
INK_DEVICE Keys keys_of(uint4 v, int lane) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  Keys keys;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 logit = (words[i >> 1] >> (16 * (i & 1))) & 0xFFFF;
    keys.key[i] = lane * 8 < EXPERTS ? key_of(logit, lane * 8 + i) : 0;
  }
  return keys;
}
// The largest key of the warp, which is taken out.
INK_DEVICE u32 take_largest(Keys& keys) {
  u32(&key)[8] = keys.key;
  u32 best = max(max(max(key[0], key[1]), max(key[2], key[3])),
                 max(max(key[4], key[5]), max(key[6], key[7])));
  best = __reduce_max_sync(INK_FULL_WARP, best);
#pragma unroll
  for (int i = 0; i < 8; i++) key[i] = key[i] == best ? 0 : key[i];
  return best;
}
INK_DEVICE int expert_of(u32 key) {
  return min(255 - (int)(key & 255), EXPERTS - 1);  // within bounds whatever the logits are
}

// Weight of rank k in lane k < TOP_K, from the keys of all ranks in their lanes.
INK_DEVICE float routing_weight(u32 key, int lane) {
  u32 h = key >> 8;
  h = h & 0x8000 ? h & 0x7FFF : ~h & 0xFFFF;
  const float s = lane < TOP_K ? 1.f / (1.f + expf(-to_float((bf16)h))) : 0.f;
  float sum = 0;
#pragma unroll
  for (int k = 0; k < TOP_K; k++) sum += __shfl_sync(INK_FULL_WARP, s, k);
  return round_bf16(s / (sum + 1e-20f));
}

// Lane k < TOP_K: key of rank k. bits: the token's logits, from `load_logits`.
INK_DEVICE u32 top_key(uint4 bits, int lane) {
  Keys keys = keys_of(bits, lane);
  u32 mine = 0;
#pragma unroll 1  // few instructions, which a launch must fetch before it can run them
  for (int k = 0; k < TOP_K; k++) {
    const u32 best = take_largest(keys);
    if (lane == k) mine = best;
  }
  return mine;
}

// One token: the expert of each rank. ROUTE_WARPS warps; weights may be read after a block barrier.
INK_DEVICE const int* choose(const bf16* logits, int lane, int warp, SoloRoute& r) {
  const u32 key = top_key(load_logits(logits, lane), lane);
  const float weight = routing_weight(key, lane);
  if (lane < TOP_K) {
    r.expert[warp][lane] = expert_of(key);
    if (warp == 0) r.weight[lane] = weight;
  }
  __syncwarp();
  return r.expert[warp];
}

// T > 1 tokens; at least ROUTE_WARPS warps. Contains block barriers, also at the end; `weight`
// comes after them, see `weigh`. bits: logits of token `warp`. Gives this lane's key for `weigh`.
INK_DEVICE u32 route(uint4 bits, int T, Route& r) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  if (tid < 8) r.bits[tid] = 0;
  for (int i = tid; i < SLOTS * MAX_TOKENS / 4; i += ROUTE_WARPS * 32)
    ((u32*)r.rank)[i] = 0xFFFFFFFFu;
  const u32 key = warp < T ? top_key(bits, lane) : 0;
  const bool is_choice = warp < T && lane < TOP_K;
  const int chosen = expert_of(key);
  __syncthreads();
  if (is_choice) atomicOr(&r.bits[chosen >> 5], 1u << (chosen & 31));
  __syncthreads();
  // A distinct expert's place is the number of those below it: in words before its own, and in it.
  const u32 word = r.bits[lane & 7];
  int below = __popc(word);
#pragma unroll
  for (int o = 1; o < 8; o <<= 1) {
    const int lower = __shfl_up_sync(INK_FULL_WARP, below, o);
    if ((lane & 7) >= o) below += lower;
  }
  if (tid == 7) r.num_experts = below;
  below -= __popc(word);
  auto place_of = [&](int e) {
    return __shfl_sync(INK_FULL_WARP, below, e >> 5) +
           __popc(__shfl_sync(INK_FULL_WARP, word, e >> 5) & ((1u << (e & 31)) - 1));
  };
  const int place = place_of(tid & 255), place_of_choice = place_of(chosen);
  if (tid < EXPERTS && r.bits[tid >> 5] >> (tid & 31) & 1) r.expert[place] = tid;
  if (is_choice) {
    r.chosen[warp][lane] = chosen;
    r.rank[place_of_choice][warp] = lane;
    r.index[warp][lane] = place_of_choice;
  }
  __syncthreads();
  return key;
}
// The weights, from what `route` gave; to be read behind a block barrier.
INK_DEVICE void weigh(u32 key, int T, Route& r) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (warp >= T) return;
  const float weight = routing_weight(key, lane);
  if (lane < TOP_K) r.weight[warp][lane] = weight;
}
#endif  // INK_ROUTE_CUH
