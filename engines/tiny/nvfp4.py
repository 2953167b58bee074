"""Rounding matrices to NVFP4, and the super-blocks in which a GGUF file holds them.

The formats are those of `inkrt.plugins.nvfp4` and of flint.md section 9; this is the way there.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from inkrt.errors import ConfigError
from inkrt.plugins.nvfp4 import BLOCK, E2M1, E4M3_MAX, decode_scales

# Halfway between neighbors of E2M1.
_BORDERS = tuple((low + high) / 2 for low, high in pairwise(E2M1))


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [N, K] or a stack of them [L, N, K].

    Attributes:
        codes: uint8 [..., N, K], one code per element.
        scales: uint8 [..., N, K / 16], E4M3.
        global_scale: float32 [1] or [L].
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor

    def values(self) -> Tensor:
        """What it stands for, float64; exact in bfloat16 if the global scale is a power of two."""
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
        blocks = table[self.codes.int()].view(*self.scales.shape, BLOCK)
        scaled = (blocks * decode_scales(self.scales).double()[..., None]).flatten(-2)
        shape = (-1, 1, 1) if scaled.dim() == 3 else (1, 1)
        return scaled * self.global_scale.double().view(shape)

    def super_blocks(self) -> Tensor:
        """The bytes of a GGUF file, uint8 [..., N, 36 * K / 64]."""
        fours = self.scales.view(*self.scales.shape[:-1], -1, 4)
        blocks = self.codes.view(*fours.shape, BLOCK)
        packed = blocks[..., : BLOCK // 2] | blocks[..., BLOCK // 2 :] << 4
        return torch.cat([fours, packed.flatten(-2)], dim=-1).flatten(-2)


def quantize(matrix: Tensor, global_scale: float) -> QuantizedMatrix:
    """Round a float64 matrix [N, K] to the nearest values; the largest of a block becomes 6."""
    blocks = matrix.view(len(matrix), -1, BLOCK)
    largest = blocks.abs().amax(-1)
    scales = (largest / 6 / global_scale).float().to(torch.float8_e4m3fn).view(torch.uint8)
    steps = decode_scales(scales).double()[..., None] * global_scale
    ratio = torch.where(steps > 0, blocks.abs() / steps, 0.0)
    size = torch.bucketize(ratio, torch.tensor(_BORDERS, dtype=torch.float64)).to(torch.uint8)
    codes = (size | (blocks < 0).to(torch.uint8) << 3).view(matrix.shape)
    return QuantizedMatrix(codes, scales, torch.tensor([global_scale], dtype=torch.float32))


def stack(matrices: list[QuantizedMatrix]) -> QuantizedMatrix:
    """A stack [L, N, K] of matrices of one shape."""
    return QuantizedMatrix(
        torch.stack([matrix.codes for matrix in matrices]),
        torch.stack([matrix.scales for matrix in matrices]),
        torch.cat([matrix.global_scale for matrix in matrices]),
    )


def quantize_stack(matrices: Tensor) -> QuantizedMatrix:
    """Round float64 matrices [L, N, K], each with the least power of two that leaves no size out.

    So all values are exact in bfloat16, and multiplying sums by the global scale is exact too.
    """
    largest = matrices.abs().amax(dim=(1, 2)) / (E2M1[-1] * E4M3_MAX)
    scales = torch.exp2(largest.log2().ceil()).tolist()
    return stack([quantize(matrix, scale) for matrix, scale in zip(matrices, scales, strict=True)])


def packed(codes: Tensor) -> Tensor:
    """Two codes to a byte, [..., K / 2], the first in the low bits."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def exact(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Float32 values in another dtype.

    Raises:
        ConfigError: one of them is not in it.
    """
    rounded = values.to(dtype)
    if not torch.equal(rounded.float(), values):
        raise ConfigError(f"tiny checkpoint: {name} has values that {dtype} cannot hold")
    return rounded


def power_of_two(std: float) -> float:
    """A global scale for values of this standard deviation: block scales are then about 4."""
    return 2.0 ** math.floor(math.log2(std * 0.075))
