// For checks: what noise.cuh computes. words[N] of token ids 0 .. N - 1, and the noise of each of
// given[N]. One block.
#include "noise.cuh"

extern "C" __global__ void noise_probe(const u64* seed, const int* position, const u32* given,
                                       u32* words, float* noise, int count) {
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const uint4 quad = token_bits(*seed, (u32)*position, PURPOSE_SAMPLE, i / 4);
    words[i] = i % 4 == 0 ? quad.x : i % 4 == 1 ? quad.y : i % 4 == 2 ? quad.z : quad.w;
    noise[i] = gumbel(given[i]);
  }
}
