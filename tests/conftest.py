"""Settings of all tests."""

import os

# The tensors are tiny and pytest runs a worker per core: more threads only fight for the cores.
# Set before torch is imported; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
