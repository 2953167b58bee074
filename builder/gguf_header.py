"""The header of a GGUF file: its metadata, and where its tensors stand.

Lengths and counts in the header are checked against the size of the file before anything is made of
them, so a damaged byte can neither make a reader loop nor ask for memory; the package `gguf`, which
writes such files, trusts them. The format is that of ggml, versions 2 and 3, little-endian.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_DIMS = 4
_MOST_NAME_BYTES = 4096
_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT = "general.alignment", 32
_STRING, _ARRAY = 8, 9
# Of scalar values, by the number of their type.
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
TensorType = Literal["F32", "BF16", "NVFP4"]
# Number of the type -> name, values in a block, bytes of a block.
_TYPES: dict[int, tuple[TensorType, int, int]] = {
    0: ("F32", 1, 4), 30: ("BF16", 1, 2), 40: ("NVFP4", 64, 36),
}  # fmt: skip
# Names of some that are not read, for messages.
_OTHER_TYPES = {
    1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 24: "I8", 26: "I32", 39: "MXFP4",
}  # fmt: skip

Value = bool | int | float | str | NDArray[np.generic] | None


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        type: of its values.
        shape: in the usual order; ggml counts dimensions from the other end.
        start: first byte in the file.
        num_bytes: from there on.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What stands before the data.

    Attributes:
        metadata: by key; arrays of strings are left out (None).
        tensors: in the order of the file.
        num_bytes: up to the first tensor's data.
    """

    metadata: Mapping[str, Value]
    tensors: tuple[GgufTensor, ...]
    num_bytes: int


def read_header(path: Path, data: NDArray[np.uint8]) -> GgufHeader:
    """Read the header of a file.

    Args:
        path: for messages.
        data: all bytes of the file, mapped.

    Raises:
        CheckpointError: the file is damaged or of an unknown kind.
    """
    try:
        return _read(path, _Cursor(data))
    except _DamageError as error:
        raise CheckpointError(
            f"{path} is truncated, damaged or of an unknown kind ({error}); download it again"
        ) from None


class _DamageError(Exception):
    """Something in the header cannot be."""


class _Cursor:
    """Reads values one after the other, never beyond the end."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data
        self.place = 0

    @property
    def size(self) -> int:
        return len(self._data)

    def take(self, num_bytes: int) -> bytes:
        return self.view(num_bytes).tobytes()

    def view(self, num_bytes: int) -> NDArray[np.uint8]:
        if num_bytes > self.size - self.place:
            raise _DamageError(
                f"{num_bytes} bytes wanted at {self.place}, the file has {self.size}"
            )
        self.place += num_bytes
        return self._data[self.place - num_bytes : self.place]

    def u32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def string(self) -> str:
        try:
            return self.take(self.u64()).decode("utf-8")
        except UnicodeDecodeError:
            raise _DamageError(f"text before byte {self.place} is not UTF-8") from None

    def name(self) -> str:
        name = self.string()
        if not name.isprintable() or not 0 < len(name) <= _MOST_NAME_BYTES:
            raise _DamageError(f"the name before byte {self.place} is none")
        return name

    def value(self) -> Value:
        kind = self.u32()
        if kind == _ARRAY:
            return self._array(self.u32(), self.u64())
        if kind == _STRING:
            return self.string()
        dtype = _scalar(kind)
        scalar: Value = self.view(dtype.itemsize).view(dtype)[0].item()
        return scalar

    def _array(self, kind: int, count: int) -> Value:
        if kind != _STRING:
            dtype = _scalar(kind)
            return self.view(count * dtype.itemsize).view(dtype)
        for _ in range(count):  # every turn takes eight bytes at least
            self.view(self.u64())
        return None


def _scalar(kind: int) -> np.dtype[np.generic]:
    if kind not in _SCALARS:
        raise _DamageError(f"metadata has values of the unknown type {kind}")
    return np.dtype(_SCALARS[kind])


def _read(path: Path, cursor: _Cursor) -> GgufHeader:
    if cursor.take(4) != _MAGIC:
        raise _DamageError("it does not begin with GGUF")
    version = cursor.u32()
    if version not in _VERSIONS:
        raise _DamageError(f"version {version}, only {' and '.join(map(str, _VERSIONS))} are read")
    num_tensors, num_values = cursor.u64(), cursor.u64()
    metadata: dict[str, Value] = {}
    for _ in range(num_values):
        key = cursor.name()
        if key in metadata:
            raise _DamageError(f"metadata has {key} twice")
        metadata[key] = cursor.value()
    alignment = metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise _DamageError(f"{_ALIGNMENT_KEY} must be a power of two of at least 8")
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = cursor.name()
        if name in entries:
            raise _DamageError(f"tensor {name} stands in it twice")
        num_dims = cursor.u32()
        if not 1 <= num_dims <= _MOST_DIMS:
            raise _DamageError(f"tensor {name} has {num_dims} dimensions")
        dims = tuple(cursor.u64() for _ in range(num_dims))
        entries[name] = dims[::-1], cursor.u32(), cursor.u64()
    start = -(-cursor.place // alignment) * alignment
    tensors = []
    for name, (shape, kind, offset) in entries.items():
        if kind not in _TYPES:
            raise CheckpointError(
                f"{path}: tensor {name} has ggml type {_OTHER_TYPES.get(kind, kind)}, only "
                f"{', '.join(type_ for type_, _, _ in _TYPES.values())} are supported by this "
                f"version; use a release of the model in these"
            )
        type_, block, block_bytes = _TYPES[kind]
        num_bytes = math.prod(shape) // block * block_bytes
        if shape[-1] % block or not num_bytes:
            raise _DamageError(f"tensor {name} is {type_} and has shape {list(shape)}")
        if offset % alignment or start + offset + num_bytes > cursor.size:
            raise _DamageError(f"tensor {name} has no place in the {cursor.size} bytes of the file")
        tensors.append(GgufTensor(name, type_, shape, start + offset, num_bytes))
    return GgufHeader(metadata, tuple(tensors), start)
