// allreduce_conv_mix of several ranks: [token][slice] are the blocks, each sends its slice of its
// token's part to all ranks, and waits for the slices of the up to ROWS tokens that it convolves.
// Rows from num_tokens on are left as they are.
#include "all_reduce/lamport.cuh"
#include "allreduce_conv_mix/conv_mix.cuh"

// Rows that a thread asks for at once; of many ranks more would not fit its registers.
constexpr int AT_ONCE = ROWS <= 2 || RANKS <= 4 ? ROWS : 2;

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
    const uint4 part = load_act16((const u8*)parts + at);
    exchange.ready();
    exchange.send16(at, part);
  }
  INK_DEVICE void receive(int column) {
#pragma unroll
    for (int first = 0; first < ROWS; first += AT_ONCE) {
      u64 offsets[AT_ONCE];
      bool is_wanted[AT_ONCE];
      uint4 own[AT_ONCE], of_ranks[AT_ONCE][RANKS];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        is_wanted[i] = first + i < ROWS && row_of(first + i) >= 0;
        offsets[i] = is_wanted[i] ? offset(row_of(first + i), column) : 0;
        own[i] = load_act16((const u8*)parts + offsets[i]);
      }
      exchange.receive16<AT_ONCE>(offsets, is_wanted, own, of_ranks);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const float4 sum = sum_of_ranks(of_ranks[i]);
        if (first + i < ROWS) sums[first + i] = round_four(Four{{sum.x, sum.y, sum.z, sum.w}});
      }
    }
  }
};

struct RankedConvMix : ConvMix<SumOfRanks> {
  static_assert(RING_IS_WIDE, "rows are stored while others convolve");
  u32 active;  // blocks that have a token

  INK_DEVICE void load(int column, Four (&s)[MIX_SOURCES], Four (&q)[QUERIES]) {
    using namespace short_conv;
    source.send(column);
    // While it is on its way:
    Four old = zero_four();
    if (RESIDUAL) old = load_act_four<RESIDUAL == 2>(residual, at(column));
#pragma unroll
    for (int j = 0; j < FORMER; j++) s[j] = load_act_four<false>(former[j], at(column));
    source.exchange.clear((token * WIDTH + column) / 4, step.num_tokens * (WIDTH / 4));
    source.receive(column);
    Four x[TAPS];
#pragma unroll
    for (int i = 0; i < TAPS; i++) {
      const int back = PAST - i, own = ROWS - 1 - back;
      x[i] = four_of(past[i < PAST ? i : 0]);
      if (own >= 0 && token >= back) x[i] = source.sums[own >= 0 ? own : 0];
    }
    const Four update = round_four(convolve<true>(x, taps));
    Four sum = update;
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (RESIDUAL) sum.v[i] = __fadd_rn(old.v[i], update.v[i]);
    s[FORMER] = store_four<KEEPS_FLOAT32>(residual_out, at(column), sum);
    store_four<false>(ring, ring_at<RING, WIDTH>(step, step.position + token, column), x[PAST]);
#pragma unroll
    for (int i = 0; i < QUERIES; i++) q[i] = query[i];
  }
  // Behind barriers.
  INK_DEVICE void finish(int column, const Four (&s)[MIX_SOURCES],
                         const float (&c)[QUERIES][MIX_SOURCES], const float (&inverse)[QUERIES]) {
    ConvMix<SumOfRanks>::finish(column, s, c, inverse);
    const int first = column - 4 * (int)threadIdx.x;  // of the slice
    source.exchange.end((u32)SumOfRanks::offset(step.num_tokens, 0), active,
                        min(MIX_THREADS, (WIDTH - first) / 4));
  }
};

struct Shared {
  ResidualMix::Memory mix;
};

extern "C" __global__ void __launch_bounds__(MIX_THREADS)
    conv_mix_ranks(const float* partial, const float* conv_weight, bf16* conv_state,
                   const int* position, const int* num_tokens, const int* slot,
                   const void* residual, const bf16* s0, const bf16* s1, const bf16* s2,
                   const bf16* s3, const bf16* s4, const bf16* s5, const bf16* s6, const bf16* s7,
                   const bf16* s8, const float* queries, const bf16* w0, const bf16* w1,
                   const bf16* w2, void* residual_out, bf16* out, int num_rows, float mix_eps,
                   float norm_eps, u64* words, int* error, const Peers* peers) {
  ResidualMix::Memory& memory = ((Shared*)dynamic_smem())->mix;
  pdl_trigger();
  const int token = blockIdx.x / ResidualMix::SLICES;
  RankedConvMix row{{SumOfRanks{partial, Exchange(peers, error), token}}};
  row.token = token;
  row.step = short_conv::load_step(position, num_tokens, slot);
  row.active = row.step.num_tokens * ResidualMix::SLICES;
  row.conv_weight = conv_weight, row.ring = conv_state, row.residual = residual;
  const bf16* const former[] = {s0, s1, s2, s3, s4, s5, s6, s7, s8};
  const bf16* const norms[] = {w0, w1, w2};
#pragma unroll
  for (int j = 0; j < FORMER; j++) row.former[j] = former[j];
#pragma unroll
  for (int i = 0; i < QUERIES; i++) row.norm_weights[i] = norms[i];
  row.queries = queries, row.residual_out = residual_out, row.out = out, row.num_rows = num_rows;
  const ResidualMix::Eps eps = {mix_eps, norm_eps};
  ResidualMix::split(memory, row, token, blockIdx.x % ResidualMix::SLICES, eps, words, error);
}
