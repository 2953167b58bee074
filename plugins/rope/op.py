"""rope: rotates pairs of channels by angles that grow with the position (NeoX halves).

    angle[p, i] = fp32(p) * theta^(-2i / d)                        i < d / 2, all in float32
    out[t, h, i]         = x[i] cos(angle) - x[i + d/2] sin(angle)
    out[t, h, i + d/2]   = x[i + d/2] cos(angle) + x[i] sin(angle)

Angles, cosines and sines are float32 and x is widened; one rounding at the end. The angle is the
float32 product: at large positions its rounding is part of the model.
Source: flint.md section 5, sliding layers. transformers rounds cosine and sine to the model dtype.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal
from inkrt.plugins.narrow import elementwise
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes
from inkrt.plugins.state import step_positions


def fake(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Shape and dtype of x."""
    axes = Axes("rope")
    axes.fit("x", x, "T", "H", "d", dtype=MODEL_DTYPES)
    axes.fit("position", position, 1, dtype=torch.int32)
    axes.require(axes["d"] % 2 == 0, f"x has heads of {axes['d']} channels, expected even")
    axes.require(theta > 0, f"theta is {theta}, expected > 0")
    return x.new_empty(x.shape)


def _case(
    name: str, num_rows: int, position: int, head_dim: int = 14, theta: float = 10000.0
) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {
            "x": normal(generator, dtype, num_rows, 3, head_dim),
            "position": int32(position),
            "theta": theta,
        }

    return Case(name, arguments)


def cases() -> list[Case]:
    """Position 0 (no rotation), verify and prefill widths, far positions, another base."""
    return [
        _case("first token", 1, 0),
        _case("verify", 5, 17),
        _case("prefill", 11, 3, head_dim=6),
        _case("far", 2, 262_100, head_dim=128),
        _case("other base", 3, 1000, theta=500.0),
        _case("heads of 64", 7, 2041, head_dim=64),
    ]


@operator("rope", fake=fake, cases=cases)
def rope(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Rotate all heads of the rows of a step.

    Args:
        x: float32 or bfloat16 [T, H, d], d even.
        position: int32 [1], of row 0.
        theta: base of the frequencies.

    Returns:
        [T, H, d] in x's dtype.
    """
    head_dim = x.shape[-1]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=x.device) / head_dim
    frequencies = 1.0 / theta**exponents
    angles = step_positions(position, len(x)).float()[:, None, None] * frequencies
    cos, sin = elementwise(torch.cos, angles), elementwise(torch.sin, angles)
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)
