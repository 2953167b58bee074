"""linear: a matrix product with a stored weight, without bias.

    out = x @ weight^T

One rounding to the model dtype after float32 accumulation; or none, for a row-parallel partial sum
that ranks have yet to add up.
Source: every projection of Inkling, Inkling-2 and Flint.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.narrow import linear_rows
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(x: Tensor, weight: Tensor, partial: bool) -> Tensor:
    """Shape [T, N] in x's dtype, or float32 if partial."""
    axes = Axes("linear")
    axes.fit("x", x, "T", "K", dtype=MODEL_DTYPES)
    axes.fit("weight", weight, "N", "K", dtype=x.dtype)
    dtype = torch.float32 if partial else x.dtype
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


def _case(name: str, num_tokens: int, width: int, num_outputs: int, *, partial: bool) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        return {
            "x": normal(generator, dtype, num_tokens, width),
            "weight": normal(generator, dtype, num_outputs, width, scale=width**-0.5),
            "partial": partial,
        }

    # A partial sum is not rounded to the model dtype.
    rtol = {torch.float32: 1e-6, torch.bfloat16: 1e-6 if partial else 4e-3}
    return Case(name, arguments, rtol)


def cases() -> list[Case]:
    """Decode, verify and prefill widths, one output, partial sums, sizes of GPU layouts."""
    return [
        _case("decode", 1, 55, 33, partial=False),
        _case("verify", 5, 57, 19, partial=False),
        _case("prefill", 11, 56, 72, partial=False),
        _case("one output", 3, 7, 1, partial=False),
        _case("partial decode", 1, 55, 33, partial=True),
        _case("partial prefill", 13, 31, 9, partial=True),
        # Of a GPU's layouts: widths of no whole chunk, more tiles than blocks, several stages.
        _case("narrow rows", 1, 64, 40, partial=False),
        _case("padded width", 8, 200, 23, partial=False),
        _case("padded width, wide", 13, 72, 20, partial=False),
        _case("many rows", 5, 128, 2150, partial=False),
        _case("long rows", 3, 6144, 37, partial=True),
        _case("longest rows", 2, 8192, 18, partial=True),
        _case("partial verify", 8, 768, 44, partial=True),
        _case("partial, wide", 40, 128, 150, partial=True),
    ]


def plain(x: Tensor, weight: Tensor, partial: bool) -> Tensor:
    """The same without the care for bits of narrow steps."""
    return F.linear(x.float(), weight.float()) if partial else F.linear(x, weight)


@operator("linear", fake=fake, cases=cases, plain=plain)
def linear(x: Tensor, weight: Tensor, partial: bool) -> Tensor:
    """Multiply rows by the transposed weight.

    Args:
        x: float32 or bfloat16 [T, K].
        weight: [N, K], dtype of x.
        partial: whether the result is this rank's part of a sum, left unrounded.

    Returns:
        [T, N] in x's dtype, or float32 if `partial`.
    """
    if partial:
        x, weight = x.float(), weight.float()
    return linear_rows(x, weight)
