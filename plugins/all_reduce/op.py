"""all_reduce: sum over the ranks of an engine, with one rounding.

    out = dtype( (((x_0 + x_1) + x_2) + ...) )        float32, in rank order

x float32 [T, N], the partial result of one rank; out [T, N]. Every rank adds in the same order, so
all ranks hold the same bits. Source: inkling2.md section 11.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.registry import Arguments, Case, Collective, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def sum_in_rank_order(payloads: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Sum of float32 tensors of one shape, from the first to the last, rounded once to `dtype`."""
    total = payloads[0].clone()
    for payload in payloads[1:]:
        total += payload
    return total.to(dtype)


def _payload(*, x: Tensor, **_other: object) -> Tensor:
    return x


def _combine(
    payloads: Sequence[Tensor], *, dtype: torch.dtype, tp_size: int, **_other: object
) -> Tensor:
    assert len(payloads) == tp_size, f"{len(payloads)} payloads for {tp_size} ranks"
    return sum_in_rank_order(payloads, dtype)


def fake(x: Tensor, dtype: torch.dtype, tp_size: int) -> Tensor:
    """Shape of x in `dtype`."""
    axes = Axes("all_reduce")
    axes.fit("x", x, "T", "N", dtype=torch.float32)
    axes.require(dtype in MODEL_DTYPES, f"dtype is {dtype}, expected float32 or bfloat16")
    axes.require(tp_size >= 1, f"tp_size is {tp_size}, expected >= 1")
    return x.new_empty(x.shape, dtype=dtype)


def cases() -> list[Case]:
    """A single rank: only the rounding is left. Several ranks are in test_fused_equal_unfused."""

    def make(num_rows: int, width: int, scale: float, x_dtype: torch.dtype | None = None) -> Case:
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            x = normal(generator, torch.float32, num_rows, width, scale=scale)
            return {"x": x, "dtype": x_dtype or dtype, "tp_size": 1}

        return Case(f"T{num_rows}_N{width}_{x_dtype or 'model_dtype'}", arguments)

    return [make(1, 1, 1.0), make(3, 37, 1e4), make(11, 130, 1e-4, torch.float32)]


@operator(
    "all_reduce",
    fake=fake,
    cases=cases,
    collective=Collective(payload=_payload, combine=_combine),
)
def all_reduce(x: Tensor, dtype: torch.dtype, tp_size: int) -> Tensor:
    """Sum the partial results of all ranks.

    Args:
        x: float32 [T, N], this rank's part.
        dtype: of the result, float32 or bfloat16.
        tp_size: number of ranks.

    Returns:
        `dtype` [T, N], equal on all ranks.
    """
    return _combine([x], dtype=dtype, tp_size=tp_size)
