"""Experts' weights in vectors: what the kernel makes of every packed word is the exact value."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracles_flint import e2m1, e4m3
from torch import Tensor

from inkrt.errors import BuildError
from inkrt.plugins.moe.packing import (
    MAX_EXPONENT,
    MIN_EXPONENT,
    num_bytes,
    num_vectors,
    pack_bf16_vectors,
    pack_mxfp8_vectors,
    pack_nvfp4_vectors,
    packing,
)
from inkrt.plugins.tactic import TensorArg

Floats = NDArray[np.float64]
Words = NDArray[np.uint32]


def gated(matrix: Floats) -> Floats:
    """Rows as tiles of eight gate and eight up rows hold them."""
    half = matrix.shape[-2] // 2
    rows = [8 * (i // 16) + i % 8 + half * (i % 16 // 8) for i in range(2 * half)]
    return matrix[..., rows, :]


def bf16(bits: NDArray[np.unsignedinteger]) -> Floats:
    """Numbers of bfloat16 bits, subnormal ones too."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def pairs(words: Words) -> Floats:
    """[...] packed words to [..., 2] numbers, the low one first."""
    return np.stack([bf16(words & 0xFFFF), bf16(words >> 16)], axis=-1)


def product(words: Words, scales: Words) -> Floats:
    """The packed multiply of bf16 pairs, which must be exact."""
    wide = pairs(words) * pairs(scales)
    rounded = torch.from_numpy(wide).bfloat16().double().numpy()
    assert np.array_equal(wide, rounded), "a product is not exact in bfloat16"
    return wide


def matrix_of(fragments: Floats, rows: int) -> Floats:
    """[matrix, tile, vector, g, t, mma, register, pair] as rows, see weights.cuh."""
    matrices, tiles, vectors = fragments.shape[:3]
    # Register: low bit which half of the rows, high bit which pair of k.
    split = fragments.reshape(*fragments.shape[:6], 2, 2, 2)
    ordered = split.transpose(0, 1, 7, 3, 2, 4, 5, 6, 8)
    return ordered.reshape(matrices, tiles * 16, vectors * 64)[:, :rows]


