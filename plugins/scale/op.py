"""scale: multiplies by a learned number and divides by a fixed one.

    out = x * factor / divisor        in float32, one rounding to the dtype of x

Source: Inkling's dense MLP (`global_scale`) and the width multiplier of its final rows,
`InklingMLP` and `InklingForCausalLM` of transformers.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(x: Tensor, factor: Tensor | None, divisor: float) -> Tensor:
    """Shape and dtype of x."""
    axes = Axes("scale")
    axes.fit("x", x, "T", "D", dtype=MODEL_DTYPES)
    if factor is not None:
        axes.fit("factor", factor, 1, dtype=x.dtype)
    axes.require(divisor > 0, f"divisor is {divisor}, expected > 0")
    return x.new_empty(x.shape)


def _case(name: str, num_rows: int, width: int, *, has_factor: bool, divisor: float) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {
            "x": normal(generator, dtype, num_rows, width),
            "factor": normal(generator, dtype, 1) if has_factor else None,
            "divisor": divisor,
        }

    return Case(name, arguments)


def cases() -> list[Case]:
    """A learned factor, a divisor that is no power of two, both."""
    return [
        _case("factor", 5, 33, has_factor=True, divisor=1.0),
        _case("divisor", 1, 57, has_factor=False, divisor=24.0),
        _case("both", 11, 7, has_factor=True, divisor=3.0),
    ]


@operator("scale", fake=fake, cases=cases)
def scale(x: Tensor, factor: Tensor | None, divisor: float) -> Tensor:
    """Scale every element alike.

    Args:
        x: float32 or bfloat16 [T, D].
        factor: [1] in x's dtype, or None for 1.
        divisor: above 0.

    Returns:
        [T, D] in x's dtype.
    """
    out = x.float()
    if factor is not None:
        out = out * factor.float()
    return (out / divisor).to(x.dtype)
