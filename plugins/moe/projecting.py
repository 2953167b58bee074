"""Input projections of what follows in the launch of the experts, see projections.cuh."""

from dataclasses import dataclass

from inkrt.errors import BuildError
from inkrt.plugins.moe.sizes import WARPS
from inkrt.plugins.tactic import (
    CallArgs,
    Output,
    Param,
    Pointer,
    Scratch,
    number_list_arg,
    tensor_arg,
    tensor_list_arg,
)
from inkrt.plugins.w4a16.packing import padded_width
from inkrt.plugins.w4a16.ring_tactics import split_of

_MOST_MATRICES = 8
VECTOR_BYTES = 2048  # of 16 rows x 64 k
# On their way of a block before inputs are there, see `ring_tactics`.
_PACE_BYTES = 32_768


@dataclass(frozen=True, slots=True)
class Projecting:
    """Matrices [rows, width] that multiply queries of a mix.

    Attributes:
        num_tokens: T.
        width: K.
        rows: of each matrix; those of one query stand side by side.
        query_of: of each.
        places: of each, which of the operator's weights it is.
        num_queries: of the mix.
    """

    num_tokens: int
    width: int
    rows: tuple[int, ...]
    query_of: tuple[int, ...]
    places: tuple[int, ...]
    num_queries: int

    @property
    def most_vectors(self) -> int:
        """That a warp has."""
        warps, share = split_of(self.width)
        return share * (-(-self.tiles // (WARPS // warps)))

    @property
    def first_rows(self) -> tuple[int, ...]:
        """Of each matrix, among those of all in the operator's order."""
        by_place = dict(zip(self.places, self.rows, strict=True))
        return tuple(sum(by_place[i] for i in range(place)) for place in self.places)

    @property
    def tiles(self) -> int:
        """Row tiles of all matrices."""
        return sum(-(-rows // 16) for rows in self.rows)

    @property
    def input_bytes(self) -> int:
        """Inputs of one query in padded rows, in shared memory."""
        return self.num_tokens * (padded_width(self.width) + 8) * 2

    @staticmethod
    def barrier_bytes(slots: int) -> int:
        """`ProjectionMemory`."""
        return 8 * (WARPS * slots + 1)

    def defines(self, slots: int) -> tuple[tuple[str, int | float | str], ...]:
        """Macros of projections.cuh."""
        warps, _ = split_of(self.width)
        return (
            ("PROJECTS", 1), ("MATRICES", len(self.rows)), ("ROWS", _listed(self.rows)),
            ("INPUT_OF", _listed(self.query_of)), ("FIRST_ROWS", _listed(self.first_rows)),
            ("DIM_K", self.width), ("NUM_WARPS", warps),
            ("MIXED_QUERIES", self.num_queries), ("RING_SLOTS", slots),
            ("PACE", _PACE_BYTES // VECTOR_BYTES),
        )  # fmt: skip

    def params(self) -> tuple[Param, ...]:
        """Of the experts' kernel, behind its own."""
        count = len(self.rows)
        places = [self.places[min(i, count - 1)] for i in range(_MOST_MATRICES)]
        weights = (Pointer("weights", place) for place in places)
        return (*weights, Output(2), self.mixed, self.soon)

    @property
    def mixed(self) -> Scratch:
        """The mix's results as words, two slots."""
        num_bytes = 2 * self.num_queries * self.num_tokens * self.width * 2
        return Scratch("mixed", num_bytes, fill=0xFF)

    @property
    def soon(self) -> Scratch:
        """Number of the launch whose words are about to come."""
        return Scratch("soon", 8, fill=0)


def projecting(args: CallArgs) -> Projecting | None:
    """Of a call of `moe_conv_mix`; None if it has no weights.

    Raises:
        BuildError: a width that the kernels do not take.
    """
    weights = tensor_list_arg(args, "weights")
    if not weights:
        return None
    num_tokens, width = tensor_arg(args, "x").shape
    warps, _ = split_of(width)
    if warps > WARPS:
        raise BuildError(f"moe_conv_mix: width {width} is split over {warps} of {WARPS} warps")
    query_of = [int(query) for query in number_list_arg(args, "query_of")]
    order = sorted(range(len(weights)), key=lambda place: query_of[place])
    return Projecting(
        num_tokens,
        width,
        tuple(weights[place].shape[0] for place in order),
        tuple(query_of[place] for place in order),
        tuple(order),
        tensor_arg(args, "queries").shape[0],
    )


def _listed(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))
