"""linear_nvfp4: a matrix product with a stored NVFP4 weight, without bias.

    out = (x @ w^T) * global_scale        w = e2m1(codes) * e4m3(scales), exact in bfloat16

The product is accumulated in float32 and multiplied by the global scale in float32; then one
rounding to the model dtype, or none, as for `linear`. The layout is that of `plugins.nvfp4`.
Source: every projection of a Flint NVFP4 checkpoint, flint.md sections 5 and 9.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal, weight_arguments
from inkrt.plugins.linear.op import linear
from inkrt.plugins.narrow import linear_rows
from inkrt.plugins.nvfp4 import dequantize, fit_weight
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(x: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor, partial: bool) -> Tensor:
    """Shape [T, N] in x's dtype, or float32 if partial."""
    axes = Axes("linear_nvfp4")
    axes.fit("x", x, "T", "K", dtype=MODEL_DTYPES)
    fit_weight(axes, "codes", codes, scales, global_scale, "N", "K", dtype=x.dtype)
    dtype = torch.float32 if partial else x.dtype
    return x.new_empty(x.shape[0], codes.shape[0], dtype=dtype)


def _case(name: str, num_tokens: int, width: int, num_outputs: int, *, partial: bool) -> Case:
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        weight = weight_arguments(
            "weight", generator, dtype, num_outputs, width, scale=width**-0.5, quantized=True
        )
        return {
            "x": normal(generator, dtype, num_tokens, width),
            "codes": weight["weight"],
            "scales": weight["scales"],
            "global_scale": weight["global_scale"],
            "partial": partial,
        }

    # A partial sum is not rounded to the model dtype.
    rtol = {torch.float32: 1e-6, torch.bfloat16: 1e-6 if partial else 4e-3}
    return Case(name, arguments, rtol)


def cases() -> list[Case]:
    """Decode, verify and prefill widths, one block, one output, and partial sums."""
    return [
        _case("decode", 1, 64, 33, partial=False),
        _case("verify", 5, 192, 19, partial=False),
        _case("prefill", 11, 128, 72, partial=False),
        _case("one block", 3, 16, 7, partial=False),
        _case("one output", 2, 48, 1, partial=False),
        _case("partial decode", 1, 80, 33, partial=True),
        _case("partial prefill", 13, 32, 9, partial=True),
    ]


@operator("linear_nvfp4", fake=fake, cases=cases)
def linear_nvfp4(
    x: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor, partial: bool
) -> Tensor:
    """Multiply rows by the transposed weight.

    Args:
        x: float32 or bfloat16 [T, K].
        codes: uint8 [N, K / 2].
        scales: uint8 [N, K / 16].
        global_scale: float32 [1].
        partial: whether the float32 result is left unrounded.

    Returns:
        [T, N] in x's dtype, or float32 if `partial`.
    """
    weight = dequantize(codes, scales, torch.float32)
    out = linear_rows(x.float(), weight) * global_scale
    return out if partial else out.to(x.dtype)


def project(
    x: Tensor, weight: Tensor, scales: Tensor | None, global_scale: Tensor | None, partial: bool
) -> Tensor:
    """`linear` or `linear_nvfp4`, by the form of the weight: for references of fused operators."""
    out: Tensor
    if scales is None:
        out = linear(x, weight, partial)
    else:
        assert global_scale is not None
        out = linear_nvfp4(x, weight, scales, global_scale, partial)
    return out
