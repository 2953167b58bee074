"""Cutting weights into pieces that are packed one by one, and what memory that takes.

A piece is a run of bytes of a packed tensor that depends on a run of rows, or of experts, of its
sources alone. Pieces in their order are the tensor, so it does not matter who makes which and when.
Nothing here reads data.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from inkrt.builder.checkpoint import CheckpointSource
from inkrt.builder.mapped import Span
from inkrt.builder.pack import PackedTensor
from inkrt.engines.interface import Part, WeightSource

# Packed bytes of a piece, where it can be cut so fine.
PIECE_BYTES = 16 * 2**20
# While a piece is packed: its values as read, joined and converted, then twice in the new layout,
# and blocks of intermediate values.
_COPIES, _PACKED_COPIES, _BLOCKS = 2, 3, 16 * 2**20
# While a matrix is quantized: float32 values of at most so many elements, several times.
_QUANTIZED_BLOCKS = 2**22 * 4 * 12


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of a packed tensor.

    Attributes:
        tensor: as if it were a tensor of its own.
        sources: by the names of its parameters.
        offset: of its first byte in the tensor.
    """

    tensor: PackedTensor
    sources: Mapping[str, WeightSource]
    offset: int

    @property
    def parts(self) -> tuple[Part, ...]:
        """What it is made of; where a matrix is quantized, all of it."""
        parts = []
        for source in self.sources.values():
            for part in source.all_parts:
                whole = (slice(None),) * len(part.shape)
                parts.append(part if source.quantize is None else replace(part, index=whole))
        return tuple(parts)

    @property
    def is_quantized(self) -> bool:
        """Whether the build quantizes it."""
        return any(source.quantize is not None for source in self.sources.values())

    def spans(self, checkpoint: CheckpointSource) -> list[Span]:
        """Bytes of files that are read for it; one span where parts stand in each other."""
        found: dict[tuple[int, str], Span] = {}
        for part in self.parts:
            span = checkpoint.span(part)
            key = (id(span.file), part.name)
            known = found.get(key, span)
            found[key] = Span(span.file, min(known.first, span.first), max(known.last, span.last))
        return list(found.values())

    def work_bytes(self, checkpoint: CheckpointSource) -> int:
        """Most memory that making it takes, mapped pages and the result included."""
        spans = sum(span.num_bytes for span in self.spans(checkpoint))
        values = sum(part.num_bytes for part in self.tensor.sources or (self.tensor,))
        work = spans + _COPIES * values
        if self.tensor.packing is not None:
            work += _PACKED_COPIES * self.tensor.num_bytes + _BLOCKS
        return work + (_QUANTIZED_BLOCKS if self.is_quantized else 0)


def cut(
    tensor: PackedTensor, sources: Mapping[str, WeightSource], most_bytes: int | None = None
) -> list[Piece]:
    """The pieces of a packed tensor, in order.

    Args:
        tensor: to cut.
        sources: of its parameters at least.
        most_bytes: of a piece, where that is more than one row or, of stacked matrices, one matrix;
            None for PIECE_BYTES.
    """
    most_bytes = PIECE_BYTES if most_bytes is None else most_bytes
    parameters = tensor.sources or (tensor,)
    own = {parameter.name: sources[parameter.name] for parameter in parameters}
    whole = [Piece(tensor, own, 0)]
    unit = _unit(tensor)
    rows = parameters[0].shape[0] if parameters[0].shape else 1
    if unit == 0 or tensor.num_bytes <= most_bytes or not all(map(_can_be_cut, own.values())):
        return whole
    if any(parameter.shape[0] != rows for parameter in parameters):
        return whole
    if any(_num_rows(own[p.name]) % rows for p in parameters):
        return whole
    step = max(most_bytes * rows // tensor.num_bytes // unit, 1) * unit
    pieces, offset = [], 0
    for first in range(0, rows, step):
        last = min(first + step, rows)
        parts = tuple(replace(p, shape=(last - first, *p.shape[1:])) for p in parameters)
        piece = parts[0]
        if tensor.packing is not None:
            piece = PackedTensor.packed(tensor.name, tensor.packing, parts)
        some = {
            p.name: _rows(own[p.name], first, last, _num_rows(own[p.name]) // rows)
            for p in parameters
        }
        pieces.append(Piece(piece, some, offset))
        offset += piece.num_bytes
    assert offset == tensor.num_bytes, f"pieces of {tensor.name} have {offset} bytes"
    return pieces


def _unit(tensor: PackedTensor) -> int:
    """Rows of which a piece must have a multiple; 0 if there can be but one."""
    if not (tensor.sources or (tensor,))[0].shape:
        return 0
    if tensor.packing is None:
        return 1
    is_stack = all(len(source.shape) > 2 for source in tensor.sources)
    return 1 if is_stack and tensor.packing.cuts_stacks else tensor.packing.row_unit


def _can_be_cut(source: WeightSource) -> bool:
    if source != WeightSource(source.parts, source.dim, source.pad):
        return False  # it is more than parts behind each other
    if any(part.or_scalar for part in source.parts):
        return False
    return source.dim == 0 or len(source.parts) == 1 or not source.pad


def _lengths(source: WeightSource) -> list[int]:
    """Rows of every part."""
    return [len(range(part.shape[0])[part.index[0]]) for part in source.parts]


def _joins_rows(source: WeightSource) -> bool:
    """Whether parts stand one below the other, and not beside each other within every row."""
    return source.dim == 0 or len(source.parts) == 1


def _num_rows(source: WeightSource) -> int:
    """Rows of the value, padding included."""
    lengths = _lengths(source)
    return sum(lengths) + source.pad if _joins_rows(source) else lengths[0]


def _rows(source: WeightSource, first: int, last: int, rows_per_unit: int) -> WeightSource:
    """The source of units `first` to before `last` of a value."""
    first, last = first * rows_per_unit, last * rows_per_unit
    if not _joins_rows(source):
        return replace(source, parts=tuple(_some(part, first, last) for part in source.parts))
    parts, start = [], 0
    for part, length in zip(source.parts, _lengths(source), strict=True):
        if start < last and first < start + length:
            parts.append(_some(part, max(first - start, 0), min(last - start, length)))
        start += length
    missing = last - max(first, start) if last > start else 0
    # Rows of padding alone have the dtype of an empty piece.
    return replace(source, parts=tuple(parts) or (_some(source.parts[0], 0, 0),), pad=missing)


def _some(part: Part, first: int, last: int) -> Part:
    """Rows `first` to before `last` of a part."""
    places = range(part.shape[0])[part.index[0]][first:last]
    return replace(part, index=(slice(places.start, places.stop, places.step), *part.index[1:]))
