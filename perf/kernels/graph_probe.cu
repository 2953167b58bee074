// Small kernels for graphs with conditional nodes: see graph_probe.py. One thread does the work.
#include "round/graph.cuh"

INK_DEVICE u64 now() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
INK_DEVICE void spin(u64 nanoseconds) {
  for (const u64 end = now() + nanoseconds; now() < end;) {
  }
}

// A step that takes a while; the next kernel may start at once. at[0]: when it has ended.
extern "C" __global__ void slow(u64* at, u64 nanoseconds) {
  pdl_trigger();
  pdl_wait();
  spin(nanoseconds);
  if (blockIdx.x + threadIdx.x == 0) at[0] = now();
}
// at[1]: when it started; at[2]: when it might read; at[3]: the at[0] that it saw; at[4]: runs.
extern "C" __global__ void follow(u64* at) {
  const u64 started = now();
  pdl_trigger();
  pdl_wait();
  if (blockIdx.x + threadIdx.x) return;
  at[1] = started;
  at[2] = now();
  at[3] = load_relaxed(at);
  store_relaxed(at + 4, load_relaxed(at + 4) + 1);
}
// Stands for a step of an engine.
extern "C" __global__ void step() {
  pdl_trigger();
  pdl_wait();
}
// Sets a condition to what memory holds, unless that is negative.
extern "C" __global__ void choose(u64 handle, const int* value) {
  pdl_trigger();
  pdl_wait();
  const int chosen = load_act_int(value);
  if (threadIdx.x == 0 && chosen >= 0) set_conditional(handle, chosen);
}
// A record in pinned host memory: 31 words by other lanes, then their mark.
extern "C" __global__ void publish(u64* record, u64 mark) {
  pdl_trigger();
  pdl_wait();
  if (threadIdx.x < 31) record[threadIdx.x] = mark;
  __syncwarp();
  if (threadIdx.x == 0) store_release_system(record + 31, mark);
}
