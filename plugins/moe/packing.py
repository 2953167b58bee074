"""Experts' weights in vectors of 16 rows x 64 k, as the kernels of `moe` read them.

`weights.cuh` says where each value stands. Matrices are [row tile][vector]; K is padded with zeros
to whole vectors; leading axes (experts) come first. The inside of NVFP4 and bf16 vectors is that of
`w4a16.packing`, which packs them here too.
"""

from collections.abc import Sequence
from math import prod
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from inkrt.errors import BuildError
from inkrt.plugins import mxfp8, nvfp4
from inkrt.plugins.tactic import Packing, TensorArg
from inkrt.plugins.w4a16.packing import (
    CHUNK_K,
    check_scales,
    e5m3,
    nvfp4_words,
    pack_bf16,
    row_order,
    row_pieces,
    take_rows,
)

Format = Literal["nvfp4", "bf16", "mxfp8"]

VECTOR_ROWS, VECTOR_K = 16, 64
VECTOR_BYTES: dict[Format, int] = {"nvfp4": 576, "bf16": 2048, "mxfp8": 1056}
# Exponents for which value x 2^(exponent - 127 - 7) of every code is exact in bfloat16, see
# weights.cuh: the smallest code is 2^-9, bfloat16's smallest number 2^-133, and the factor that
# stands in the kernel is at most 2^127.
MIN_EXPONENT, MAX_EXPONENT = 10, 141
_EXPONENT_SHIFT = 113


