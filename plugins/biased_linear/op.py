"""biased_linear: a matrix product with a stored weight, plus a stored bias.

    out = x @ weight^T + bias

One rounding to the model dtype after float32 accumulation. Source: Inkling-2's vision tower, all
projections of its layers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Shape [T, N] in x's dtype."""
    axes = Axes("biased_linear")
    axes.fit("x", x, "T", "K", dtype=MODEL_DTYPES)
    axes.fit("weight", weight, "N", "K", dtype=x.dtype)
    axes.fit("bias", bias, "N", dtype=x.dtype)
    return x.new_empty(x.shape[0], weight.shape[0])


def cases() -> list[Case]:
    """Odd sizes, one output, a bias that dominates."""

    def make(
        name: str, num_rows: int, width: int, num_outputs: int, *, bias_scale: float = 1.0
    ) -> Case:
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            return {
                "x": normal(generator, dtype, num_rows, width),
                "weight": normal(generator, dtype, num_outputs, width, scale=width**-0.5),
                "bias": normal(generator, dtype, num_outputs, scale=bias_scale),
            }

        return Case(name, arguments)

    return [
        make("one row", 1, 55, 33),
        make("an image", 131, 24, 40),
        make("one output", 3, 7, 1),
        make("bias dominates", 5, 57, 19, bias_scale=100.0),
        make("full width", 3, 1024, 37),
    ]


@operator("biased_linear", fake=fake, cases=cases)
def biased_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Multiply rows by the transposed weight and add the bias.

    Args:
        x: float32 or bfloat16 [T, K].
        weight: [N, K], dtype of x.
        bias: [N], dtype of x.

    Returns:
        [T, N] in x's dtype.
    """
    return F.linear(x, weight, bias)
