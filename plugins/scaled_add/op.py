"""scaled_add: adds an update, scaled channel by channel, to the residual stream.

    out = residual + scale * update

The product rounds to the model dtype, then the sum. Source: Inkling-2's vision tower (LayerScale),
`Inkling2VisionEncoderLayer` of transformers.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(residual: Tensor, update: Tensor, scale: Tensor) -> Tensor:
    """Shape and dtype of the residual."""
    axes = Axes("scaled_add")
    axes.fit("residual", residual, "T", "D", dtype=MODEL_DTYPES)
    axes.fit("update", update, "T", "D", dtype=residual.dtype)
    axes.fit("scale", scale, "D", dtype=residual.dtype)
    return residual.new_empty(residual.shape)


def cases() -> list[Case]:
    """Odd sizes, a small scale as published, one that dominates."""

    def make(name: str, num_rows: int, width: int, size: float) -> Case:
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            return {
                "residual": normal(generator, dtype, num_rows, width),
                "update": normal(generator, dtype, num_rows, width),
                "scale": normal(generator, dtype, width, scale=size),
            }

        return Case(name, arguments)

    return [
        make("one row", 1, 55, 1.0),
        make("small scale", 131, 24, 0.1),
        make("scale dominates", 3, 132, 40.0),
    ]


@operator("scaled_add", fake=fake, cases=cases)
def scaled_add(residual: Tensor, update: Tensor, scale: Tensor) -> Tensor:
    """Scale the update and add it.

    Args:
        residual: float32 or bfloat16 [T, D].
        update: [T, D], dtype of the residual.
        scale: [D], dtype of the residual.

    Returns:
        [T, D] in the residual's dtype.
    """
    return residual + scale * update
