"""Reading a GGUF checkpoint: one .gguf file beside the config.json and tokenizer of its model.

It has the interface of a safetensors checkpoint. Names are the file's own, shapes are in the usual
order (ggml counts dimensions from the other end). A tensor X.weight of type NVFP4 reads as two:

    X.weight        uint8 [..., N, K / 2]    codes, values 2i and 2i + 1 in one byte
    X.weight_scale  uint8 [..., N, K / 16]   E4M3 bytes 0 to 0x7E

Its third part, X.scale, is a tensor of the file. Nothing is rounded: the same codes and scales are
put in another order. The header is read by `gguf_header`. The config is that of config.json; which
tensors are NVFP4 is added to it as `quantization_config`.

In the file 64 values of K are 36 bytes: four scales, then 8 bytes for each 16 values, of which byte
i holds value i in its low and value 8 + i in its high four bits.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inkrt.builder.checkpoint import read_json
from inkrt.builder.encoding import require_values
from inkrt.builder.gguf_header import GgufHeader, GgufTensor, read_header
from inkrt.builder.mapped import MappedFile, Span, extent
from inkrt.engines.interface import Part
from inkrt.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

_SUPER_BLOCK_BYTES = 36
_SCALES = 4
# The one byte that stands for zero whatever E4M3 makes of it, and the one that stands for nothing.
_ZERO_SCALE = 0x7F
_INVALID_SCALE = 0xFF
_ACTIVATION_KEY = "general.tensor_extra.prec_a4"


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor as this module names it.

    Attributes:
        kind: how `stored` holds it.
        shape: as it reads.
        dtype: as it reads.
        offset: of its first byte in the file.
        row_bytes: of one row [K] of it there.
    """

    kind: Literal["plain", "codes", "scales"]
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    row_bytes: int


class GgufCheckpoint:
    """A .gguf file and the Hugging Face files in its folder; see `checkpoint.CheckpointSource`.

    Attributes:
        path: of the file.
        folder: where config and tokenizer are.
        config: of the model, with `quantization_config` if the file has NVFP4 tensors.

    Raises:
        CheckpointError: from the constructor, if the file or the config is missing, damaged or not
            supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path.parent
        config = read_json(self.folder / "config.json")
        header = read_header(path, _open(path))
        self._mapped = MappedFile(path)
        self._header_bytes = header.num_bytes
        _require_wide_activations(path, header)
        self._entries: dict[str, _Entry] = {}
        for tensor in header.tensors:
            self._entries |= _entries_of(path, tensor)
        quantized = [name for name, entry in self._entries.items() if entry.kind == "codes"]
        if quantized:
            config["quantization_config"] = {"quant_method": "nvfp4", "tensors": quantized}
        self.config: Mapping[str, Any] = config

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._entries)

    @cached_property
    def fingerprint(self) -> str:
        """Hex sha256 over the config and the name, size and header of the file."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        digest.update(f"{self.path.name}\0{self.path.stat().st_size}\0".encode())
        with self.path.open("rb") as file:
            digest.update(file.read(self._header_bytes))
        return digest.hexdigest()

    def require_shards(self) -> None:
        """There is a file, so there is nothing to require."""

    def dtype_of(self, name: str) -> torch.dtype:
        """Dtype of a tensor as it reads: BF16, F32, or uint8 for NVFP4.

        Raises:
            CheckpointError: the tensor is missing.
        """
        return self._entry(name).dtype

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor as it reads.

        Raises:
            CheckpointError: the tensor is missing.
        """
        return self._entry(name).shape

    def check(self, part: Part) -> None:
        """Compare the header of a tensor with what is expected of it; reads no data.

        Raises:
            CheckpointError: the tensor is missing, or its shape is not the expected.
        """
        entry = self._entry(part.name)
        if entry.shape != part.shape:
            what = "has shape" if entry.kind == "plain" else "is NVFP4 and reads as shape"
            raise CheckpointError(
                f"{self.path}: tensor {part.name} {what} {list(entry.shape)}, {list(part.shape)} "
                f"expected from config.json; one of the two belongs to another model"
            )

    def read(self, part: Part) -> Tensor:
        """The piece; a view of the memory-mapped file unless it is NVFP4.

        Raises:
            CheckpointError: as `check`, or a scale of the piece is no number. Of scales the top bit
                counts for nothing.
        """
        self.check(part)
        entry = self._entry(part.name)
        *rows, _ = entry.shape
        num_bytes = math.prod(rows) * entry.row_bytes
        if entry.kind == "plain":
            plain = self._mapped.tensor(entry.offset, num_bytes, entry.dtype)
            piece = plain.view(entry.shape)[part.index]
            require_values(part, piece, self.path)
            return piece
        raw = self._mapped.tensor(entry.offset, num_bytes, torch.uint8)
        stored = raw.view(*rows, entry.row_bytes)[part.index[:-1]]
        blocks = stored.reshape(*stored.shape[:-1], -1, _SUPER_BLOCK_BYTES)
        if entry.kind == "codes":
            return _codes(blocks)[..., part.index[-1]]
        return self._scales(part.name, blocks)[..., part.index[-1]]

    def span(self, part: Part) -> Span:
        """What `read` reads: whole rows.

        Raises:
            CheckpointError: the tensor is missing.
        """
        entry = self._entry(part.name)
        first, last = extent(part.shape[:-1], part.index[:-1])
        offset, size = entry.offset, entry.row_bytes
        return Span(self._mapped, offset + first * size, offset + last * size)

    def file_states(self) -> list[tuple[str, int, int]]:
        """Name, size and time of the last change, in nanoseconds, of the file."""
        state = self.path.stat()
        return [(self.path.name, state.st_size, state.st_mtime_ns)]

    def _scales(self, name: str, blocks: Tensor) -> Tensor:
        scales = blocks[..., :_SCALES].flatten(-2)
        if (scales == _INVALID_SCALE).any():
            raise CheckpointError(
                f"{self.path}: tensor {name.removesuffix('_scale')} has a block scale 0xFF, which "
                f"is no number; download the file again"
            )
        return torch.where(scales == _ZERO_SCALE, 0, scales & 0x7F)

    def _entry(self, name: str) -> _Entry:
        if name in self._entries:
            return self._entries[name]
        stored = self._entries.get(name.removesuffix("_scale"))
        if name.endswith(".weight_scale") and stored is not None:
            raise CheckpointError(
                f"{self.path}: tensor {name.removesuffix('_scale')} is {stored.dtype}, NVFP4 "
                f"expected as for the others; this version reads no mixture"
            )
        raise CheckpointError(
            f"{self.path} has no tensor {name}; it is not complete or config.json belongs to "
            f"another model"
        )


def _open(path: Path) -> NDArray[np.uint8]:
    """All bytes of the file, mapped."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("not a file")
        return np.memmap(path, np.uint8, "r")  # for the header; tensors are read by `MappedFile`
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path} ({error}); it must be a file that you may read"
        ) from None
    except ValueError:
        raise CheckpointError(
            f"{path} is truncated, damaged or of an unknown kind (it is empty); download it again"
        ) from None


