// allreduce_conv_mix of several ranks: blocks are [token][block of its row], see SPLIT. Each sends
// its columns of its token's part to all ranks, and waits for those of the up to ROWS tokens that it
// convolves. Meanwhile it adds up what needs none of them. Rows from num_tokens on are left as they
// are.
//
// SENT: the launch before has sent the parts, this rank's to itself, too (push.cuh). Nothing but
// their words is waited for until results are stored, and `partial` is not read.
#include "all_reduce/lamport.cuh"
#include "allreduce_conv_mix/conv_mix.cuh"

#ifndef SENT
#define SENT 0
#endif

// Of rows that other blocks wait for, too, those that a thread asks for at once: more would not fit
// its registers.
constexpr int AT_ONCE = RANKS <= 2 ? 3 : 3 - (RANKS > 4) - (SPLIT == 2);

// The sums of the rows that a thread convolves, in the model's dtype.
struct SumOfRanks {
  const float* parts;  // [T][WIDTH] of this rank
  Exchange exchange;
  int token;
  Four sums[ROWS];  // of tokens token - ROWS + 1 to token

  static INK_DEVICE u64 offset(int row, int column) { return ((u64)row * WIDTH + column) * 4; }
  INK_DEVICE int row_of(int i) const { return token - ROWS + 1 + i; }

  INK_DEVICE void send(int column) {
    exchange.begin();
    const u64 at = offset(token, column);
    if constexpr (SENT) {
      exchange.ready();
      return;
    }
    const uint4 part = load_act16((const u8*)parts + at);
    exchange.ready();
    exchange.send16(at, part);
  }
  // The newest row by itself: as long as it is on its way, nothing else is asked for again and
  // again. The others are there by then, or soon.
  INK_DEVICE void receive(int column) {
    // Many rows are not polled while there is nothing to come.
    if (SENT && ROWS > 1) exchange.await_own(offset(token, column));
    receive_rows<ROWS - 1, 1>(column);
    receive_older<0>(column);
  }

 private:
  template <int FIRST>
  INK_DEVICE void receive_older(int column) {
    if constexpr (FIRST < ROWS - 1) {
      constexpr int N = ROWS - 1 - FIRST < AT_ONCE ? ROWS - 1 - FIRST : AT_ONCE;
      receive_rows<FIRST, N>(column);
      receive_older<FIRST + N>(column);
    }
  }
  template <int FIRST, int N>
  INK_DEVICE void receive_rows(int column) {
    u64 offsets[N];
    bool is_wanted[N];
    uint4 own[N], of_ranks[N][RANKS];
#pragma unroll
    for (int i = 0; i < N; i++) {
      is_wanted[i] = row_of(FIRST + i) >= 0;
      offsets[i] = is_wanted[i] ? offset(row_of(FIRST + i), column) : 0;
      own[i] = make_uint4(0, 0, 0, 0);
      if (!SENT) own[i] = load_act16((const u8*)parts + offsets[i]);
    }
    exchange.receive16<N, SENT>(offsets, is_wanted, own, of_ranks);
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float4 sum = sum_of_ranks(of_ranks[i]);
      sums[FIRST + i] = round_four(Four{{sum.x, sum.y, sum.z, sum.w}});
    }
  }
};

struct RankedConvMix : ConvMix<SumOfRanks> {
  static_assert(RING_IS_WIDE, "rows are stored while others convolve");
  static constexpr bool WAITS_LATE = SENT;

  INK_DEVICE void first(int column, Four (&s)[MIX_SOURCES], Four (&q)[QUERIES]) {
    source.send(column);
    load_others(column, s, q);
    source.exchange.clear((token * WIDTH + column) / 4, step.num_tokens * (WIDTH / 4));
  }
  INK_DEVICE void last(int column, Four (&s)[MIX_SOURCES]) {
    using namespace short_conv;
    source.receive(column);
#pragma unroll
    for (int i = 0; i < TAPS; i++) {
      const int back = PAST - i, own = ROWS - 1 - back;
      x[i] = four_of(past[i < PAST ? i : 0]);
      if (own >= 0 && token >= back) x[i] = source.sums[own >= 0 ? own : 0];
    }
    if constexpr (!SENT) {
      ConvMix<SumOfRanks>::last(column, s);
    } else {  // nobody else touches the ring
      s[FORMER] = sum_with_residual();
      if (!KEEPS_FLOAT32) s[FORMER] = round_four(s[FORMER]);
      store_in_ring(column);
    }
  }
  // Like all results of a launch, behind the wait.
  INK_DEVICE void late(int column, const Four (&s)[MIX_SOURCES]) {
    store_four<KEEPS_FLOAT32>(residual_out, at(column), s[FORMER]);
  }
};

extern "C" __global__ void MIX_BOUNDS
    conv_mix_ranks(const float* partial, const float* conv_weight, bf16* conv_state,
                   const int* position, const int* num_tokens, const int* slot,
                   const void* residual, const bf16* s0, const bf16* s1, const bf16* s2,
                   const bf16* s3, const bf16* s4, const bf16* s5, const bf16* s6, const bf16* s7,
                   const bf16* s8, const float* queries, const bf16* w0, const bf16* w1,
                   const bf16* w2, void* residual_out, void* out, int num_rows, float mix_eps,
                   float norm_eps,
#if SPLIT == 1
                   u64* words,
#endif
                   int* error, const Peers* peers
    ) {
  auto& memory = ((Shared*)dynamic_smem())->mix;
  if (TRIGGER == 0) pdl_trigger();
  const int token = blockIdx.x / ROW_BLOCKS, block = blockIdx.x % ROW_BLOCKS;
  RankedConvMix row{{SumOfRanks{partial, Exchange(peers, error), token}}};
  row.bind(token, short_conv::load_step(position, num_tokens, slot), conv_weight, conv_state,
           residual, {s0, s1, s2, s3, s4, s5, s6, s7, s8}, queries, {w0, w1, w2}, residual_out, out,
           num_rows);
  const ResidualMix::Eps eps = {mix_eps, norm_eps};
#if SPLIT == 2
  ResidualMix::cluster(memory, row, block, eps);
#else
  ResidualMix::split(memory, row, token, block, eps, words, error);
#endif
  // Behind barriers, by the threads that have columns.
  const int threads = min(BLOCK_THREADS, WIDTH / 4 - block * BLOCK_THREADS);
  if (row.has_token() && (int)threadIdx.x < threads)
    row.source.exchange.end(
        (u32)SumOfRanks::offset(row.step.num_tokens, 0) + (SENT ? FILLED_OWN : 0),
        row.step.num_tokens * ROW_BLOCKS, threads);
}
