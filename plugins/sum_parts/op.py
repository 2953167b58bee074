"""sum_parts: products of parts of rows, added up and rounded once.

    out = dtype( ((part_0 + part_1) + part_2) + ... )        float32, in order

Rows that are too wide for one product are multiplied part by part, as the features of a drafter's
context, which are outputs of several layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from inkrt.plugins.all_reduce.op import sum_in_rank_order
from inkrt.plugins.caseutil import normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Shape of a part in `dtype`."""
    axes = Axes("sum_parts")
    axes.require(len(parts) > 0, "there are no parts, expected at least one")
    for i, part in enumerate(parts):
        axes.fit(f"parts[{i}]", part, "T", "N", dtype=torch.float32)
    axes.require(dtype in MODEL_DTYPES, f"dtype is {dtype}, expected float32 or bfloat16")
    return parts[0].new_empty(parts[0].shape, dtype=dtype)


def cases() -> list[Case]:
    """One to eight parts, widths that are multiples of four or not."""

    def make(num_parts: int, num_rows: int, width: int) -> Case:
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            parts = [
                normal(generator, torch.float32, num_rows, width, scale=2.0)
                for _ in range(num_parts)
            ]
            return {"parts": parts, "dtype": dtype}

        return Case(f"{num_parts} parts, T{num_rows}_N{width}", arguments)

    return [make(1, 3, 5), make(3, 11, 33), make(2, 1, 4), make(5, 8, 132), make(8, 9, 36)]


@operator("sum_parts", fake=fake, cases=cases)
def sum_parts(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Add tensors.

    Args:
        parts: float32 [T, N] each, at least one.
        dtype: of the result, float32 or bfloat16.

    Returns:
        `dtype` [T, N]; never a view of a part.
    """
    return sum_in_rank_order(parts, dtype)
