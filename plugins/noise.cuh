// Counter-based random numbers on a GPU: the mirror of noise.py, word for word and, but for the
// last bit of a float64 logarithm, number for number.
#ifndef INK_NOISE_CUH
#define INK_NOISE_CUH
#include "device.cuh"

enum Purpose : u32 { PURPOSE_SAMPLE = 0 };

// Philox4x32-10.
INK_DEVICE uint4 philox4x32(uint4 c, u32 key0, u32 key1) {
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u64 a = (u64)c.x * 0xD2511F53u, b = (u64)c.z * 0xCD9E8D57u;
    c = make_uint4((u32)(b >> 32) ^ c.y ^ key0, (u32)b, (u32)(a >> 32) ^ c.w ^ key1, (u32)a);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}
// The words of token ids 4 quad .. 4 quad + 3.
INK_DEVICE uint4 token_bits(u64 seed, u32 position, Purpose purpose, u32 quad) {
  return philox4x32(make_uint4(quad, position, purpose, 0), (u32)seed, (u32)(seed >> 32));
}
// -log(-log u) of u = (bits + 1/2) / 2^32, rounded once: from -3.13 to 22.87.
INK_DEVICE float gumbel(u32 bits) {
  const double u = ((double)bits + 0.5) * (1.0 / 4294967296.0);
  return (float)-log(-log(u));
}

#endif  // INK_NOISE_CUH