def num_vectors(width: int) -> int:
    """Vectors of a row tile."""
    return -(-width // VECTOR_K)


def num_bytes(kind: Format, *shape: int) -> int:
    """Bytes of packed matrices of shape [..., N, K]."""
    *lead, rows, width = shape
    return prod(lead) * (rows // VECTOR_ROWS) * num_vectors(width) * VECTOR_BYTES[kind]


def pack_nvfp4_vectors(codes: Tensor, scales: Tensor, order: str) -> Tensor:
    """Pack NVFP4 matrices.

    Args:
        codes: uint8 [..., N, K / 2], see `plugins.nvfp4`; N a multiple of 16.
        scales: uint8 [..., N, K / 16].
        order: of rows, "plain" or "gated", see `w4a16.packing.row_order`.

    Returns:
        uint8 [num_bytes].

    Raises:
        BuildError: a scale is negative or no number, or N does not fit.
    """
    *lead, rows, half = codes.shape
    _check_rows(rows)
    check_scales(scales)
    if extra := -half % (VECTOR_K // 2):
        codes, scales = pad(codes, (0, extra)), pad(scales, (0, 2 * extra // nvfp4.BLOCK))
    count, depth = num_vectors(2 * half), prod(lead)
    packed = np.empty(num_bytes("nvfp4", *lead, rows, 2 * half), np.uint8)
    of_codes = codes.reshape(depth, rows, -1)
    of_scales = scales.reshape(depth, rows, -1)
    for out, matrix, index in row_pieces(packed, depth, rows, order):
        own_scales = take_rows(of_scales[matrix], index)
        vectors = torch.from_numpy(out).view(-1, count, VECTOR_BYTES["nvfp4"])
        words = nvfp4_words(take_rows(of_codes[matrix], index), own_scales)
        vectors.view(torch.int32)[..., :128] = words
        # From [tile, half of the tile, g, vector, k / 16].
        ordered = e5m3(own_scales).reshape(-1, 2, 8, count, 4).transpose(0, 3, 2, 4, 1)
        vectors[..., 512:] = torch.from_numpy(ordered.reshape(len(words), count, -1))
    return torch.from_numpy(packed)


def pack_bf16_vectors(weight: Tensor, order: str) -> Tensor:
    """Pack bf16 matrices [..., N, K]; gives uint8 [num_bytes]; errors as `pack_nvfp4_vectors`."""
    *_, rows, width = weight.shape
    _check_rows(rows)
    extra = -width % CHUNK_K
    if not extra:
        return pack_bf16(weight, order)
    packed = pack_bf16(pad(weight, (0, extra)), order)
    vectors = packed.view(-1, (width + extra) // VECTOR_K, VECTOR_BYTES["bf16"])
    return vectors[:, : num_vectors(width)].flatten()


def pack_mxfp8_vectors(codes: Tensor, exponents: Tensor, order: str) -> Tensor:
    """Pack MXFP8 matrices.

    Args:
        codes: uint8 [..., N, K], see `plugins.mxfp8`; N a multiple of 16.
        exponents: uint8 [..., N, K / 32]; of blocks of zeros they do not matter.
        order: of rows, as for `pack_nvfp4_vectors`.

    Returns:
        uint8 [num_bytes].

    Raises:
        BuildError: a code is no number, an exponent is out of the range that is exact in bfloat16,
            or N does not fit.
    """
    *lead, rows, width = codes.shape
    _check_rows(rows)
    source = row_order(order, rows)
    index = torch.arange(rows) if source is None else source
    count, depth = num_vectors(width), prod(lead)
    packed = np.empty((depth, rows // 16 * count, VECTOR_BYTES["mxfp8"]), np.uint8)
    of_codes = codes.reshape(depth, rows, width)
    of_exponents = exponents.reshape(depth, rows, width // mxfp8.BLOCK)
    extra = count * VECTOR_K - width
    for matrix in range(depth):
        code = of_codes[matrix].index_select(0, index)
        exponent = _checked(code, of_exponents[matrix].index_select(0, index))
        code, exponent = pad(code, (0, extra)), pad(exponent, (0, extra // mxfp8.BLOCK))
        # From [tile, half of the tile, g, vector, t, mma / 2] of [mma % 2, pair, k].
        runs = code.numpy().view("V8").reshape(-1, 2, 8, count, 4, 2).transpose(1, 0, 3, 5, 2, 4)
        upper, lower = torch.from_numpy(np.ascontiguousarray(runs).view(np.uint8).reshape(2, -1))
        both = lower.to(torch.int16).bitwise_left_shift_(8).bitwise_or_(upper)
        packed[matrix, :, :1024] = both.numpy().view(np.uint8).reshape(-1, 1024)
        # From [tile, half of the tile, g, vector, k / 32].
        scales = exponent.numpy().reshape(-1, 2, 8, count, 2)
        packed[matrix, :, 1024:] = scales.transpose(0, 3, 2, 4, 1).reshape(-1, 32)
    return torch.from_numpy(packed.reshape(-1))


def packing(kind: Format, weight: str, scales: str, order: Literal["plain", "gated"]) -> Packing:
    """The packing of the arguments `weight` and, if it is quantized, `scales`."""
    if kind == "bf16":
        return Packing(
            (weight,),
            f"bf16_vectors_{order}",
            lambda w: pack_bf16_vectors(w, order),
            lambda shapes: num_bytes("bf16", *shapes[0].shape),
            cuts_stacks=True,
        )
    pack = pack_nvfp4_vectors if kind == "nvfp4" else pack_mxfp8_vectors

    def size(shapes: Sequence[TensorArg]) -> int:
        *lead, columns = shapes[0].shape
        return num_bytes(kind, *lead, columns * 2 if kind == "nvfp4" else columns)

    name = f"{kind}_vectors_{order}"
    return Packing((weight, scales), name, lambda w, s: pack(w, s, order), size, cuts_stacks=True)


def _check_rows(rows: int) -> None:
    if rows % VECTOR_ROWS:
        raise BuildError(
            f"packing: {rows} rows, expected a multiple of {VECTOR_ROWS}; choose a tactic without "
            f"vectors"
        )


def _checked(codes: Tensor, exponents: Tensor) -> Tensor:
    """Exponents as the kernels want them, of one matrix."""
    magnitude = codes & 0x7F
    if bool((magnitude == mxfp8.NO_NUMBER).any()):
        raise BuildError(
            "packing: an MXFP8 weight is no number (0x7f or 0xff); repair the checkpoint"
        )
    is_zero = magnitude.view(*exponents.shape, mxfp8.BLOCK).amax(dim=-1) == 0
    wanted = torch.where(is_zero, mxfp8.BIAS, exponents.int())
    lowest, highest = int(wanted.min()), int(wanted.max())
    if lowest < MIN_EXPONENT or highest > MAX_EXPONENT:
        wrong = lowest if lowest < MIN_EXPONENT else highest
        raise BuildError(
            f"packing: an MXFP8 exponent is {wrong}, expected {MIN_EXPONENT} to {MAX_EXPONENT}, "
            f"with which weights are exact in bfloat16; requantize the checkpoint"
        )
    return (wanted + _EXPONENT_SHIFT).to(torch.uint8)
