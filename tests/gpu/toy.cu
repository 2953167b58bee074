// A model of a few kernels whose next token is a function of the last four tokens in its state, read
// through slot, ring and page table. `remember` writes state, `answer` reads it.
constexpr int RING = 16, PAGE = 64;

extern "C" __global__ void remember(const int* tokens, const int* position, const int* num_tokens,
                                    const int* slot, const int* page_table, int* ring, int* pages,
                                    int* counts) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int row = threadIdx.x;
  if (row < num_tokens[0]) {
    const int p = position[0] + row;
    ring[slot[0] * RING + p % RING] = tokens[row];
    pages[page_table[p / PAGE] * PAGE + p % PAGE] = tokens[row];
  }
  if (row == 0) counts[0] = num_tokens[0];
}

extern "C" __global__ void answer(const int* position, const int* slot, const int* page_table,
                                  const int* ring, const int* pages, const int* counts, int vocab,
                                  int* error, int* drawn, float* logits) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int row = threadIdx.x;
  const int p = position[0] + row;
  int sum = p;
  for (int back = 0; back < 4 && back <= p; back++) {
    const int q = p - back;
    const int a = ring[slot[0] * RING + q % RING];
    const int b = pages[page_table[q / PAGE] * PAGE + q % PAGE];
    if (row < counts[0] && a != b) atomicExch(error, 0x51 + back);
    sum += (back + 3) * a;
  }
  const int next = sum % vocab;
  drawn[row] = next;
  for (int v = 0; v < vocab; v++) logits[row * vocab + v] = v == next ? 1.f : 0.f;
}

// Of several ranks: `part` and `draw`, with a sum over ranks in between, are `answer`.
extern "C" __global__ void part(const int* position, const int* slot, const int* page_table,
                                const int* ring, const int* pages, const int* counts,
                                const int* rank, int num_ranks, int* error, float* parts) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int row = threadIdx.x;
  const int p = position[0] + row;
  int sum = rank[0] ? 0 : p;
  for (int back = rank[0]; back < 4 && back <= p; back += num_ranks) {
    const int q = p - back;
    const int a = ring[slot[0] * RING + q % RING];
    const int b = pages[page_table[q / PAGE] * PAGE + q % PAGE];
    if (row < counts[0] && a != b) atomicExch(error, 0x51 + back);
    sum += (back + 3) * a;
  }
  for (int c = 0; c < 4; c++) parts[row * 4 + c] = row < counts[0] ? sum : 0;
}

extern "C" __global__ void draw(const float* sums, int vocab, int* drawn, float* logits) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int row = threadIdx.x;
  const int next = (int)sums[row * 4] % vocab;
  drawn[row] = next;
  for (int v = 0; v < vocab; v++) logits[row * vocab + v] = v == next ? 1.f : 0.f;
}
