// The compiled form of one kernel for cuda_on_cpu.py: SOURCE is the CUDA file, KERNEL its entry.
#include SOURCE

extern "C" void emu_publish(void* to, const void* from, size_t bytes) {
  emu::publish.push_back({to, from, bytes});
}
extern "C" size_t emu_shared_bytes() {
#ifdef HAS_SHARED
  return sizeof(Shared);
#else
  return 0;
#endif
}
extern "C" void emu_run(unsigned blocks, unsigned threads, unsigned cluster, size_t smem, int order,
                        int together, void** args) {
  emu::body = [args] { emu::call(KERNEL, args); };
  emu::launch(blocks, threads, cluster, smem, order, together);
}
