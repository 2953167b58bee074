"""The chunk layout of weights that the w4a16 kernels read, packed and unpacked exactly.

A chunk is 16 rows x 256 k; a matrix is [row tile][k / 256] chunks; leading axes (experts) come
first. NVFP4 chunks have 2304 bytes, bf16 chunks 8192 (zeros fill K up to 256); `w4a16.cuh` says
where each value stands and why. The scales of NVFP4 change from e4m3 to e5m3 without loss; the
codes under a zero scale become zero, the one thing that unpacking does not give back (their values
are zero either way).
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from math import prod

import numpy as np
import torch
from torch import Tensor

from inkrt.errors import BuildError
from inkrt.plugins.tactic import Packing, TensorArg

CHUNK_ROWS = 16
CHUNK_K = 256
NVFP4_CHUNK_BYTES = 2304
BF16_CHUNK_BYTES = 8192
SCALE_BLOCK = 16
_CODE_BYTES = 2048
# Packed at a time: what intermediate arrays are a few times of. With less, threads that pack wait
# more for each other (for the interpreter between operations) than caches gain.
_BYTES_AT_ONCE = 2**21

# Rows of which any multiple keeps its order by itself.
_UNIT = {"plain": CHUNK_ROWS, "heads": 128, "gated": 0}

Words = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def row_order(order: str, num_rows: int) -> Tensor | None:
    """Source row of each packed row.

    Args:
        order: "plain"; "gated": the first half are gate rows and the second up rows, a tile takes
            eight of each; "heads": a head of 128 rows, tile i takes rows 8i.. and 64 + 8i...
        num_rows: rows of the matrix.

    Returns:
        int64 [num_rows], or None for the plain order.

    Raises:
        BuildError: the order is unknown or num_rows does not fit it.
    """
    if order == "plain":
        return None
    unit = {"gated": CHUNK_ROWS, "heads": 128}.get(order)
    if unit is None:
        raise BuildError(
            f"packing: row order {order!r}, expected 'plain', 'gated' or 'heads'; "
            f"correct the tactic"
        )
    if num_rows % unit:
        raise BuildError(
            f"packing: {num_rows} rows in order {order!r}, expected a multiple of {unit}; "
            f"choose a tactic without it"
        )
    rows = torch.arange(num_rows)
    group = num_rows if order == "gated" else 128
    return rows.view(-1, 2, group // CHUNK_ROWS, 8).transpose(1, 2).reshape(-1)


def padded_rows(num_rows: int) -> int:
    """Rows after padding to whole tiles."""
    return -(-num_rows // CHUNK_ROWS) * CHUNK_ROWS


def padded_width(width: int) -> int:
    """K of bf16 rows after padding to whole chunks."""
    return -(-width // CHUNK_K) * CHUNK_K


def nvfp4_num_bytes(*shape: int) -> int:
    """Bytes of a packed NVFP4 matrix of shape [..., N, K]."""
    *lead, rows, width = shape
    return prod(lead) * _tiles(rows, width) * NVFP4_CHUNK_BYTES


def bf16_num_bytes(*shape: int) -> int:
    """Bytes of a packed bf16 matrix of shape [..., N, K]."""
    *lead, rows, width = shape
    return prod(lead) * _tiles(rows, padded_width(width)) * BF16_CHUNK_BYTES


def pack_nvfp4(codes: Tensor, scales: Tensor, order: str = "plain") -> Tensor:
    """Pack NVFP4 weights.

    Args:
        codes: uint8 [..., N, K / 2]; byte m holds value 2m in its low and 2m + 1 in its high half.
        scales: e4m3, as float8_e4m3fn or uint8 [..., N, K / 16]; no sign and no NaN.
        order: of rows, see `row_order`.

    Returns:
        uint8 [nvfp4_num_bytes].

    Raises:
        BuildError: K is not a multiple of 256, or a scale is negative or NaN.
    """
    *lead, num_rows, half = codes.shape
    width = half * 2
    flat_codes = codes.reshape(-1, num_rows, half)
    flat_scales = scales.view(torch.uint8).reshape(-1, num_rows, width // SCALE_BLOCK)
    check_scales(scales)
    packed = np.empty(nvfp4_num_bytes(*lead, num_rows, width), np.uint8)
    depth = width // CHUNK_K
    for out, matrix, index in row_pieces(packed, flat_codes.shape[0], num_rows, order):
        own_scales = take_rows(flat_scales[matrix], index)
        words = nvfp4_words(take_rows(flat_codes[matrix], index), own_scales)
        chunks = torch.from_numpy(out).view(-1, depth, NVFP4_CHUNK_BYTES)
        chunks.view(torch.int32)[..., : _CODE_BYTES // 4] = words.view(len(words), depth, -1)
        # From [tile, half of the tile, g, chunk, vector, k / 16].
        ordered = e5m3(own_scales).reshape(-1, 2, 8, depth, 4, 4).transpose(0, 3, 2, 5, 4, 1)
        chunks[..., _CODE_BYTES:] = torch.from_numpy(ordered.reshape(len(words), depth, -1))
    return torch.from_numpy(packed)


def check_scales(scales: Tensor) -> None:
    """Raise BuildError for scales [..., N, K / 16] that are negative or NaN."""
    if (largest := int(scales.view(torch.uint8).max())) >= 0x7F:
        raise BuildError(
            f"packing: a scale byte is {largest:#04x}, expected e4m3 bytes below 0x7f (no sign, no "
            f"NaN); repair the checkpoint"
        )


def unpack_nvfp4(
    packed: Tensor, num_rows: int, width: int, order: str = "plain"
) -> tuple[Tensor, Tensor]:
    """Undo `pack_nvfp4`.

    Args:
        packed: uint8, of one or more matrices.
        num_rows: N.
        width: K.
        order: as packed.

    Returns:
        Codes uint8 [matrices, N, K / 2] and scales uint8 [matrices, N, K / 16].
    """
    chunks = packed.numpy().reshape(
        -1, padded_rows(num_rows) // 16, width // 256, NVFP4_CHUNK_BYTES
    )
    matrices, tiles, depth = chunks.shape[:3]
    words = np.ascontiguousarray(chunks[..., :_CODE_BYTES]).view("<u4")
    words = words.reshape(matrices, tiles, depth, 4, 8, 4, 4).transpose(0, 1, 4, 2, 3, 5, 6)
    # [matrix, tile, half of the tile, g, chunk, vector, t, mma, pair]
    codes = np.empty((matrices, tiles, 2, 8, depth, 4, 4, 4, 2), np.uint8)
    for output in range(4):
        byte = _extract(words, output, 0) | _extract(words, output, 1) << 4
        codes[:, :, output % 2, ..., output // 2] = byte
    scale_bytes = chunks[..., _CODE_BYTES:].reshape(matrices, tiles, depth, 8, 4, 4, 2)
    scales = _from_e5m3()[scale_bytes.transpose(0, 1, 6, 3, 2, 5, 4)]
    return (
        _restore(codes.reshape(matrices, -1, width // 2), num_rows, order),
        _restore(scales.reshape(matrices, -1, width // SCALE_BLOCK), num_rows, order),
    )


def pack_bf16(weight: Tensor, order: str = "plain") -> Tensor:
    """Pack bf16 weights [..., N, K], zeros behind K; gives uint8 [bf16_num_bytes]."""
    *lead, num_rows, width = weight.shape
    flat = weight.view(torch.int16).reshape(-1, num_rows, width)
    if width % CHUNK_K:
        flat = torch.nn.functional.pad(flat, (0, padded_width(width) - width))
        width = flat.shape[-1]
    packed = np.empty(bf16_num_bytes(*lead, num_rows, width), np.uint8)
    for out, matrix, index in row_pieces(packed, flat.shape[0], num_rows, order):
        # [tile, half of the tile, g, vector, t, mma, pair] of two k each.
        rows = take_rows(flat[matrix], index).view(torch.int32).view(-1, 2, 8, width // 64, 4, 4, 2)
        words = torch.from_numpy(out).view(torch.int32).view(len(rows), -1, 4, 8, 4, 2, 2)
        for half, pair in product(range(2), range(2)):  # the rest moves in longer runs
            words[..., pair, half] = rows[:, half, ..., pair].permute(0, 2, 4, 1, 3)
    return torch.from_numpy(packed)


def unpack_bf16(packed: Tensor, num_rows: int, width: int, order: str = "plain") -> Tensor:
    """Undo `pack_bf16`: bf16 [matrices, N, K]."""
    tiles, whole = padded_rows(num_rows) // CHUNK_ROWS, padded_width(width)
    rows = packed.numpy().view("<i2").reshape(-1, tiles, whole // 64, 4, 8, 4, 2, 2, 2)
    rows = rows.transpose(0, 1, 7, 4, 2, 5, 3, 6, 8).reshape(len(rows), -1, whole)
    return _restore(rows[..., :width], num_rows, order).view(torch.bfloat16)


def nvfp4_packing(codes: str, scales: str, order: str) -> Packing:
    """The packing of the NVFP4 arguments `codes` and `scales` for a tactic."""

    def num_bytes(shapes: Sequence[TensorArg]) -> int:
        *lead, half = shapes[0].shape
        return nvfp4_num_bytes(*lead, half * 2)

    name, pack = f"nvfp4_chunks_{order}", _packer(pack_nvfp4, order)
    return Packing((codes, scales), name, pack, num_bytes, cuts_stacks=True, row_unit=_UNIT[order])


def bf16_packing(weight: str, order: str) -> Packing:
    """The packing of the bf16 argument `weight` for a tactic."""

    def num_bytes(shapes: Sequence[TensorArg]) -> int:
        return bf16_num_bytes(*shapes[0].shape)

    name, pack = f"bf16_chunks_{order}", _packer(pack_bf16, order)
    return Packing((weight,), name, pack, num_bytes, cuts_stacks=True, row_unit=_UNIT[order])


def _packer(pack: Callable[..., Tensor], order: str) -> Callable[..., Tensor]:
    return lambda *tensors: pack(*tensors, order)


def _tiles(num_rows: int, width: int) -> int:
    """Chunks of a matrix."""
    if width % CHUNK_K:
        raise BuildError(
            f"packing: rows of {width} values, expected a multiple of {CHUNK_K}; "
            f"choose a tactic without chunks"
        )
    return padded_rows(num_rows) // CHUNK_ROWS * (width // CHUNK_K)


def row_pieces(
    packed: Bytes, matrices: int, num_rows: int, order: str
) -> list[tuple[Bytes, int, Tensor]]:
    """Parts of `packed` that are packed at a time.

    Args:
        packed: uint8, matrices of whole tiles one behind the other.
        matrices: how many.
        num_rows: of each, without padding.
        order: of rows, see `row_order`.

    Returns:
        Each part with its matrix and the source rows (-1: padding).
    """
    rows = torch.full((padded_rows(num_rows),), -1)
    source = row_order(order, num_rows)
    rows[:num_rows] = torch.arange(num_rows) if source is None else source
    row_bytes = packed.size // (matrices * len(rows))
    step = max(_BYTES_AT_ONCE // row_bytes // CHUNK_ROWS, 1) * CHUNK_ROWS
    pieces = []
    for matrix in range(matrices):
        for first in range(0, len(rows), step):
            index = rows[first : first + step]
            start = (matrix * len(rows) + first) * row_bytes
            pieces.append((packed[start : start + len(index) * row_bytes], matrix, index))
    return pieces


def take_rows(matrix: Tensor, index: Tensor) -> Tensor:
    """A copy of rows of `matrix`; those of index -1 are zero."""
    rows = matrix.index_select(0, index.clamp(min=0))
    rows[index < 0] = 0
    return rows


def _restore(
    rows: np.ndarray[tuple[int, ...], np.dtype[np.generic]], num_rows: int, order: str
) -> Tensor:
    """Without padding, in the source's order; rows has shape [matrices, padded N, ...]."""
    source = row_order(order, num_rows)
    values = torch.from_numpy(np.ascontiguousarray(rows[:, :num_rows]))
    if source is None:
        return values
    restored = torch.empty_like(values)
    restored[:, source] = values
    return restored


