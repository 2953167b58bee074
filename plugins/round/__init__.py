"""Kernels of a round of speculative decoding that belong to the executor, not to an operator."""
