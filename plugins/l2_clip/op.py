"""l2_clip: shortens head vectors to a largest Euclidean norm, after an optional learned scale.

    u   = x * scale
    out = u * min(1, threshold / (|u| + 1e-6))

Float32 inside, one rounding to the dtype of x.
Source: Inkling-2 queries, keys and relative states; `Inkling2L2Clip` and `Inkling2ScaledL2Clip` of
transformers.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes

# Keeps a zero vector finite; a constant of the model, not a setting of its configuration.
NORM_EPS = 1e-6


def fake(x: Tensor, scale: Tensor | None, threshold: float) -> Tensor:
    """Shape and dtype of x."""
    axes = Axes("l2_clip")
    axes.fit("x", x, "T", "H", "d", dtype=MODEL_DTYPES)
    if scale is not None:
        axes.fit("scale", scale, "H", "d", dtype=MODEL_DTYPES)
    axes.require(threshold > 0, f"threshold is {threshold}, expected > 0")
    return x.new_empty(x.shape)


def _case(name: str, *shape: int, scaled: bool, threshold: float, x_scale: float = 1.0) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {
            "x": normal(generator, dtype, *shape, scale=x_scale),
            "scale": normal(generator, dtype, *shape[1:]) if scaled else None,
            "threshold": threshold,
        }

    return Case(name, arguments)


def cases() -> list[Case]:
    """None, some and all vectors clipped; with and without scale; zero vectors."""
    return [
        _case("some clipped", 5, 6, 8, scaled=True, threshold=2.6),
        _case("none clipped", 1, 2, 7, scaled=False, threshold=22.627416997969522),
        _case("all clipped", 11, 3, 9, scaled=True, threshold=0.5, x_scale=30.0),
        _case("zeros", 2, 2, 5, scaled=False, threshold=8.0, x_scale=0.0),
        _case("heads of 128", 3, 5, 128, scaled=True, threshold=11.0),
        _case("zeros of 32", 9, 2, 32, scaled=False, threshold=8.0, x_scale=0.0),
        _case("relative states", 5, 3, 16, scaled=True, threshold=4.0),
    ]


@operator("l2_clip", fake=fake, cases=cases)
def l2_clip(x: Tensor, scale: Tensor | None, threshold: float) -> Tensor:
    """Scale, then shorten every head vector whose norm is above the threshold.

    Args:
        x: float32 or bfloat16 [T, H, d].
        scale: float32 or bfloat16 [H, d], or None for ones.
        threshold: largest norm of a head vector.

    Returns:
        Shape and dtype of x.
    """
    wide = x.float()
    if scale is not None:
        wide = wide * scale.float()
    norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    shrink = (threshold / (norm + NORM_EPS)).clamp(max=1.0)
    return (wide * shrink).to(x.dtype)
