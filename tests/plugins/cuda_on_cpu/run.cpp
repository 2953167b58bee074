// The compiled form of one kernel for cuda_on_cpu.py: SOURCE is the CUDA file, KERNEL its entry.
#ifdef HAS_SM90
#include "sm90_on_cpu.h"
#endif
#include SOURCE

extern "C" void emu_publish(void* to, const void* from, size_t bytes) {
  emu::publish.push_back({to, from, bytes});
}
extern "C" void emu_watch(const void* at, size_t bytes) {
  emu::watched.emplace_back(at, bytes);
}
extern "C" size_t emu_shared_bytes() {
#ifdef HAS_SHARED
  return sizeof(Shared);
#else
  return 0;
#endif
}
extern "C" void emu_run(unsigned x, unsigned y, unsigned z, unsigned threads, unsigned cluster,
                        size_t smem, int order, int together, void** args) {
  emu::body = [args] { emu::call(KERNEL, args); };
  emu::launch({x, y, z}, threads, cluster, smem, order, together);
}