def nvfp4_words(codes: Tensor, scales: Tensor) -> Tensor:
    """The codes of whole tiles as kernels read them.

    Args:
        codes: uint8 [R, K / 2]; those under a zero scale become zero.
        scales: uint8 [R, K / 16].

    Returns:
        int32 [R / 16, K / 64, 128].
    """
    num_rows, half = codes.shape
    empty = scales == 0
    if empty.any():
        codes.view(num_rows, -1, 8)[empty] = 0
    # [half of the tile, tile, vector, g] of 32 bytes, which hold [t, mma, pair].
    runs = codes.numpy().view("V32").reshape(-1, 2, 8, half // 32).transpose(1, 0, 3, 2)
    pairs = torch.from_numpy(np.ascontiguousarray(runs).view(np.int16).reshape(2, -1))
    upper, lower = (
        table.index_select(0, half_.to(torch.int32).bitwise_and_(0xFFFF))
        for table, half_ in zip(_pair_words(), pairs, strict=True)
    )
    return upper.bitwise_or_(lower).view(num_rows // CHUNK_ROWS, half // 32, -1)


def e5m3(scales: Tensor) -> Bytes:
    """Scales e4m3 as e5m3, uint8 of the same shape."""
    index = scales.flatten().to(torch.int32)
    wide: Bytes = torch.from_numpy(_to_e5m3()).index_select(0, index).numpy()
    return wide.reshape(scales.shape)


# Where the kernel's shifts and masks look for the bits (mantissa, low and high exponent bit, sign)
# of the first code of each A register; the second code stands 16 bits on, around the word's end.
_BITS = ((0, 1, 2, 9), (4, 5, 6, 13), (10, 11, 12, 19), (14, 7, 8, 15))


@cache
def _code_words() -> Words:
    """[register, byte of two codes]: their bits in the word."""
    table = np.zeros((4, 256), np.uint32)
    for register, places in enumerate(_BITS):
        for byte in range(256):
            for bit in range(8):
                if byte >> bit & 1:
                    place = (places[bit % 4] + 16 * (bit // 4)) % 32
                    table[register, byte] |= np.uint32(1 << place)
    return table


@cache
def _pair_words() -> tuple[Tensor, Tensor]:
    """Bits of a pair of bytes, the first one low, of a row g and of a row 8 + g: int32 [65536]."""
    table = _code_words()
    first, second = np.arange(2**16) % 256, np.arange(2**16) // 256
    upper, lower = (table[row][first] | table[row + 2][second] for row in range(2))
    return torch.from_numpy(upper.view(np.int32)), torch.from_numpy(lower.view(np.int32))


def _extract(words: Words, register: int, second: int) -> Bytes:
    """Codes of a register, the first or the second of its pair."""
    codes = np.zeros(words.shape, np.uint8)
    for bit, place in enumerate(_BITS[register]):
        shift = (place + 16 * second) % 32
        codes |= ((words >> np.uint32(shift)) & np.uint32(1)).astype(np.uint8) << bit
    return codes


@cache
def _to_e5m3() -> Bytes:
    """e4m3 byte to e5m3 byte with bias 15 more; subnormals become normal, zero stays zero."""
    table = np.zeros(256, np.uint8)
    for byte in range(1, 0x7F):
        exponent, mantissa = byte >> 3, byte & 7
        if exponent == 0:  # mantissa x 2^-9
            shift = mantissa.bit_length() - 1
            exponent, mantissa = shift - 2, (mantissa << (3 - shift)) & 7
        table[byte] = (exponent + 15) << 3 | mantissa
    return table


@cache
def _from_e5m3() -> Bytes:
    table = np.zeros(256, np.uint8)
    forward = _to_e5m3()
    table[forward[:0x7F]] = np.arange(0x7F)
    return table
