"""softcap: softcap of logits, in float32.

    out = cap * tanh(fp32(x) / cap)

x [R, V] float32 or bfloat16; cap > 0 in logits; out float32 [R, V]. It bounds |out| by cap and
leaves small logits as they are. Source: inkling2.md section 5.7 (final_logit_softcapping = 30).
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.narrow import elementwise
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(x: Tensor, cap: float) -> Tensor:
    """Shape of x, float32."""
    axes = Axes("softcap")
    axes.fit("x", x, "R", "V", dtype=MODEL_DTYPES)
    axes.require(cap > 0, f"cap is {cap}, expected > 0")
    return x.new_empty(x.shape, dtype=torch.float32)


def cases() -> list[Case]:
    """Odd widths, and logits that are tiny beside the cap or far beyond it."""

    def plain(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {"x": normal(generator, dtype, 3, 131, scale=20.0), "cap": 30.0}

    def saturated(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        x = normal(generator, dtype, 1, 67)
        x[0, :4] = torch.tensor([1e4, -1e4, 0.0, 1e-5])
        return {"x": x, "cap": 4.0}

    def wide_step(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {"x": normal(generator, dtype, 11, 33, scale=100.0), "cap": 25.0}

    # The output is float32 whatever the input, so bfloat16 has no looser bound.
    rtol = {torch.float32: 1e-6, torch.bfloat16: 1e-6}
    return [
        Case("R3_V131", plain, rtol),
        Case("beyond_cap", saturated, rtol),
        Case("R11", wide_step, rtol),
    ]


@operator("softcap", fake=fake, cases=cases)
def softcap(x: Tensor, cap: float) -> Tensor:
    """Bound logits smoothly.

    Args:
        x: [R, V] float32 or bfloat16.
        cap: bound of |out|.

    Returns:
        float32 [R, V].
    """
    return elementwise(torch.tanh, x.float() / cap) * cap
