"""Makers of test inputs, shared by the `cases()` of the plugins.

Everything is drawn from the generator a case is given, so a case has the same values everywhere.
"""

import torch
from torch import Tensor

from inkrt.plugins.registry import Arguments


def normal(
    generator: torch.Generator, dtype: torch.dtype, *shape: int, scale: float = 1.0
) -> Tensor:
    """Normal values of standard deviation `scale`, drawn in float32 and rounded to `dtype`."""
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def integers(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    """Uniform int32 values in [0, high)."""
    return torch.randint(high, shape, generator=generator, dtype=torch.int32)


def int32(*values: int) -> Tensor:
    """The int32 tensor [len(values)] of the given numbers."""
    return torch.tensor(values, dtype=torch.int32)


def step_arguments(position: int, num_tokens: int, slot: int = 0) -> Arguments:
    """`position`, `num_tokens` and `slot` as a step passes them: int32 [1] each."""
    return {
        "position": int32(position),
        "num_tokens": int32(num_tokens),
        "slot": int32(slot),
    }


def shuffled_pages(generator: torch.Generator, num_pages: int, max_pages: int) -> Tensor:
    """A page table, int32 [max_pages]: distinct pages out of `num_pages` in random order."""
    return torch.randperm(num_pages, generator=generator)[:max_pages].to(torch.int32)
