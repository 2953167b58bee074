// A run of Flint's expert layers for one token in one launch: BLOCKS blocks, one on each SM, that
// hand each other vectors through `exchange.cuh`. No grid barrier, no flag.
//
// A layer is six phases; each needs all blocks' results of the one before:
//   qkv        norm, projection                        row tiles dealt out evenly
//   attention  head norms, rotation, cache write       blocks that have pages (attend.cuh)
//   o          projection, residual add                16 rows a block
//   router     norm, router, shared gate/up            a tile of 8 + 8 rows and ROUTER_ROWS rows
//   gate_up    top-k, routed gate/up                   EXPERT_SLOTS tiles of 8 + 8 rows
//   down       routed and shared down, residual add    16 rows a block
//
// Shared memory holds a whole layer's weights, so those of the next layer stream in while this one
// waits. They become A operands in registers before the activations arrive, where they are there in
// time. `schedule` says when which are requested: bulk copies lengthen the handoffs behind them.
//
// Block b owns rows 16 b.. of the residual stream: it keeps them in registers and publishes s = x +
// delta in float32; readers norm for themselves. Roundings and orders of summation are those of the
// kernels of single operators (w4a16, attention_sm90), so a step has the same bits whichever runs.
#define WEIGHTS 0
#define ONE_TOKEN 1
#include "memory.cuh"
#include "vectors.cuh"
#include "choose.cuh"
#include "w4a16/sin_cos.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    layers(const bf16* x, const bf16* delta, const u8* const* table, const int* page_table,
           const int* position, const int* slot, bf16* residual_out, bf16* delta_out,
           Slot* exchange, float4* partials, float2* partial_sums, u32* slots_used, int* error,
           u32 schedule, float eps, float scale
#if TRACE
           ,
           long long* trace
