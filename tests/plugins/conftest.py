"""Settings of the plugin tests."""

import torch

# The tensors are tiny and pytest runs a worker per core: more threads only fight for the cores.
torch.set_num_threads(1)
