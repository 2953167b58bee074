// Closes a decode step on the device: the token just drawn becomes the next step's input.
// The host reads it from pinned memory some steps behind; the position beside it says which step it
// is. After a kernel that gave up there is no token: all bits are set.
extern "C" __global__ void advance(const int* drawn, int* tokens, int* position,
                                   unsigned long long* ring, const int* error, int ring_size) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int token = drawn[0];
  const int next = position[0] + 1;
  tokens[0] = token;
  position[0] = next;
  const unsigned shown = *error ? 0xffffffffu : static_cast<unsigned>(token);
  const unsigned long long word =
      (static_cast<unsigned long long>(static_cast<unsigned>(next)) << 32) | shown;
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(ring + next % ring_size), "l"(word)
               : "memory");
}