#endif
    ) {
  Shared& sm = *(Shared*)dynamic_smem();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, b = blockIdx.x;
  const bool is_owner = b < OWNERS;
  const int first_tile = first_tile_of(b), num_tiles = first_tile_of(b + 1) - first_tile;
  const int router_rows = router_rows_of(b);
  Patience patience{error};
  u8* const ring = sm.gate_up;
  bf16* const page = sm.x[warp];
  u32 page_parities = 0;

  auto mark = [&](int layer, int event) {
#if TRACE
    if (lane == 0) trace[((size_t)layer * BLOCKS + b) * TRACE + event] = clock64();
#endif
  };
  auto load_layer = [&](int layer) {  // one warp
    Layer& to = sm.layer[layer & 1];
    if (lane < COLUMNS) {
      const u8* at = (const u8*)table[layer * COLUMNS + lane];
      to.at[lane] = at;
      if (unit_of_column(lane) >= 0)
        to.unit[unit_of_column(lane)] = load_weight_float((const float*)at) * UNIT;
    }
  };
  auto pages_of = [&](int layer) {
    attention::Pages pages;
    (attention::Share&)pages = sm.share[HAS_WINDOW[layer]];
    pages.k_cache = sm.layer[layer & 1].at[K_CACHE];
    pages.v_cache = sm.layer[layer & 1].at[V_CACHE];
    pages.table = HAS_WINDOW[layer] ? nullptr : page_table;
    pages.ring_pages = RING / attention::kPage;
    pages.ring_first = sm.ring_slot * pages.ring_pages;
    pages.position = sm.position;
    return pages;
  };
  auto slot_of = [&](int layer) -> Slot& { return exchange[(sm.first_slot + layer) % NUM_SLOTS]; };
  const int piece = warp - FIRST_WARP;
  auto request_at = [&](int point, int layer) {  // all warps
    if (piece >= 0 && point == (int)(schedule >> (4 * piece) & 15) && layer < LAYERS && lane == 0)
      request(sm, sm.layer[layer & 1], piece);
  };

  const int p = load_act_int(position);
  if (tid == 0) {
    sm.position = p;
    sm.ring_slot = load_act_int(slot);
  }
  if (tid < 6) mbar_init((&sm.bar_qkv) + tid, 1);
  if (tid < 6) mbar_init(sm.bar_gate_up[0] + tid, 1);
  if (tid < 2 * ATTN_STAGES) mbar_init(sm.bar_pages + tid, 1);
  if (warp == 13) load_layer(0);
  if (tid < HEAD / 2)
    sin_cos(__fmul_rn((float)p, INVERSE_FREQUENCIES[tid]), sm.sine[tid], sm.cosine[tid]);
  if (tid >= 64 && tid < 66)
    sm.share[tid - 64] = attention::find_share(b, p, tid == 64 ? 0 : WINDOW);
  __syncthreads();
  if (piece >= 0 && lane == 0) request(sm, sm.layer[0], piece);
  if (warp == 0) pages_of(0).prefetch(0, attention::EARLY_STAGES, ring, sm.bar_pages, lane);

  // Row 16 b + lane of the residual stream lives in warp 0.
  const bool has_row = warp == 0 && is_owner && lane < 16;
  float s = 0;
  pdl_wait();
  // Behind the wait: this very launch may run just before, and its block b ends later than others.
  const u32 first_slot = load_act4(slots_used + b);
  if (has_row) s = to_float(x[b * 16 + lane]) + to_float(delta[b * 16 + lane]);
  if (tid == 0) sm.first_slot = first_slot;
  __syncthreads();
  if (has_row) publish4(slot_of(0).before_attention + b * 16 + lane, __float_as_uint(s));

#pragma unroll 1
  for (int index = 0; index < LAYERS; index++) {
    Slot& words = slot_of(index);
#if TRACE
    patience.trace = trace + ((size_t)index * BLOCKS + b) * TRACE;
#endif
    const Layer& layer = sm.layer[index & 1];
    const u32 parity = index & 1;
    const bool has_next = index + 1 < LAYERS;
    if (index == LAYERS - 1 && tid == 0) pdl_trigger();

    // ---- qkv ----
    {
      Ready<VECTORS> w[READY_TILES];
      const uint2 input_norm =
          load_weight8((const bf16*)layer.at[INPUT_NORM] + warp * 128 + lane * 4);
      wait(&sm.bar_qkv, parity, patience);
#pragma unroll
      for (int d = 0; d < READY_TILES; d++)
        make_ready(w[d], sm.qkv + d * TILE_BYTES, warp * VECTORS, lane);
      if (warp == 0) mark(index, 0);
      const uint2 z = receive_normed(words.before_attention, sm.squares[0], input_norm, eps, warp,
                                     lane, patience);
      if (warp == 0) mark(index, 1);
      *(uint2*)(page + lane * 4) = z;
      __syncwarp();
      Activations<VECTORS> act;
      load_tokens_shared<VECTORS>(act, page, 0, lane);
#pragma unroll
      for (int d = 0; d < READY_TILES; d++) {
        Tile t = zero_tile();
        multiply_ready(t, w[d], act);
        store_rows(sm.wide + (d * WARPS + warp) * 16, t, lane);
      }
      if (QKV_TILES > READY_TILES && num_tiles > READY_TILES) {
        Tile t = zero_tile();
        make_ready(w[0], sm.qkv + READY_TILES * TILE_BYTES, warp * VECTORS, lane);
        multiply_ready(t, w[0], act);
        store_rows(sm.wide + (READY_TILES * WARPS + warp) * 16, t, lane);
      }
    }
    __syncthreads();
    if (warp < num_tiles) {
      const float y = round_bf16(row_sum(sm.wide + warp * WARPS * 16, lane) * layer.unit[QKV_UNIT]);
      const float high = __shfl_down_sync(INK_FULL_WARP, y, 8);
      if (lane < 8) publish4(words.heads + (first_tile + warp) * 8 + lane, pack_bf16(y, high));
    }
    if (warp == 0) mark(index, 2);
    if (warp == 13 && has_next) load_layer(index + 1);
    if (warp == 14) {
      uint4* const share = (uint4*)&slot_of(index + EMPTIED_AHEAD) + b * PIECES_OF_BLOCK;
      for (int i = lane; is_owner && i < PIECES_OF_BLOCK; i += 32) empty16(share + i);
      // Performed, as what attention emptied in the last layer, before what this block publishes
      // later.
      asm volatile("fence.acq_rel.gpu;" ::: "memory");
    }
    if (warp == 15)
      pages_of(index).prefetch(attention::EARLY_STAGES, ATTN_STAGES, ring, sm.bar_pages, lane);
    if (warp == 12 && HAS_WINDOW[index]) {  // while the DRAM is idle
      int full = index + 1;
      while (full < LAYERS && HAS_WINDOW[full]) full++;
      const u8* const* const row = table + full * COLUMNS;
      if (full < LAYERS)
        sm.share[0].prefetch_to_l2(row[K_CACHE], row[V_CACHE], page_table, full - index, lane);
    }

    // ---- attention ----
    if (warp < 11 && sm.share[HAS_WINDOW[index]].takes_part()) {
      const attention::Pages pages = pages_of(index);
      const size_t set = (size_t)(index & 1) * KV_HEADS * 8 * ATTN_CLUSTERS;
      attention::Args args = {};
      args.sinks = layer.at[SINKS];
      args.out = words.attended;
      args.partials = partials + set * 32;
      args.partial_sums = partial_sums + set * SUM_COPIES;
      args.error = error;
      args.scale = scale;
      const attention::Rotation rotation = {HAS_ROPE[index] ? sm.sine : nullptr, sm.cosine};
      const attention::OneToken one = {pages,
                                       args,
                                       words.heads,
                                       (const bf16*)layer.at[Q_NORM],
                                       (const bf16*)layer.at[K_NORM],
                                       rotation,
                                       eps,
                                       ring,
                                       sm.bar_pages,
                                       sm.row};
      one.run(page_parities, warp, lane, patience);
    }
    if (warp == 0) mark(index, 3);
    if (warp == 10) mark(index, 18);

    // ---- o ----
    if (is_owner) {
      Ready<O_VECTORS> w;
      wait(&sm.bar_o, parity, patience);
      make_ready(w, sm.o, warp * O_VECTORS, lane);
      if (warp == 0) mark(index, 15);
      const uint4 v = receive16(words.attended + warp * 256 + lane * 8, patience);
      if (warp == 0) mark(index, 4);
      multiply_slice(w, v, page, sm.narrow + warp * 16, lane);
    }
    __syncthreads();
    if (is_owner && warp == 0) {
      const float y = round_bf16(row_sum(sm.narrow, lane) * layer.unit[O_UNIT]);
      s = round_bf16(s) + y;
      if (lane < 16) publish4(words.before_experts + b * 16 + lane, __float_as_uint(s));
      mark(index, 5);
    }
    request_at(AFTER_O, index + 1);
    if (!is_owner) {  // what comes is not for these blocks
      for (int point = AFTER_ROUTER; point < POINTS; point++) request_at(point, index + 1);
    } else {
      // ---- router and shared gate/up ----
      {
        Ready<VECTORS> w;
        u32 rows[VECTORS][8];
        const uint2 mlp_norm =
            load_weight8((const bf16*)layer.at[MLP_NORM] + warp * 128 + lane * 4);
        wait(&sm.bar_router, parity, patience);
        wait(&sm.bar_shared_gate_up, parity, patience);
        make_ready(w, sm.shared_gate_up, warp * VECTORS, lane);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
          const bf16* from =
              sm.router + g * HIDDEN + (warp * VECTORS + i) * VECTOR_K + (lane & 3) * 16;
          const uint4 none = make_uint4(0, 0, 0, 0);
          const uint4 lo = g < router_rows ? *(const uint4*)from : none,
                      hi = g < router_rows ? *(const uint4*)(from + 8) : none;
          rows[i][0] = lo.x, rows[i][1] = lo.y, rows[i][2] = lo.z, rows[i][3] = lo.w;
          rows[i][4] = hi.x, rows[i][5] = hi.y, rows[i][6] = hi.z, rows[i][7] = hi.w;
#pragma unroll
          for (int j = 0; j < 8; j++) asm volatile("" : "+r"(rows[i][j]));  // before the wait
        }
        if (warp == 0) mark(index, 16);
        const uint2 z = receive_normed(words.before_experts, sm.squares[1], mlp_norm, eps, warp,
                                       lane, patience);
        if (warp == 0) mark(index, 6);
        *(uint2*)(page + lane * 4) = z;
        __syncwarp();
        Activations<VECTORS> act;
        load_tokens_shared<VECTORS>(act, page, 0, lane);
        Tile scores = zero_tile(), t = zero_tile();
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
          const Tokens& v = act.v[i];
          const u32 y[8] = {v.lo.x, v.lo.y, v.lo.z, v.lo.w, v.hi.x, v.hi.y, v.hi.z, v.hi.w};
#pragma unroll
          for (int m = 0; m < 4; m++) {
            const u32 a[4] = {rows[i][2 * m], 0, rows[i][2 * m + 1], 0};
            mma_bf16(scores.c[m & 1], a, y[2 * m], y[2 * m + 1]);
          }
        }
        if ((lane & 3) == 0 && g < 2) sm.logits[warp * 2 + g] = scores.c[0][0] + scores.c[1][0];
        multiply_ready(t, w, act);
        store_rows(sm.gated + warp * 16, t, lane);
      }
      __syncthreads();
      if (warp == 1) {
        mark(index, 19);
        const int row = lane % 2;  // a word for each lane: [copy][sector]
        if (row < router_rows) {
          float even = 0, odd = 0;
#pragma unroll
          for (int i = 0; i < WARPS; i += 2)
            even += sm.logits[i * 2 + row], odd += sm.logits[i * 2 + 2 + row];
          publish4(&words.logits[lane / SECTOR][b][lane % SECTOR], to_bf16(even + odd));
        }
      } else if (warp == 0) {
        const float y = round_bf16(row_sum(sm.gated, lane) * layer.unit[SHARED_GATE_UP_UNIT]);
        const float up = __shfl_down_sync(INK_FULL_WARP, y, 8);
        publish_eight(words.shared[b], silu_exact(y) * up, lane);
        mark(index, 7);
      }
      request_at(AFTER_ROUTER, index + 1);

      choose_experts(sm, layer, words, parity, warp, lane, patience,
                     [&](int event) { mark(index, event); });

      // ---- routed gate/up ----
      if (warp < CHOICE_WARP || warp > WEIGHT_WARP) chosen_wait();  // without spinning
      {
        Activations<VECTORS> act;
        load_tokens_shared<VECTORS>(act, page, 0, lane);
#pragma unroll 1
        for (int d = 0; d < EXPERT_SLOTS; d++) {
          wait(&sm.bar_gate_up[d][warp / (WARPS / 2)], parity, patience);
          if (warp == 0 && d != 1) mark(index, d ? 11 : 10);
          if (d == 0) request_at(BEHIND_EXPERTS, index + 1);
          Tile t = zero_tile();
          Ready<VECTORS> w;
          make_ready(w, sm.gate_up + d * TILE_BYTES, warp * VECTORS, lane);
          multiply_ready(t, w, act);
          store_rows(sm.wide + (d * WARPS + warp) * 16, t, lane);
        }
      }
      __syncthreads();
      if (warp < EXPERT_SLOTS) {
        const int tile = warp * OWNERS + b;
        const float y =
            row_sum(sm.wide + warp * WARPS * 16, lane) * sm.gate_up_unit[tile / EXPERT_TILES];
        const float up = __shfl_down_sync(INK_FULL_WARP, y, 8);
        publish_eight(words.hidden[tile], silu_approx(y) * up, lane);
        if (warp == 0) mark(index, 12);
      }
      request_at(AFTER_GATE_UP, index + 1);

      // ---- down: warps 2 j and 2 j + 1 take the halves of expert j, the last ones the shared
      // expert ----
      {
        constexpr int ROUTED_WARPS = 2 * TOP_K;
        Ready<DOWN_VECTORS> w;
        const bool is_routed = warp < ROUTED_WARPS;
        if (is_routed)
          wait(&sm.bar_down, parity, patience);
        else
          wait(&sm.bar_shared_down, parity, patience);
        int half = is_routed ? warp : warp - ROUTED_WARPS;
        asm volatile("" : "+r"(half));  // addresses made here, else one is spilled over all layers
        make_ready(w, (is_routed ? sm.down : sm.shared_down) + half / 2 * JOB_BYTES,
                   half % 2 * DOWN_VECTORS, lane);
        if (warp == 0) mark(index, 17);
        const uint4 v =
            receive16((is_routed ? words.hidden : words.shared)[half * 32 + lane], patience);
        if (warp == 0) mark(index, 13);
        multiply_slice(w, v, page, sm.narrow + warp * 16, lane);
      }
      __syncthreads();
      if (warp == 0) {
        const float* row = sm.narrow + (lane & 15);
        float routed = 0, shared = 0;
#pragma unroll
        for (int k = 0; k < TOP_K; k++)
          routed = fmaf(sm.routing_weight[k],
                        round_bf16((row[32 * k] + row[32 * k + 16]) * sm.down_unit[k]), routed);
#pragma unroll
        for (int j = TOP_K; j < TOP_K + SHARED_JOBS; j++) shared += row[32 * j] + row[32 * j + 16];
        shared = round_bf16(shared * layer.unit[SHARED_DOWN_UNIT]);
        const bf16 out = to_bf16(round_bf16(routed) + shared);
        if (has_next) {
          s = round_bf16(s) + to_float(out);
          if (lane < 16)
            publish4(slot_of(index + 1).before_attention + b * 16 + lane, __float_as_uint(s));
        } else if (lane < 16) {
          residual_out[b * 16 + lane] = to_bf16(s);
          delta_out[b * 16 + lane] = out;
        }
        mark(index, 14);
      }
      request_at(AFTER_DOWN, index + 1);
    }
    if (warp == 1 && has_next)
      pages_of(index + 1).prefetch(0, attention::EARLY_STAGES, ring, sm.bar_pages, lane);
  }
  if (tid == 0) slots_used[b] = (sm.first_slot + LAYERS) % NUM_SLOTS;
}
