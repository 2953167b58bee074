"""axial_rope: rotates adjacent channels by angles that grow with a row and a column.

    angle[t, i]         = fp32(column[t]) * theta^(-2i / (d/2))          i < d / 4
    angle[t, d/4 + i]   = fp32(row[t])    * theta^(-2i / (d/2))
    out[t, h, 2j]       = x[2j] cos(angle[j]) - x[2j+1] sin(angle[j])     j < d / 2
    out[t, h, 2j+1]     = x[2j+1] cos(angle[j]) + x[2j] sin(angle[j])

Angles, cosines and sines are float32 and x is widened; one rounding at the end.
Source: Inkling-2's vision tower, `apply_rotary_pos_emb_vision` of transformers.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import integers, normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Shape and dtype of x."""
    axes = Axes("axial_rope")
    axes.fit("x", x, "T", "H", "d", dtype=MODEL_DTYPES)
    axes.fit("positions", positions, "T", 2, dtype=torch.int32)
    axes.require(axes["d"] % 4 == 0, f"x has heads of {axes['d']} channels, expected fours")
    axes.require(theta > 0, f"theta is {theta}, expected > 0")
    return x.new_empty(x.shape)


def cases() -> list[Case]:
    """The origin (no rotation), odd counts, the largest grid, another base."""

    def make(
        name: str, num_rows: int, largest: int, head_dim: int = 12, theta: float = 10000.0
    ) -> Case:
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            return {
                "x": normal(generator, dtype, num_rows, 3, head_dim),
                "positions": integers(generator, largest + 1, num_rows, 2),
                "theta": theta,
            }

        return Case(name, arguments)

    return [
        make("origin", 1, 0),
        make("an image", 131, 30),
        make("large grid, full heads", 5, 2048, head_dim=64),
        make("other base", 3, 100, head_dim=8, theta=500.0),
    ]


@operator("axial_rope", fake=fake, cases=cases)
def axial_rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate all heads of all rows.

    Args:
        x: float32 or bfloat16 [T, H, d], d a multiple of four.
        positions: int32 [T, 2], row and column.
        theta: base of the frequencies.

    Returns:
        [T, H, d] in x's dtype.
    """
    half = x.shape[-1] // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32, device=x.device) / half
    frequencies = 1.0 / theta**exponents
    angles = positions.float()[:, :, None] * frequencies  # [T, 2, d / 4]
    angles = torch.cat([angles[:, 1], angles[:, 0]], dim=-1)[:, None]  # [T, 1, d / 2]
    cos, sin = torch.cos(angles), torch.sin(angles)
    even, odd = x.float().view(*x.shape[:-1], half, 2).unbind(-1)
    out = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return out.flatten(-2).to(x.dtype)
