"""Packing: what the weight files of a rank hold, and the content of one of their tensors.

The layout is that of the operators' references, contiguous, in module order, or one that kernels
want. Sizes are known from the module before any data is read, so headers can be written first.
`pieces` cuts tensors so that `weights` can stream them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inkrt.builder.checkpoint import CheckpointSource
from inkrt.builder.dequantize import dequantized
from inkrt.builder.lower_kernels import PackedWeights
from inkrt.builder.quantize import Quantizer
from inkrt.engines.interface import WeightSource
from inkrt.errors import CheckpointError
from inkrt.plugins.tactic import Packing, TensorArg

# What a build that is stopped may have to do again, times the number of ranks.
MAX_FILE_BYTES = 4 * 2**30
_CODES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8", torch.int32: "I32"}


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor of the weight files.

    Attributes:
        packing: layout that kernels read; None for the reference's own.
        sources: the parameters that `packing` takes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    packing: Packing | None = None
    sources: tuple["PackedTensor", ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @classmethod
    def packed(
        cls, name: str, packing: Packing, sources: tuple["PackedTensor", ...]
    ) -> "PackedTensor":
        """The tensor that a packing makes of parameters."""
        size = packing.num_bytes([TensorArg(source.shape, source.dtype) for source in sources])
        return cls(name, (size,), torch.uint8, packing, sources)


def packed_tensors(
    module: nn.Module, packed: PackedWeights | None = None, towers: Sequence[nn.Module] = ()
) -> list[PackedTensor]:
    """What a rank's weight files hold: every parameter, in module order, packed where asked for.

    Args:
        module: of the model.
        packed: layouts of weights.
        towers: modules of towers' steps; several may have the same parameters.
    """
    plain = {
        name: PackedTensor(name, tuple(value.shape), value.dtype)
        for each in (module, *towers)
        for name, value in each.named_parameters()
    }
    packed = packed or PackedWeights()
    merged = {name for _, storages in packed.packings.values() for name in storages[1:]}
    tensors = []
    for name, tensor in plain.items():
        if name in packed.packings:
            packing, storages = packed.packings[name]
            sources = tuple(plain[storage] for storage in storages)
            tensors.append(PackedTensor.packed(name, packing, sources))
        elif name not in merged:
            tensors.append(tensor)
    return tensors


def split_files(tensors: list[PackedTensor]) -> list[list[PackedTensor]]:
    """Cut the list into runs of at most MAX_FILE_BYTES, keeping its order."""
    files: list[list[PackedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.num_bytes > MAX_FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.num_bytes
    return files


def pack(
    tensor: PackedTensor,
    checkpoint: CheckpointSource,
    sources: Mapping[str, WeightSource],
    quantizer: Quantizer | None = None,
) -> Tensor:
    """The content of a tensor: contiguous, maybe memory of a mapped file, never to be written to.

    Args:
        tensor: to make.
        checkpoint: where it comes from.
        sources: by parameter.
        quantizer: keeps account of what it quantizes; None for nobody.

    Raises:
        CheckpointError: a source tensor is missing or unfit.
        BuildError: a source tensor has values that the layout cannot hold.
    """
    if tensor.packing is None:
        return read_weight(tensor, checkpoint, sources[tensor.name], quantizer)
    parts = [
        read_weight(part, checkpoint, sources[part.name], quantizer) for part in tensor.sources
    ]
    data = tensor.packing.pack(*parts)
    assert data.numel() == tensor.num_bytes, f"{tensor.packing.name} gave {data.numel()} bytes"
    return data


def read_weight(
    tensor: PackedTensor,
    checkpoint: CheckpointSource,
    source: WeightSource,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """One weight of one rank: contiguous, on the CPU, in its packed dtype and shape.

    BF16 is widened exactly; F32 is rounded to nearest even where the model computes in BF16, as the
    reference does when it loads.
    """
    if source.quantize is not None:
        pieces = [(quantizer or Quantizer()).piece(tensor.name, checkpoint, source)]
    elif source.dequantize is not None:
        pieces = [dequantized(checkpoint, source, tensor.dtype)]
    else:
        pieces = [checkpoint.read(part) for part in source.parts]
    if source.is_one_of_equals:
        _require_equal(checkpoint, source, pieces)
        pieces = pieces[:1]
    if source.is_quotient:
        pieces = [_quotient(checkpoint, source, *pieces)]
    value = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=source.dim)
    if source.pad:
        value = torch.cat([value, value.new_zeros(source.pad, *value.shape[1:])])
    if value.numel() != torch.Size(tensor.shape).numel():
        raise CheckpointError(
            f"{checkpoint.folder}: {source.parts[0].name} gives {list(value.shape)} for "
            f"{tensor.name}, which is {list(tensor.shape)}"
        )
    if (value.dtype == torch.uint8) != (tensor.dtype == torch.uint8):
        raise CheckpointError(
            f"{checkpoint.folder}: {source.parts[0].name} is {_name(value.dtype)}, "
            f"{_name(tensor.dtype)} expected for {tensor.name}; config.json belongs to another "
            f"release of the model"
        )
    return value.to(tensor.dtype).reshape(tensor.shape).contiguous()


def _quotient(
    checkpoint: CheckpointSource, source: WeightSource, numerator: Tensor, denominator: Tensor
) -> Tensor:
    value = numerator.float() / denominator.float()
    if not value.isfinite().all():
        names = " over ".join(part.name for part in source.parts)
        raise CheckpointError(
            f"{checkpoint.folder}: {names} is beyond what float32 can hold; download the file again"
        )
    return value


def _require_equal(
    checkpoint: CheckpointSource, source: WeightSource, pieces: list[Tensor]
) -> None:
    for part, piece in zip(source.parts, pieces, strict=True):
        if not torch.equal(piece, pieces[0]):
            names = f"{source.parts[0].name} and {part.name}"
            raise CheckpointError(
                f"{checkpoint.folder}: {names} must be equal, because the matrices that they scale "
                f"are read as one; they are {pieces[0].tolist()} and {piece.tolist()}"
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def header_of(tensors: list[PackedTensor]) -> bytes:
    """The safetensors header: 8 bytes of length, JSON, spaces to a multiple of 8."""
    entries = {}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
