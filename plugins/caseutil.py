"""Makers of test inputs, shared by the `cases()` of the plugins.

Everything is drawn from the generator a case is given, so a case has the same values everywhere.
"""

import math

import torch
from torch import Tensor

from inkrt.plugins import mxfp8
from inkrt.plugins.nvfp4 import BLOCK, MAX_SCALE
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


def weight_arguments(
    name: str,
    generator: torch.Generator,
    dtype: torch.dtype,
    *shape: int,
    scale: float,
    quantized: bool = False,
) -> Arguments:
    """A weight as operators take it (see `plugins.nvfp4`), of standard deviation `scale`.

    Args:
        name: of the weight's parameter; "weight" gives the others no prefix.
        generator: of the values.
        dtype: of the weight that is not quantized.
        *shape: [N, K] or [L, N, K].
        scale: wanted standard deviation.
        quantized: as NVFP4; then one block has the largest scale, one the smallest and one zero.
    """
    prefix = "" if name == "weight" else f"{name}_"
    if not quantized:
        weight = normal(generator, dtype, *shape, scale=scale)
        return {name: weight, f"{prefix}scales": None, f"{prefix}global_scale": None}
    *rows, width = shape
    codes = torch.randint(256, (*rows, width // 2), generator=generator, dtype=torch.uint8)
    # Block scales of 0.5 to 1.875; with uniform codes that makes a standard deviation of 3.6.
    scales = torch.randint(0x30, 0x40, (*rows, width // BLOCK), generator=generator)
    scales.view(-1)[:3] = torch.tensor([MAX_SCALE, 1, 0])[: scales.numel()]
    stack = rows[0] if len(rows) == 2 else 1
    return {
        name: codes,
        f"{prefix}scales": scales.to(torch.uint8),
        f"{prefix}global_scale": (0.75 + torch.rand(stack, generator=generator)) * (scale / 4.5),
    }


def mxfp8_arguments(
    name: str,
    generator: torch.Generator,
    dtype: torch.dtype,  # noqa: ARG001 (as of `weight_arguments`)
    *shape: int,
    scale: float,
) -> Arguments:
    """An MXFP8 weight as operators take it (see `plugins.mxfp8`), of standard deviation `scale`.

    All codes but those of no number are equally likely; one block is zero, under the smallest
    exponent, and exponents differ by up to 3.
    """
    *rows, width = shape
    codes = torch.randint(mxfp8.NO_NUMBER, shape, generator=generator)
    codes += 0x80 * torch.randint(2, shape, generator=generator)
    codes = codes.to(torch.uint8)
    exponent = mxfp8.BIAS + round(math.log2(scale / mxfp8.CODE_RMS))
    exponents = exponent + torch.randint(-2, 2, (*rows, width // mxfp8.BLOCK), generator=generator)
    codes.view(-1)[: mxfp8.BLOCK] = 0
    exponents.view(-1)[0] = 0
    return {name: codes, f"{name}_scales": exponents.to(torch.uint8), f"{name}_global_scale": None}
