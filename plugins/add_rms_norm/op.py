"""add_rms_norm: adds an update to the residual stream and normalizes the sum.

    s        = fp32(x) + fp32(delta)
    residual = dtype(s)
    z        = dtype(s * rsqrt(mean(s^2) + eps) * weight)        from the unrounded s

A kernel may use rsqrt.approx (relative error 2^-22.9); the reference is exact to float32.
Source: flint.md section 5. transformers normalizes the rounded sum instead.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Two tensors of x's shape in `dtype`."""
    axes = Axes("add_rms_norm")
    fit_add_norm(axes, x, delta, weight, eps, "weight")
    axes.require(dtype in MODEL_DTYPES, f"dtype is {dtype}, expected float32 or bfloat16")
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=dtype)


def fit_add_norm(
    axes: Axes, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, name: str
) -> None:
    """Check x [T, D], delta and the norm's weight, whose parameter is called `name`.

    Raises:
        BuildError: a shape or dtype does not fit, or eps is negative.
    """
    axes.fit("x", x, "T", "D", dtype=MODEL_DTYPES)
    if delta is not None:
        axes.fit("delta", delta, "T", "D", dtype=MODEL_DTYPES)
    axes.fit(name, weight, "D", dtype=MODEL_DTYPES)
    axes.require(eps >= 0, f"eps is {eps}, expected >= 0")


def _case(
    name: str, num_rows: int, width: int, *, has_delta: bool = True, eps: float = 1e-6,
    scale: float = 1.0, float32_delta: bool = False,
) -> Case:  # fmt: skip
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        delta_dtype = torch.float32 if float32_delta else dtype
        delta = normal(generator, delta_dtype, num_rows, width, scale=0.3 * scale)
        return {
            "x": normal(generator, dtype, num_rows, width, scale=scale),
            "delta": delta if has_delta else None,
            "weight": 1 + normal(generator, dtype, width, scale=0.2),
            "eps": eps,
            "dtype": dtype,
        }

    return Case(name, arguments)


def cases() -> list[Case]:
    """With and without an update, an eps that matters, an update that is not rounded, zeros."""
    return [
        _case("one row", 1, 55),
        _case("prefill", 11, 56),
        _case("no update", 3, 33, has_delta=False),
        _case("float32 update", 5, 33, float32_delta=True),
        _case("eps dominates", 2, 9, eps=0.5, scale=0.1),
        _case("zeros", 2, 9, scale=0.0),
    ]


@operator("add_rms_norm", fake=fake, cases=cases)
def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Add and normalize.

    Args:
        x: float32 or bfloat16 [T, D], the residual stream.
        delta: float32 or bfloat16 [T, D], or None for zero.
        weight: float32 or bfloat16 [D].
        eps: added to the mean square.
        dtype: of both results.

    Returns:
        The new residual and its norm, [T, D] each; never views of an argument.
    """
    total = x.float() if delta is None else x.float() + delta.float()
    out = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight.float()
    return total.to(dtype, copy=True), out.to(dtype)
