"""Settings of all tests."""

import os

# The tensors are tiny and pytest runs a worker per core: more threads only fight for the cores.
# Set before torch is imported; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# One code path of MKL. Else the sums of a product depend on the kind of processor and on where its
# operands lie in memory, and two equal models differ in their last bits (seen on AMD processors).
os.environ.setdefault("MKL_CBWR", "AVX2")
