"""gelu: the exact Gaussian error linear unit.

    out = x * (1 + erf(x / sqrt(2))) / 2

Float32 inside, one rounding. Source: `hidden_act` "gelu" of the vision towers of Inkling-2 and
Inkling, which is not the approximation by tanh.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(x: Tensor) -> Tensor:
    """Shape and dtype of x."""
    axes = Axes("gelu")
    axes.fit("x", x, "T", "D", dtype=MODEL_DTYPES)
    return x.new_empty(x.shape)


def cases() -> list[Case]:
    """Odd sizes, values far from zero on both sides, and zeros."""

    def make(name: str, num_rows: int, width: int, scale: float) -> Case:
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            return {"x": normal(generator, dtype, num_rows, width, scale=scale)}

        return Case(name, arguments)

    return [
        make("one row", 1, 33, 1.0),
        make("many rows", 131, 20, 2.0),
        make("far from zero", 3, 132, 50.0),
        make("near zero", 2, 57, 1e-3),
        make("zeros", 2, 5, 0.0),
    ]


@operator("gelu", fake=fake, cases=cases)
def gelu(x: Tensor) -> Tensor:
    """Apply the unit to every element.

    Args:
        x: float32 or bfloat16 [T, D].

    Returns:
        [T, D] in x's dtype.
    """
    return F.gelu(x)
