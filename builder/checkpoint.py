"""Reading a checkpoint folder: its config, and its tensors by lazy slices.

Tensors are views of memory-mapped shards, so only the pages of the slices that are taken get read;
`span` says which these are, so that they can be given back.
This module knows files and dtypes, not models. GGUF files are read by `gguf_checkpoint`.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inkrt.builder.encoding import DTYPES_OF, blocks_of, require_values
from inkrt.builder.mapped import MappedFile, Span, extent
from inkrt.engines.interface import Part
from inkrt.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

INDEX_NAME = "model.safetensors.index.json"
# By their safetensors codes: of weights, and of token ids.
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_ID_DTYPES = ("I64", "I32", "BOOL")
_STORED = _DTYPES | {
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
# What file systems take.
_MOST_NAME_BYTES = 255
# Beside config.json, where its publisher lists which modules are quantized, and how.
QUANT_CONFIG_NAME = "hf_quant_config.json"


class CheckpointSource(Protocol):
    """What the builder reads of a checkpoint, in whichever format; see `Checkpoint`."""

    folder: Path
    config: "Mapping[str, Any]"

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex sha256 over config and headers."""
        ...

    def require_shards(self) -> None:
        """Raise CheckpointError if there are no tensors at all."""
        ...

    def dtype_of(self, name: str) -> torch.dtype:
        """Stored dtype of a tensor."""
        ...

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Stored shape of a tensor."""
        ...

    def check(self, part: Part) -> None:
        """Compare the header of a tensor with what is expected of it; reads no data."""
        ...

    def read(self, part: Part) -> Tensor:
        """The piece of a tensor; nobody may write to it."""
        ...

    def span(self, part: Part) -> Span:
        """What `read` reads."""
        ...

    def file_states(self) -> list[tuple[str, int, int]]:
        """Name, size and time of the last change, in nanoseconds, of every file with tensors."""
        ...


def open_checkpoint(path: Path) -> CheckpointSource:
    """Open a folder with safetensors or with one GGUF file, or a GGUF file by its own path.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or the folder holds both formats.
    """
    files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if not files:
        return Checkpoint(path)
    if path.is_dir() and any(path.glob("*.safetensors")):
        raise CheckpointError(
            f"checkpoint {path} holds safetensors and {files[0].name}; name the .gguf file itself "
            f"to take it, or move it away"
        )
    if len(files) > 1:
        raise CheckpointError(
            f"checkpoint {path} holds {len(files)} .gguf files; name one of them (a model that is "
            f"split over several is not supported by this version)"
        )
    from inkrt.builder.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(files[0])


class Checkpoint:
    """A folder with config.json and *.safetensors, as its publisher ships it.

    A folder with nothing but config.json has no tensors; see `require_shards`.

    Raises:
        CheckpointError: from the constructor, if the folder, its config or a shard is missing or
            damaged; see the methods for theirs.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(
                f"checkpoint {folder} is not a folder; name the one with the model's config.json"
            )
        self.folder = folder
        self.config: Mapping[str, Any] = _read_config(folder)
        self._shards: dict[str, _Shard] = {}
        self._shard_of: dict[str, str] = {}
        for shard in self._shard_names():
            self._shards[shard] = _open_shard(folder / shard)
            for name in self._shards[shard].offsets:
                if not name.isprintable():
                    raise CheckpointError(
                        f"{folder / shard}: {name!r} is no name of a tensor; download it again"
                    )
                if name in self._shard_of:
                    raise CheckpointError(
                        f"{folder / shard}: tensor {name} stands in {self._shard_of[name]} too; "
                        f"remove one of the two files"
                    )
                self._shard_of[name] = shard
        self._check_index()

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._shard_of)

    @cached_property
    def fingerprint(self) -> str:
        """Hex sha256 over the config and the name, size and header of every shard."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        if (quant_config := self.folder / QUANT_CONFIG_NAME).exists():
            digest.update(quant_config.read_bytes())
        for shard in sorted(self._shards):
            path = self.folder / shard
            with path.open("rb") as file:
                header_size = int.from_bytes(file.read(8), "little")
                header = file.read(header_size)
            digest.update(f"{shard}\0{path.stat().st_size}\0".encode())
            digest.update(header)
        return digest.hexdigest()

    def require_shards(self) -> None:
        """Raise CheckpointError if the folder has no tensors at all."""
        if not self._shards:
            raise CheckpointError(
                f"checkpoint {self.folder} has no *.safetensors file; download its shards"
            )

    def dtype_of(self, name: str) -> torch.dtype:
        """Stored dtype of a tensor, from its shard's header.

        Raises:
            CheckpointError: the tensor is missing or not BF16 or F32.
        """
        code = self._header_of(name).get_dtype()
        if code not in _DTYPES:
            raise CheckpointError(
                f"{self.folder / self._shard_of[name]}: tensor {name} has dtype {code}, only "
                f"{' and '.join(_DTYPES)} are supported by this version; use a release of the "
                f"model in one of them"
            )
        return _DTYPES[code]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Stored shape of a tensor, from its shard's header.

        Raises:
            CheckpointError: the tensor is missing.
        """
        return tuple(self._header_of(name).get_shape())

    def check(self, part: Part) -> None:
        """Compare the header of a tensor with what is expected of it; reads no data.

        Raises:
            CheckpointError: the tensor is missing, or its shape or dtype is not the expected.
        """
        if part.encoding:
            self._check_encoding(part)
        elif not part.is_ids:
            self.dtype_of(part.name)
        elif (code := self._header_of(part.name).get_dtype()) not in _ID_DTYPES:
            raise CheckpointError(
                f"{self.folder / self._shard_of[part.name]}: tensor {part.name} has dtype {code}, "
                f"token ids must be {', '.join(_ID_DTYPES)}"
            )
        shape = self._header_of(part.name).get_shape()
        if tuple(shape) != part.shape and not (part.or_scalar and math.prod(shape) == 1):
            raise CheckpointError(
                f"{self.folder / self._shard_of[part.name]}: tensor {part.name} has shape "
                f"{shape}, {list(part.shape)} expected from config.json{blocks_of(part)}; one of "
                f"the two belongs to another model"
            )

    def read(self, part: Part) -> Tensor:
        """The piece as a strided view of the memory-mapped shard.

        Raises:
            CheckpointError: as `check`, or it has values that an encoded weight or a scale cannot.
        """
        self.check(part)
        shard = self._shards[self._shard_of[part.name]]
        header = self._header_of(part.name)
        dtype, shape = _STORED[header.get_dtype()], tuple(header.get_shape())
        first = shard.offsets[part.name]
        is_one = part.or_scalar and shape != part.shape
        index = tuple(slice(size) for size in shape) if is_one else part.index
        # Bytes of the piece alone, as those that are not aligned are copied.
        begin, end = extent(shape, index)
        size = dtype.itemsize
        piece = shard.mapped.tensor(first + begin * size, (end - begin) * size, dtype).as_strided(
            [len(range(n)[one]) for n, one in zip(shape, index, strict=True)],
            [math.prod(shape[dim + 1 :]) * (one.step or 1) for dim, one in enumerate(index)],
        )
        if part.encoding:
            piece = piece.view(torch.uint8)
        if is_one:
            piece = piece.reshape(1)
        require_values(part, piece, self.folder / self._shard_of[part.name])
        return piece

    def span(self, part: Part) -> Span:
        """What `read` reads.

        Raises:
            CheckpointError: the tensor is missing.
        """
        header = self._header_of(part.name)
        shard = self._shards[self._shard_of[part.name]]
        size, shape = _STORED[header.get_dtype()].itemsize, tuple(header.get_shape())
        first, last = extent(shape, part.index) if shape == part.shape else (0, math.prod(shape))
        offset = shard.offsets[part.name]
        return Span(shard.mapped, offset + first * size, offset + last * size)

    def file_states(self) -> list[tuple[str, int, int]]:
        """Name, size and time of the last change, in nanoseconds, of every shard."""
        states = [(name, (self.folder / name).stat()) for name in sorted(self._shards)]
        return [(name, state.st_size, state.st_mtime_ns) for name, state in states]

    def _check_encoding(self, part: Part) -> None:
        assert part.encoding is not None
        code, allowed = self._header_of(part.name).get_dtype(), DTYPES_OF[part.encoding]
        if code not in allowed:
            raise CheckpointError(
                f"{self.folder / self._shard_of[part.name]}: tensor {part.name} has dtype {code}, "
                f"{' or '.join(allowed)} expected of quantized weights; {QUANT_CONFIG_NAME} or "
                f"config.json belongs to another release of the model"
            )

    def _header_of(self, name: str) -> Any:
        if name not in self._shard_of:
            raise CheckpointError(
                f"checkpoint {self.folder} has no tensor {name}; a shard is missing or config.json "
                f"belongs to another model"
            )
        return self._shards[self._shard_of[name]].headers.get_slice(name)

    def _shard_names(self) -> list[str]:
        if (self.folder / INDEX_NAME).is_file():
            weight_map = read_json(self.folder / INDEX_NAME).get("weight_map")
            if not isinstance(weight_map, dict) or not all(
                name.isprintable() and isinstance(shard, str) and _is_file_name(shard)
                for name, shard in weight_map.items()
            ):
                raise CheckpointError(
                    f"{self.folder / INDEX_NAME} has no weight_map from tensor names to file "
                    f"names; download it again"
                )
            return sorted(set(weight_map.values()))
        return sorted(path.name for path in self.folder.glob("*.safetensors"))

    def _check_index(self) -> None:
        if not (self.folder / INDEX_NAME).is_file():
            return
        for name, shard in read_json(self.folder / INDEX_NAME)["weight_map"].items():
            if self._shard_of.get(name) != shard:
                raise CheckpointError(
                    f"{self.folder / shard} has no tensor {name}, which {INDEX_NAME} promises; "
                    f"download the shard again"
                )


