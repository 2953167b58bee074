"""silu_mul: the gated activation of a dense or shared expert.

    out = dtype( g / (1 + exp(-g)) * u )        [g | u] = gate_up, float32 inside, one rounding

Exponential and division are exact to float32. (The routed experts' activation reads unrounded sums
and is part of `swiglu_experts`.) Source: flint.md section 5, dense and shared experts.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.narrow import elementwise
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(gate_up: Tensor) -> Tensor:
    """[T, F] in gate_up's dtype."""
    axes = Axes("silu_mul")
    axes.fit("gate_up", gate_up, "T", "2F", dtype=MODEL_DTYPES)
    axes.require(
        axes["2F"] % 2 == 0, f"gate_up has {axes['2F']} columns, expected as many gates as ups"
    )
    return gate_up.new_empty(axes["T"], axes["2F"] // 2)


def cases() -> list[Case]:
    """Odd sizes, gates far beyond the sigmoid's range, and zeros."""

    def make(name: str, num_rows: int, width: int, scale: float) -> Case:
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            return {"gate_up": normal(generator, dtype, num_rows, 2 * width, scale=scale)}

        return Case(name, arguments)

    return [
        make("decode", 1, 33, 1.0),
        make("prefill", 11, 20, 2.0),
        make("saturated", 3, 17, 100.0),
        make("saturated of fours", 5, 132, 100.0),
        make("zeros", 2, 5, 0.0),
    ]


@operator("silu_mul", fake=fake, cases=cases)
def silu_mul(gate_up: Tensor) -> Tensor:
    """Gate the second half of every row by the first.

    Args:
        gate_up: float32 or bfloat16 [T, 2 * F], the gates first.

    Returns:
        [T, F] in gate_up's dtype.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + elementwise(torch.exp, -gate)) * up).to(gate_up.dtype)
