"""all_gather: concatenation over the ranks of an engine.

    out = [x_0 | x_1 | ...]        last dimension, in rank order

x [T, N], the slice of one rank; out [T, tp_size * N] with the bits of the parts. Source:
inkling2.md section 11.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.registry import Arguments, Case, Collective, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def _payload(*, x: Tensor, **_other: object) -> Tensor:
    return x


def _combine(payloads: Sequence[Tensor], *, tp_size: int, **_other: object) -> Tensor:
    assert len(payloads) == tp_size, f"{len(payloads)} payloads for {tp_size} ranks"
    return torch.cat(list(payloads), dim=-1)


def fake(x: Tensor, tp_size: int) -> Tensor:
    """[T, tp_size * N] in x's dtype."""
    axes = Axes("all_gather")
    axes.fit("x", x, "T", "N", dtype=MODEL_DTYPES)
    axes.require(tp_size >= 1, f"tp_size is {tp_size}, expected >= 1")
    return x.new_empty((axes["T"], tp_size * axes["N"]))


def cases() -> list[Case]:
    """A single rank: a copy. Several ranks are in test_fused_equal_unfused."""

    def make(num_rows: int, width: int) -> Case:
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            return {"x": normal(generator, dtype, num_rows, width), "tp_size": 1}

        exact = {torch.float32: 0.0, torch.bfloat16: 0.0}
        return Case(f"T{num_rows}_N{width}", arguments, exact)

    return [make(1, 1), make(5, 33), make(11, 64)]


@operator(
    "all_gather",
    fake=fake,
    cases=cases,
    collective=Collective(payload=_payload, combine=_combine),
)
def all_gather(x: Tensor, tp_size: int) -> Tensor:
    """Join the slices of all ranks.

    Args:
        x: [T, N], this rank's slice.
        tp_size: number of ranks.

    Returns:
        [T, tp_size * N] of x's dtype, equal on all ranks.
    """
    return _combine([x], tp_size=tp_size)
