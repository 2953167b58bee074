"""sigmoid_gate: scales the attention output by a gate computed from the attention's input.

    out = x * sigmoid(gate)

Float32 inside, one rounding to the dtype of x.
Source: Inkling-2 `Inkling2GatedOutputProjection` of transformers; its two projections are `linear`.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.narrow import elementwise
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(x: Tensor, gate: Tensor) -> Tensor:
    """Shape and dtype of x."""
    axes = Axes("sigmoid_gate")
    axes.fit("x", x, "T", "N", dtype=MODEL_DTYPES)
    axes.fit("gate", gate, "T", "N", dtype=MODEL_DTYPES)
    return x.new_empty(x.shape)


def _case(name: str, num_tokens: int, width: int, gate_scale: float = 1.0) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {
            "x": normal(generator, dtype, num_tokens, width),
            "gate": normal(generator, dtype, num_tokens, width, scale=gate_scale),
        }

    return Case(name, arguments)


def cases() -> list[Case]:
    """Decode, verify and prefill widths, and gates that are open or shut."""
    return [
        _case("decode", 1, 55),
        _case("verify", 5, 33),
        _case("prefill", 11, 7),
        _case("saturated gates", 3, 17, gate_scale=100.0),
        _case("saturated gates of fours", 5, 132, gate_scale=100.0),
    ]


@operator("sigmoid_gate", fake=fake, cases=cases)
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply by the sigmoid of the gate.

    Args:
        x: float32 or bfloat16 [T, N].
        gate: float32 or bfloat16 [T, N], before the sigmoid.

    Returns:
        Shape and dtype of x.
    """
    return (x.float() * elementwise(torch.sigmoid, gate.float())).to(x.dtype)
