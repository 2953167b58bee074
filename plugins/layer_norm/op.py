"""layer_norm: normalization of the last dimension to mean 0 and variance 1, scaled and shifted.

    out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias      var over D, not D - 1

Float32 inside, one rounding. Source: Inkling-2's vision tower (`nn.LayerNorm` in transformers).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Shape and dtype of x."""
    axes = Axes("layer_norm")
    axes.fit("x", x, "T", "D", dtype=MODEL_DTYPES)
    axes.fit("weight", weight, "D", dtype=x.dtype)
    axes.fit("bias", bias, "D", dtype=x.dtype)
    axes.require(eps > 0, f"eps is {eps}, expected > 0")
    return x.new_empty(x.shape)


def cases() -> list[Case]:
    """Odd sizes, an eps that matters, a mean far from zero, rows of one value."""

    def make(
        name: str, num_rows: int, width: int, *, eps: float = 1e-5, shift: float = 0.0,
        scale: float = 1.0, rtol: float = 1e-6,
    ) -> Case:  # fmt: skip
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            return {
                "x": (normal(generator, torch.float32, num_rows, width, scale=scale) + shift).to(
                    dtype
                ),
                "weight": normal(generator, dtype, width),
                "bias": normal(generator, dtype, width),
                "eps": eps,
            }

        return Case(name, arguments, {torch.float32: rtol, torch.bfloat16: 4e-3})

    return [
        make("one row", 1, 55),
        make("many rows", 131, 24),
        make("eps dominates", 2, 9, eps=0.5, scale=0.1),
        # Subtracting a mean of 20 deviations costs as many roundings.
        make("mean far from zero", 5, 132, shift=20.0, rtol=2e-5),
        make("equal values", 3, 17, shift=1.5, scale=0.0),
        make("full width", 3, 1024),
    ]


@operator("layer_norm", fake=fake, cases=cases)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalize rows.

    Args:
        x: float32 or bfloat16 [T, D].
        weight: [D], dtype of x.
        bias: [D], dtype of x.
        eps: added to the variance.

    Returns:
        [T, D] in x's dtype.
    """
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
