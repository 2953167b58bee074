// What the kernels beside attention.cu share of Inkling-2's attention: inputs of a row, and its end.
#pragma once
#include "device.cuh"

// Element i of activations in bf16; its aligned pair is read.
INK_DEVICE float load_act_bf16(const bf16* p, size_t i) {
  const u32 pair = load_act4((const u32*)p + i / 2);
  return i % 2 ? high_float(pair) : low_float(pair);
}
// x sigmoid(gate)
INK_DEVICE float apply_gate(float x, float gate) {
  return x / (1.f + exp2_approx(-gate * 1.4426950408889634f));
}
