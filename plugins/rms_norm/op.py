"""rms_norm: root-mean-square normalization of the last dimension.

    out = weight * x * rsqrt(mean(x^2) + eps)

Inside in float32; the weight multiplies in float32, then one rounding to `dtype`.
Source: Inkling-2, weighted (`Inkling2RMSNorm`) and unweighted, per head, for V
(`Inkling2UnweightedRMSNorm`), both of transformers.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """Shape of x in `dtype`."""
    axes = Axes("rms_norm")
    axes.fit("x", x, "...", "D", dtype=MODEL_DTYPES)
    axes.require(
        x.ndim >= 2, f"x has shape {list(x.shape)}, expected a row dimension before the last"
    )
    if weight is not None:
        axes.fit("weight", weight, "D", dtype=MODEL_DTYPES)
    axes.require(eps >= 0, f"eps is {eps}, expected >= 0")
    axes.require(dtype in MODEL_DTYPES, f"dtype is {dtype}, expected float32 or bfloat16")
    return x.new_empty(x.shape, dtype=dtype)


def _case(
    name: str,
    *shape: int,
    weighted: bool = True,
    eps: float = 1e-6,
    scale: float = 1.0,
    is_float32_input: bool = False,
) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        x_dtype = torch.float32 if is_float32_input else dtype
        return {
            "x": normal(generator, x_dtype, *shape, scale=scale),
            "weight": normal(generator, dtype, shape[-1]) if weighted else None,
            "eps": eps,
            "dtype": dtype,
        }

    return Case(name, arguments)


def cases() -> list[Case]:
    """Weighted, per head without weight, float32 in, eps that matters, rows of zeros."""
    return [
        _case("one row", 1, 55),
        _case("prefill", 11, 56),
        _case("unweighted per head", 3, 2, 7, weighted=False),
        _case("float32 input", 5, 33, is_float32_input=True),
        _case("eps dominates", 2, 9, eps=0.5, scale=0.1),
        _case("zeros", 2, 9, scale=0.0),
        _case("full width", 3, 4608),
        _case("float32 input of fours", 5, 132, is_float32_input=True),
        _case("heads of 64", 7, 4, 64),
        _case("unweighted heads of 128", 2, 3, 128, weighted=False, eps=1e-3),
        _case("several rounds", 2, 8192, scale=3.0),
    ]


@operator("rms_norm", fake=fake, cases=cases)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """Normalize the last dimension and multiply by the weight, if there is one.

    Args:
        x: float32 or bfloat16 [T, ..., D]; the first dimension counts the step's rows.
        weight: float32 or bfloat16 [D], or None.
        eps: added to the mean square.
        dtype: of the result.

    Returns:
        Shape of x in `dtype`.
    """
    wide = x.float()
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight.float()
    return out.to(dtype)