def _read_config(folder: Path) -> "Mapping[str, Any]":
    """config.json, with what hf_quant_config.json says as its quantization_config."""
    config = read_json(folder / "config.json")
    path = folder / QUANT_CONFIG_NAME
    if "quantization_config" in config or not path.exists():
        return config
    quantization = read_json(path).get("quantization")
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{path} has no object 'quantization'; download it again")
    return {**config, "quantization_config": {"quant_method": "modelopt", **quantization}}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint.

    Raises:
        CheckpointError: the file cannot be read or holds something else.
    """
    try:
        value = json.loads(path.read_bytes(), parse_constant=_number, parse_float=_number)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path} ({error.strerror}); a checkpoint folder has it beside its shards"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _number(text: str) -> float:
    """A finite number; Python would read NaN, Infinity and 1e999, which nothing in a model is."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


@dataclass(frozen=True, slots=True)
class _Shard:
    """An open file.

    Attributes:
        headers: of its tensors, by `get_slice`.
        offsets: of their first bytes, by name.
        mapped: its bytes.
    """

    headers: Any
    offsets: dict[str, int]
    mapped: MappedFile


def _is_file_name(text: str) -> bool:
    """Whether a text can be the name of a file beside the index, and nothing else."""
    return text.isprintable() and Path(text).name == text and len(text) < _MOST_NAME_BYTES


def _open_shard(path: Path) -> _Shard:
    try:
        headers = safe_open(path, framework="np")  # checks that offsets fit the file
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(size))
        entries.pop("__metadata__", None)
        offsets = {name: 8 + size + entry["data_offsets"][0] for name, entry in entries.items()}
        return _Shard(headers, offsets, MappedFile(path))
    except FileNotFoundError:
        raise CheckpointError(f"shard {path} is missing; download it again") from None
    except OSError as error:
        raise CheckpointError(
            f"cannot read shard {path} ({error}); it must be a file that you may read"
        ) from None
    except SafetensorError as error:
        raise CheckpointError(
            f"shard {path} is truncated or damaged ({error}); download it again"
        ) from None