def _require_wide_activations(path: Path, header: GgufHeader) -> None:
    """Refuse a file that asks for 4-bit activations for any tensor."""
    value = header.metadata.get(_ACTIVATION_KEY, False)
    if not isinstance(value, bool | np.ndarray) or np.any(value):
        raise CheckpointError(
            f"{path}: {_ACTIVATION_KEY} asks for 4-bit activations, only 16-bit activations "
            f"(all false) are supported by this version; use a release of the model with them"
        )


def _entries_of(path: Path, tensor: GgufTensor) -> dict[str, _Entry]:
    """The entries of one tensor of the file."""
    name, shape, offset = tensor.name, tensor.shape, tensor.start
    row_bytes = tensor.num_bytes // math.prod(shape[:-1])
    if tensor.type != "NVFP4":
        dtype = torch.float32 if tensor.type == "F32" else torch.bfloat16
        return {name: _Entry("plain", shape, dtype, offset, row_bytes)}
    if not name.endswith(".weight"):
        raise CheckpointError(
            f"{path}: tensor {name} has ggml type NVFP4, only F32, BF16 and, for weights, NVFP4 "
            f"are supported by this version; use a release of the model in these"
        )
    *rows, width = shape
    return {
        name: _Entry("codes", (*rows, width // 2), torch.uint8, offset, row_bytes),
        f"{name}_scale": _Entry("scales", (*rows, width // 16), torch.uint8, offset, row_bytes),
    }


def _codes(blocks: Tensor) -> Tensor:
    """Codes [..., K / 2], two neighbors in a byte, of super-blocks [..., K / 64, 36]."""
    halves = blocks[..., _SCALES:].reshape(*blocks.shape[:-1], _SCALES, -1)
    values = torch.cat([halves & 0xF, halves >> 4], dim=-1)
    return (values[..., 0::2] | values[..., 1::2] << 4).flatten(-3)
