"""concat: tensors behind each other.

    out = [part_0 | part_1 | ...]        along dimension `dim`

The parts' bits, no arithmetic. A drafter needs it three times: for the features of a token, which
are outputs of several layers; for the rows of a block, of which all but the first have one
embedding; and for the two halves of an activation whose matrices are stored apart.
Source: DFlash and DSpark, dspark.md sections 2.1 and 2.2.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from inkrt.plugins.caseutil import integers, normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes

_DTYPES = (*MODEL_DTYPES, torch.int32)


def fake(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The parts' shape but for the sum of their sizes in `dim`."""
    axes = Axes("concat")
    axes.require(len(parts) > 0, "there are no parts, expected at least one")
    axes.require(dim in (0, 1), f"dim is {dim}, expected 0 or 1")
    for i, part in enumerate(parts):
        sizes = ["T", "D"]
        sizes[dim] = f"N{i}"
        axes.fit(f"parts[{i}]", part, *sizes, dtype=_DTYPES if i == 0 else parts[0].dtype)
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].new_empty(shape)


def cases() -> list[Case]:
    """Both dimensions, one part, parts of different sizes, a part that repeats one row."""

    def make(name: str, dim: int, *shapes: tuple[int, int]) -> Case:
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            return {"parts": [normal(generator, dtype, *shape) for shape in shapes], "dim": dim}

        return Case(name, arguments, {torch.float32: 0.0, torch.bfloat16: 0.0})

    def repeated(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        row = normal(generator, dtype, 1, 9)
        return {"parts": [normal(generator, dtype, 1, 9), row.expand(6, 9)], "dim": 0}

    def repeated_fours(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        row = normal(generator, dtype, 1, 264)
        return {"parts": [normal(generator, dtype, 1, 264), row.expand(6, 264)], "dim": 0}

    def tokens(_dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {"parts": [integers(generator, 512, 1, 1) for _ in range(5)], "dim": 0}

    exact = {torch.float32: 0.0, torch.bfloat16: 0.0}
    return [
        make("features", 1, (5, 33), (5, 33), (5, 33)),
        make("uneven columns", 1, (11, 7), (11, 1), (11, 20)),
        make("rows", 0, (1, 13), (6, 13)),
        make("one part", 1, (3, 5)),
        make("features of eights", 1, (5, 256), (5, 8), (5, 64)),
        make("rows of fours", 0, (1, 132), (6, 132)),
        Case("anchor and masks", repeated, exact),
        Case("anchor and masks of fours", repeated_fours, exact),
        Case("tokens", tokens, exact),
    ]


@operator("concat", fake=fake, cases=cases)
def concat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Put tensors behind each other.

    Args:
        parts: float32, bfloat16 or int32, each [T, N_i] (dim 1) or [N_i, D] (dim 0).
        dim: 0 or 1.

    Returns:
        [T, sum N_i] or [sum N_i, D] in the parts' dtype.
    """
    return torch.cat(list(parts), dim)
