"""Where the weights of Inkling models stand in a checkpoint: what all of them have in common.

Two spellings are read: the publisher's (`model.llm.*`) and the one that transformers gives the same
tensors in memory (`model.language_model.*`, or `model.*` for a text-only class). They differ in
names, in the order of gate and up rows (interleaved there, stacked or apart here) and may differ in
the rows of the vocabulary projection (padded there, cropped here).
"""

from dataclasses import dataclass

from inkrt.engines.interface import Part, Sharding, WeightSource, vocabulary_share
from inkrt.errors import CheckpointError

PUBLISHER_ROOT = "model.llm."


@dataclass(frozen=True, slots=True)
class Spelling:
    """Names of one of the two spellings."""

    root: str
    is_publisher: bool

    def pick(self, publisher: str, transformers: str) -> str:
        """The name behind the root."""
        return self.root + (publisher if self.is_publisher else transformers)

    def in_layer(self, layer: int, pair: tuple[str, str]) -> str:
        """Of (publisher's, transformers') name in a layer."""
        return self.pick(*(f"layers.{layer}.{name}" for name in pair))

    @property
    def lm_head(self) -> str:
        """The vocabulary projection."""
        return f"{self.root}unembed.weight" if self.is_publisher else "lm_head.weight"


def find_spelling(names: frozenset[str], family: str) -> Spelling:
    """The spelling of a checkpoint with these tensors.

    Args:
        names: of its tensors.
        family: of the model, for messages.

    Raises:
        CheckpointError: the names follow neither spelling.
    """
    if any(name.startswith(PUBLISHER_ROOT) for name in names):
        return Spelling(PUBLISHER_ROOT, is_publisher=True)
    for root in ("model.language_model.", "model."):
        if any(name.startswith(f"{root}layers.") for name in names):
            return Spelling(root, is_publisher=False)
    raise CheckpointError(
        f"the checkpoint has no {family} text model: neither model.llm.* nor "
        "model.language_model.* nor model.layers.* tensors"
    )


class RankMap:
    """Makes the sources of one rank."""

    def __init__(self, rank: int, sharding: Sharding) -> None:
        self.rank = rank
        self.tp_size = sharding.tp_size
        self.is_split_by_expert = sharding.moe_split == "experts"

    def whole(self, name: str, shape: tuple[int, ...]) -> WeightSource:
        """All of a tensor."""
        return WeightSource((Part(name, shape, (slice(None),) * len(shape)),))

    def shard(self, name: str, shape: tuple[int, ...], dim: int) -> WeightSource:
        """This rank's slice of a tensor along `dim`."""
        index = [slice(None)] * len(shape)
        index[dim] = self.share(shape[dim])
        return WeightSource((Part(name, shape, tuple(index)),))

    def share(self, size: int) -> slice:
        """This rank's indices of a dimension that ranks share."""
        share = size // self.tp_size
        return slice(self.rank * share, (self.rank + 1) * share)

    def conv(self, name: str, channels: int, taps: int, *, is_shared: bool) -> WeightSource:
        """[channels, 1, W] in the checkpoint, [channels, W] here."""
        own = self.share(channels) if is_shared else slice(None)
        return WeightSource((Part(name, (channels, 1, taps), (own, slice(None), slice(None))),))

    def vocabulary(self, name: str, stored: int, used: int, width: int) -> WeightSource:
        """This rank's rows of the projection to the vocabulary.

        Args:
            name: of the tensor.
            stored: rows of it.
            used: tokens that can be sampled; ranks share them unevenly, with rows of padding.
            width: columns.
        """
        share = vocabulary_share(used, self.tp_size)
        first = min(self.rank * share, used)
        last = min(first + share, used)
        part = Part(name, (stored, width), (slice(first, last), slice(None)))
        return WeightSource((part,), pad=share - (last - first))

    def gate_up(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        is_interleaved: bool,
        experts: slice = slice(None),
        rows: slice = slice(None),
    ) -> WeightSource:
        """Gate rows, then up rows, from one tensor that has both.

        Args:
            name: of the tensor.
            shape: [2 F, D], or [L, 2 F, D] for experts.
            is_interleaved: whether its rows are g0, u0, g1, u1, ...; else g0, g1, ..., u0, u1, ...
            experts: which of the L.
            rows: which of the F.
        """
        dim, width = len(shape) - 2, shape[-2] // 2
        first, last = rows.start or 0, width if rows.stop is None else rows.stop
        halves = (slice(first, last), slice(width + first, width + last))
        if is_interleaved:
            halves = (slice(2 * first, 2 * last, 2), slice(2 * first + 1, 2 * last, 2))
        parts = (Part(name, shape, (experts, half, slice(None))[-len(shape) :]) for half in halves)
        return WeightSource(tuple(parts), dim=dim)

    def expert_gate_up(
        self, name: str, shape: tuple[int, int, int], *, is_interleaved: bool
    ) -> WeightSource:
        """This rank's gate and up rows of routed experts, [L, 2 F, D]."""
        own = {"rows": self.share(shape[1] // 2)}
        if self.is_split_by_expert:
            own = {"experts": self.share(shape[0])}
        return self.gate_up(name, shape, is_interleaved=is_interleaved, **own)

    def expert_down(self, name: str, shape: tuple[int, int, int]) -> WeightSource:
        """This rank's share of their down projections, [L, D, F]."""
        return self.shard(name, shape, 0 if self.is_split_by_expert else 2)
