"""residual_add: adds an update to the residual stream.

    out = residual + update        (float32 sum, one rounding to `dtype`)

Without a residual the update alone starts a new sum. The partial sum between attention and MLP of
an Inkling-2 layer stays float32 (`dtype` float32), so the layer rounds it once.
Source: Inkling-2 decoder layers of transformers, steps 4 and 7 of the block attention residual.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(residual: Tensor | None, update: Tensor, dtype: torch.dtype) -> Tensor:
    """Shape of the update in `dtype`."""
    axes = Axes("residual_add")
    axes.fit("update", update, "T", "D", dtype=MODEL_DTYPES)
    if residual is not None:
        axes.fit("residual", residual, "T", "D", dtype=MODEL_DTYPES)
    axes.require(dtype in MODEL_DTYPES, f"dtype is {dtype}, expected float32 or bfloat16")
    return update.new_empty(update.shape, dtype=dtype)


def _case(
    name: str,
    num_tokens: int,
    width: int,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {
            "residual": normal(generator, residual_dtype or dtype, num_tokens, width),
            "update": normal(generator, dtype, num_tokens, width),
            "dtype": out_dtype or dtype,
        }

    return Case(name, arguments)


def _start(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
    update = normal(generator, dtype, 3, 7)
    return {"residual": None, "update": update, "dtype": torch.float32}


def _copy(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
    return {"residual": None, "update": normal(generator, dtype, 1, 5), "dtype": dtype}


def cases() -> list[Case]:
    """Each of the roundings a layer makes: kept wide, rounded at its end, started anew."""
    return [
        _case("model dtype", 1, 55),
        _case("partial sum kept in float32", 5, 33, out_dtype=torch.float32),
        _case("float32 residual rounded", 11, 7, residual_dtype=torch.float32),
        _case("of fours", 5, 132, torch.float32),
        _case("of fours kept in float32", 3, 520, out_dtype=torch.float32),
        Case("new float32 sum", _start),
        Case("new sum of equal dtype is a copy", _copy),
    ]


@operator("residual_add", fake=fake, cases=cases)
def residual_add(residual: Tensor | None, update: Tensor, dtype: torch.dtype) -> Tensor:
    """Add in float32 and round once.

    Args:
        residual: float32 or bfloat16 [T, D], or None for zero.
        update: float32 or bfloat16 [T, D].
        dtype: of the result.

    Returns:
        [T, D] in `dtype`; never a view of an argument.
    """
    if residual is None:
        return update.to(dtype, copy=True)
    return (residual.float() + update.float()).to(dtype)