def unpack_nvfp4(packed: Tensor, rows: int, width: int) -> Floats:
    """What the kernel multiplies with, times 2^7: `dequantize` and `scales_of` of w4a16.cuh."""
    vectors = packed.numpy().reshape(-1, rows // 16, num_vectors(width), 576)
    w = np.ascontiguousarray(vectors[..., :512]).view(np.uint32)
    w = w.reshape(*vectors.shape[:3], 8, 4, 4)
    scales = vectors[..., 512:].reshape(*vectors.shape[:3], 8, 4, 2).astype(np.uint32)
    scales = scales * 0x00100010 + 0x70007000
    low, high = scales[..., 0, None], scales[..., 1, None]
    mask = np.uint32(0x81C081C0)
    rotated = (w >> 4) | (w << 28)
    last = (w & 0x81808180) | ((w >> 8) & 0x00400040)
    registers = [
        product((w << 6) & mask, np.broadcast_to(low, w.shape)),
        product((w << 2) & mask, np.broadcast_to(high, w.shape)),
        product(rotated & mask, np.broadcast_to(low, w.shape)),
        product(last, np.broadcast_to(high, w.shape)),
    ]
    return matrix_of(np.stack(registers, axis=-2), rows) * 128


def unpack_mxfp8(packed: Tensor, rows: int, width: int) -> Floats:
    """The same of `multiply_vector` for MXFP8."""
    vectors = packed.numpy().reshape(-1, rows // 16, num_vectors(width), 1056)
    w = np.ascontiguousarray(vectors[..., :1024]).view(np.uint32)
    w = w.reshape(*vectors.shape[:3], 2, 8, 4, 2, 2)  # [mma / 2, g, t, mma % 2, word]
    w = w.transpose(0, 1, 2, 4, 5, 3, 6, 7).reshape(*vectors.shape[:3], 8, 4, 4, 2)
    exponents = vectors[..., 1024:].reshape(*vectors.shape[:3], 8, 2, 2).astype(np.uint32)
    exponents = (exponents * 0x00800080).repeat(2, axis=-2)  # for every t
    low, high = (np.broadcast_to(exponents[..., i, None, None], w.shape) for i in (0, 1))
    even = ((w << 4) & 0x07F007F0) | ((w << 8) & 0x80008000)
    odd = ((w >> 4) & 0x07F007F0) | (w & 0x80008000)
    both = np.stack([product(even, low), product(odd, high)], axis=-2)  # [..., word, row half, k]
    return matrix_of(both.reshape(*both.shape[:6], 4, 2), rows) * 128


def all_nvfp4() -> tuple[Tensor, Tensor]:
    """Two matrices [32, 192] in which every code stands under every scale."""
    generator = torch.Generator().manual_seed(3)
    scales = torch.arange(2 * 32 * 12) % 0x7F
    codes = torch.arange(16).repeat(2 * 32 * 12)
    codes = codes.view(-1, 16)[:, torch.randperm(16, generator=generator)].view(2, 32, 192)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed.to(torch.uint8), scales.view(2, 32, 12).to(torch.uint8)


@pytest.mark.parametrize("order", ["plain", "gated"])
@pytest.mark.parametrize("width", [192, 144, 16])
def test_nvfp4_values_are_exact(width: int, order: str) -> None:
    codes, scales = all_nvfp4()
    codes, scales = codes[..., : width // 2], scales[..., : width // 16]
    packed = pack_nvfp4_vectors(codes, scales, order)
    assert packed.numel() == num_bytes("nvfp4", 2, 32, width)
    values = np.empty((2, 32, width))
    values[..., 0::2], values[..., 1::2] = e2m1(codes.numpy() % 16), e2m1(codes.numpy() // 16)
    values *= e4m3(scales.numpy()).repeat(16, axis=-1)
    got = unpack_nvfp4(packed, 32, width)
    assert np.array_equal(got[..., :width], gated(values) if order == "gated" else values)
    assert not got[..., width:].any()


def all_mxfp8(width: int) -> tuple[Tensor, Tensor]:
    """Matrices in which every code stands under every exponent that packing takes."""
    numbers = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F])
    exponents = torch.arange(MIN_EXPONENT, MAX_EXPONENT + 1)
    blocks = -(-len(numbers) // 32) * len(exponents)
    count = -(-blocks * 32 // (16 * width)) * 16 * width
    codes = numbers[torch.arange(8 * 32) % len(numbers)].repeat(len(exponents))
    scales = exponents.repeat_interleave(8)
    extra = count - codes.numel()
    codes = torch.cat([codes, codes[:extra]]).to(torch.uint8)
    scales = torch.cat([scales, scales[: extra // 32]]).to(torch.uint8)
    return codes.view(1, -1, width), scales.view(1, -1, width // 32)


@pytest.mark.parametrize("order", ["plain", "gated"])
@pytest.mark.parametrize("width", [192, 96, 32])
def test_mxfp8_values_are_exact(width: int, order: str) -> None:
    codes, scales = all_mxfp8(width)
    rows = codes.shape[1]
    packed = pack_mxfp8_vectors(codes, scales, order)
    assert packed.numel() == num_bytes("mxfp8", 1, rows, width)
    sign = np.where(codes.numpy() & 0x80, -1, 1)
    values = sign * e4m3(codes.numpy() & 0x7F)
    values *= 2.0 ** (scales.numpy().repeat(32, axis=-1) - 127.0)
    got = unpack_mxfp8(packed, rows, width)
    assert np.array_equal(got[..., :width], gated(values) if order == "gated" else values)
    assert not got[..., width:].any()


@pytest.mark.parametrize("order", ["plain", "gated"])
def test_bf16_values_are_kept(order: str) -> None:
    weight = torch.randn(3, 32, 144).bfloat16()
    packed = pack_bf16_vectors(weight, order)
    assert packed.numel() == num_bytes("bf16", 3, 32, 144)
    words = (
        packed.numpy().view(np.uint32).reshape(3, 2, 3, 4, 8, 4, 4).transpose(0, 1, 2, 4, 5, 3, 6)
    )
    got = matrix_of(pairs(words), 32)
    values = weight.double().numpy()
    assert np.array_equal(got[..., :144], gated(values) if order == "gated" else values)
    assert not got[..., 144:].any()


def test_exponents_of_zeros_do_not_matter() -> None:
    codes, exponents = torch.zeros(16, 64).to(torch.uint8), torch.zeros(16, 2).to(torch.uint8)
    codes[3, 40] = 0x80
    exponents[5, 1] = 255
    assert not unpack_mxfp8(pack_mxfp8_vectors(codes, exponents, "plain"), 16, 64).any()


@pytest.mark.parametrize(
    ("code", "exponent", "message"),
    [
        (0x7F, 127, "an MXFP8 weight is no number (0x7f or 0xff)"),
        (0xFF, 127, "an MXFP8 weight is no number (0x7f or 0xff)"),
        (0x38, MIN_EXPONENT - 1, "an MXFP8 exponent is 9, expected 10 to 141"),
        (0x38, MAX_EXPONENT + 1, "an MXFP8 exponent is 142, expected 10 to 141"),
        (0x01, 255, "an MXFP8 exponent is 255, expected 10 to 141"),
    ],
)
def test_what_is_not_exact_is_refused(code: int, exponent: int, message: str) -> None:
    codes = torch.full((16, 32), 0x38, dtype=torch.uint8)
    exponents = torch.full((16, 1), 127, dtype=torch.uint8)
    codes[7, 9], exponents[7] = code, exponent
    with pytest.raises(BuildError, match=message.replace("(", r"\(").replace(")", r"\)")):
        pack_mxfp8_vectors(codes, exponents, "plain")


def test_rows_are_whole_tiles() -> None:
    with pytest.raises(BuildError, match="24 rows, expected a multiple of 16"):
        pack_bf16_vectors(torch.zeros(24, 64).bfloat16(), "plain")


@pytest.mark.parametrize(
    ("kind", "columns", "size"), [("nvfp4", 288, 9 * 576), ("mxfp8", 576, 9 * 1056)]
)
def test_sizes_are_known_before(kind: str, columns: int, size: int) -> None:
    """Of the model's down-projection on one of four ranks."""
    made = packing(kind, "down", "down_scales", "plain")  # type: ignore[arg-type]
    shapes = [
        TensorArg((384, 4608, columns), torch.uint8),
        TensorArg((384, 4608, 36), torch.uint8),
    ]
    assert made.num_bytes(shapes) == 384 * 288 * size
