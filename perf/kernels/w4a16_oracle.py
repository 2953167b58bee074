"""Float64 oracle of the w4a16 kernels, in numpy, on the kernels' own inputs.

It rounds to bf16 exactly where the model's specification rounds and nowhere else. Weights are given
in the checkpoint's form (codes and e4m3 scales, or bf16): packing is checked with the kernels.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inkrt.plugins.w4a16.packing import pack_bf16, pack_nvfp4

Floats = NDArray[np.float64]
Bits = NDArray[np.uint16]

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def from_bits(bits: Bits) -> Floats:
    """bf16 bits to float64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_bits(values: Floats) -> Bits:
    """Float64 to bf16 bits, to nearest even by way of float32."""
    word = values.astype(np.float32).view(np.uint32)
    return ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)


def rounded(values: Floats) -> Floats:
    """To bf16 and back."""
    return from_bits(to_bits(values))


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights of shape [..., N, K] of a checkpoint.

    Attributes:
        codes: uint8 [..., N, K / 2], or bf16 [..., N, K] without scales.
        scales: uint8 e4m3 [..., N, K / 16], or None.
        unit: the tensor's float32 scale, one for each leading index.
        order: of rows in the packed form.
    """

    codes: Tensor
    scales: Tensor | None
    unit: NDArray[np.float32]
    order: str

    def packed(self) -> NDArray[np.uint8]:
        """The kernel's form."""
        if self.scales is None:
            return pack_bf16(self.codes, self.order).numpy()
        return pack_nvfp4(self.codes, self.scales, self.order).numpy()

    def values(self, index: int | None = None) -> Floats:
        """Without the tensor's scale: [N, K] of one leading index, or of the only matrix."""
        codes = self.codes if index is None else self.codes[index]
        if self.scales is None:
            return codes.float().numpy().astype(np.float64)
        scales = self.scales if index is None else self.scales[index]
        bytes_ = codes.numpy()
        nibbles = np.stack([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(len(bytes_), -1)
        return _E2M1[nibbles] * np.repeat(e4m3(scales.numpy()), 16, axis=-1)


def e4m3(byte: NDArray[np.uint8]) -> Floats:
    """Values of e4m3 bytes without sign."""
    exponent, mantissa = (byte >> 3).astype(np.int64), (byte & 7).astype(np.float64)
    return np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0), mantissa / 512)


def random_matrix(
    generator: torch.Generator, *shape: int, order: str = "plain", bf16: bool = False
) -> Matrix:
    """Weights whose products with unit-variance rows have about unit variance."""
    *lead, rows, width = shape
    count = int(np.prod(lead))
    unit = np.float32(width**-0.5) * (1 + 0.001 * np.arange(count, dtype=np.float32))
    if bf16:
        weight = width**-0.5 * torch.randn(*shape, generator=generator)
        return Matrix(weight.bfloat16(), None, np.ones_like(unit), order)
    codes = torch.randint(0, 256, (*lead, rows, width // 2), dtype=torch.uint8, generator=generator)
    blocks = (*lead, rows, width // 16)
    scales = torch.randint(0x30, 0x40, blocks, dtype=torch.uint8, generator=generator)
    rare = torch.randint(0, 0x48, blocks, dtype=torch.uint8, generator=generator)
    scales = torch.where(torch.rand(blocks, generator=generator) < 0.1, rare, scales)
    return Matrix(codes, scales, (unit / 3.2).astype(np.float32), order)


def add_norm(x: Bits, delta: Bits | None, weight: Bits, eps: float) -> tuple[Bits, Floats]:
    """The residual bf16(s), exact, and z = bf16(s rsqrt(mean s^2 + eps) w), as values."""
    s = from_bits(x) + (0 if delta is None else from_bits(delta))
    s = s.astype(np.float32).astype(np.float64)  # the sum is float32
    inverse = 1 / np.sqrt((s * s).mean(axis=-1, keepdims=True) + eps)
    return to_bits(s), rounded(s * inverse * from_bits(weight))


def product(x: Floats, weights: Matrix, index: int | None = None) -> Floats:
    """X W^T times the tensor's scale, not rounded."""
    result: Floats = x @ weights.values(index).T * np.float64(weights.unit[index or 0])
    return result


def silu(x: Floats) -> Floats:
    """X / (1 + exp(-x))."""
    result: Floats = x / (1 + np.exp(-x))
    return result


def gated(y: Floats) -> Floats:
    """bf16(silu(g) u) of rows [gate | up]."""
    gate, up = np.split(y, 2, axis=-1)
    return rounded(silu(gate) * up)


def rotary(heads: Floats, positions: NDArray[np.int64], theta: float) -> Floats:
    """NeoX rotation of bf16 heads [T, heads, 128] with a float32 table; to bf16."""
    exponents = torch.arange(0, 128, 2, dtype=torch.float32) / 128
    inverse = (1.0 / torch.pow(torch.tensor(theta, dtype=torch.float32), exponents)).numpy()
    angles = (positions.astype(np.float32)[:, None] * inverse).astype(np.float64)[:, None]
    cosine = np.cos(angles).astype(np.float32).astype(np.float64)
    sine = np.sin(angles).astype(np.float32).astype(np.float64)
    low, high = heads[..., :64], heads[..., 64:]
    return rounded(np.concatenate([low * cosine - high * sine, high * cosine + low * sine], -1))


def head_norm(heads: Floats, weight: Bits, eps: float) -> Floats:
    """Norm over the last axis; to bf16."""
    inverse = 1 / np.sqrt((heads * heads).mean(axis=-1, keepdims=True) + eps)
    return rounded(heads * inverse * from_bits(weight))


def route(logits: Bits, top_k: int) -> tuple[NDArray[np.int64], Floats]:
    """Experts [T, top_k] by falling bf16 logit, ties to the lowest index, and their weights."""
    values = from_bits(logits)
    experts = np.argsort(-values, axis=-1, kind="stable")[:, :top_k]
    scores = 1 / (1 + np.exp(-np.take_along_axis(values, experts, -1)))
    return experts, rounded(scores / (scores.sum(-1, keepdims=True) + 1e-20))
