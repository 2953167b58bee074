"""linear_mxfp8: a matrix product with a stored MXFP8 weight, without bias.

    out = x @ w^T        w = e4m3(codes) * 2^(exponents - 127), exact in bfloat16

One rounding to the model dtype after float32 accumulation, or none, as for `linear`. The layout is
that of `plugins.mxfp8`.
Source: attention projections of Inkling-2 that a checkpoint ships, or a build makes, in MXFP8.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import mxfp8_arguments, normal
from inkrt.plugins.linear.op import linear
from inkrt.plugins.mxfp8 import BLOCK, dequantize
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(x: Tensor, codes: Tensor, exponents: Tensor, partial: bool) -> Tensor:
    """Shape [T, N] in x's dtype, or float32 if partial."""
    axes = Axes("linear_mxfp8")
    axes.fit("x", x, "T", "K", dtype=MODEL_DTYPES)
    axes.fit("codes", codes, "N", "K", dtype=torch.uint8)
    axes.fit("exponents", exponents, "N", f"K/{BLOCK}", dtype=torch.uint8)
    axes.require(
        BLOCK * exponents.shape[1] == codes.shape[1],
        f"codes has {codes.shape[1]} columns and exponents has {exponents.shape[1]}, expected K "
        f"and K/{BLOCK}",
    )
    dtype = torch.float32 if partial else x.dtype
    return x.new_empty(x.shape[0], codes.shape[0], dtype=dtype)


def _case(name: str, num_tokens: int, width: int, num_outputs: int, *, partial: bool) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        weight = mxfp8_arguments("w", generator, dtype, num_outputs, width, scale=width**-0.5)
        return {
            "x": normal(generator, dtype, num_tokens, width),
            "codes": weight["w"],
            "exponents": weight["w_scales"],
            "partial": partial,
        }

    # A partial sum is not rounded to the model dtype.
    rtol = {torch.float32: 1e-6, torch.bfloat16: 1e-6 if partial else 4e-3}
    return Case(name, arguments, rtol)


def cases() -> list[Case]:
    """Decode, verify and prefill widths, one block, one output, partial sums, long rows."""
    return [
        _case("decode", 1, 64, 33, partial=False),
        _case("verify", 5, 192, 19, partial=False),
        _case("prefill", 11, 128, 72, partial=False),
        _case("one block", 3, 32, 7, partial=False),
        _case("one output", 2, 96, 1, partial=False),
        _case("partial decode", 1, 160, 33, partial=True),
        _case("partial verify", 8, 768, 44, partial=True),
        _case("partial prefill", 13, 32, 9, partial=True),
        _case("many rows", 4, 256, 2150, partial=False),
        _case("long rows", 3, 6144, 37, partial=True),
    ]


@operator("linear_mxfp8", fake=fake, cases=cases)
def linear_mxfp8(x: Tensor, codes: Tensor, exponents: Tensor, partial: bool) -> Tensor:
    """Multiply rows by the transposed weight.

    Args:
        x: float32 or bfloat16 [T, K].
        codes: uint8 [N, K].
        exponents: uint8 [N, K / 32].
        partial: whether the float32 result is left unrounded.

    Returns:
        [T, N] in x's dtype, or float32 if `partial`.
    """
    out: Tensor = linear(x, dequantize(codes, exponents, x.dtype), partial)
    return out
