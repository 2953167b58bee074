// concat: a thread copies UNIT bytes. A row of the result has TOTAL units, those of part i from
// STARTS[i] on: unit c of row r is unit r * STEPS[i] + c % PERIODS[i] of the part, so rows that a
// part repeats are stored once. Along dimension 0 all is one row.
#include "device.cuh"

#if UNIT == 16
typedef uint4 Unit;
INK_DEVICE Unit load_unit(const void* p) { return load_act16(p); }
#elif UNIT == 8
typedef uint2 Unit;
INK_DEVICE Unit load_unit(const void* p) { return load_act8(p); }
#else
typedef u32 Unit;
INK_DEVICE Unit load_unit(const void* p) { return load_act4(p); }
#endif

__constant__ int BEGIN_OF[] = {STARTS};
__constant__ int STEP_OF[] = {STEPS};
__constant__ int PERIOD_OF[] = {PERIODS};

extern "C" __global__ void __launch_bounds__(128)
    concat(const void* p0, const void* p1, const void* p2, const void* p3, const void* p4,
           const void* p5, const void* p6, const void* p7, Unit* out) {
  pdl_trigger();
  pdl_wait();
  const int i = blockIdx.x * 128 + threadIdx.x, row = i / TOTAL, column = i % TOTAL;
  if (row >= ROWS) return;
  const void* const parts[] = {p0, p1, p2, p3, p4, p5, p6, p7};
  const void* part = p0;
  int number = 0;
#pragma unroll
  for (int p = 1; p < PARTS; p++)
    if (column >= BEGIN_OF[p]) part = parts[p], number = p;
  const int in_part = (column - BEGIN_OF[number]) % PERIOD_OF[number];
  out[i] = load_unit((const Unit*)part + (size_t)row * STEP_OF[number] + in_part);
}
