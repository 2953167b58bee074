"""linear_group: several products with stored weights at once, of inputs of one shape.

    outs[i] = linear(xs[input_of[i]], weights[i])

It has the bits of `linear`, one after the other. Source: the input projections of an attention
layer, whose matrices a GPU streams in one launch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.linear.op import linear
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes

# A kernel takes an address for each.
MAX_INPUTS, MAX_WEIGHTS = 4, 8


def fake(xs: Sequence[Tensor], weights: Sequence[Tensor], input_of: Sequence[int]) -> list[Tensor]:
    """Shapes [T, N_i] in the inputs' dtype."""
    axes = Axes("linear_group")
    axes.require(1 <= len(xs) <= MAX_INPUTS, f"{len(xs)} inputs, expected 1 to {MAX_INPUTS}")
    axes.require(
        1 <= len(weights) <= MAX_WEIGHTS, f"{len(weights)} weights, expected 1 to {MAX_WEIGHTS}"
    )
    axes.require(
        len(input_of) == len(weights) and all(0 <= index < len(xs) for index in input_of),
        f"input_of is {list(input_of)}, expected an index below {len(xs)} for each of "
        f"{len(weights)} weights",
    )
    for number, x in enumerate(xs):
        dtype = MODEL_DTYPES if number == 0 else xs[0].dtype
        axes.fit(f"xs[{number}]", x, "T", "K", dtype=dtype)
    for number, weight in enumerate(weights):
        axes.fit(f"weights[{number}]", weight, f"N{number}", "K", dtype=xs[0].dtype)
    return [xs[0].new_empty(xs[0].shape[0], weight.shape[0]) for weight in weights]


def _case(
    name: str, num_tokens: int, width: int, rows: Sequence[int], input_of: Sequence[int]
) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {
            "xs": [normal(generator, dtype, num_tokens, width) for _ in range(max(input_of) + 1)],
            "weights": [
                normal(generator, dtype, num_rows, width, scale=width**-0.5) for num_rows in rows
            ],
            "input_of": list(input_of),
        }

    return Case(name, arguments)


def cases() -> list[Case]:
    """Odd sizes, widths that are no whole chunks of a GPU's layout, inputs out of order."""
    return [
        _case("decode", 1, 57, (33, 5, 1), (0, 0, 0)),
        _case("verify", 5, 31, (7, 19, 3), (1, 0, 1)),
        _case("prefill", 11, 56, (72, 4), (0, 1)),
        _case("one", 3, 48, (20,), (0,)),
        _case("padded width, narrow", 3, 64, (4, 40, 17), (0, 1, 0)),
        _case("padded width, wide", 13, 200, (6, 24, 130), (1, 0, 1)),
        _case("three inputs", 8, 256, (128, 32, 4, 64, 8, 64, 8), (0, 0, 0, 1, 1, 2, 2)),
        _case("three inputs of one token", 1, 512, (50, 16, 33, 90, 1), (2, 0, 1, 0, 2)),
        _case("model width", 2, 4608, (48, 6, 16), (0, 0, 0)),
        _case("model width, wide", 9, 4608, (8, 12), (0, 0)),
        _case("more tiles than blocks", 4, 128, (1600, 4, 1111), (0, 1, 1)),
    ]


@operator("linear_group", fake=fake, cases=cases)
def linear_group(
    xs: Sequence[Tensor], weights: Sequence[Tensor], input_of: Sequence[int]
) -> list[Tensor]:
    """Multiply rows by several transposed weights.

    Args:
        xs: float32 or bfloat16 [T, K] each.
        weights: [N_i, K] each, dtype of xs.
        input_of: for each weight the index of its input.

    Returns:
        For each weight [T, N_i] in the inputs' dtype.
    """
    return [
        linear(xs[index], weight, False) for index, weight in zip(input_of, weights, strict=True)
    ]
