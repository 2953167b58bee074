"""linear_group_quantized: several products with stored weights, some quantized, at once.

    outs = [linear(xs[input_of[i]], weights[i]), ..., linear_<form>(xs[input_of[j]], codes[j]), ...]

First those of the plain weights, then those of the quantized ones, which all have one form: NVFP4
if there are global scales, else MXFP8. It has the bits of `linear`, `linear_nvfp4` and
`linear_mxfp8`, one after the other. Source: the input projections of an attention layer, of which
sinks and dynamic taps stay plain.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from inkrt.plugins import mxfp8, nvfp4
from inkrt.plugins.caseutil import mxfp8_arguments, normal, weight_arguments
from inkrt.plugins.linear.op import linear
from inkrt.plugins.linear_group.op import MAX_INPUTS, MAX_WEIGHTS
from inkrt.plugins.linear_mxfp8.op import linear_mxfp8
from inkrt.plugins.linear_nvfp4.op import linear_nvfp4
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes


def fake(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    global_scales: Sequence[Tensor],
    input_of: Sequence[int],
) -> list[Tensor]:
    """Shapes [T, N_i] in the inputs' dtype."""
    axes = Axes("linear_group_quantized")
    axes.require(1 <= len(xs) <= MAX_INPUTS, f"{len(xs)} inputs, expected 1 to {MAX_INPUTS}")
    count = len(weights) + len(codes)
    axes.require(
        len(codes) >= 1 and count <= MAX_WEIGHTS,
        f"{len(codes)} quantized weights of {count}, expected at least 1 of up to {MAX_WEIGHTS}",
    )
    axes.require(
        len(scales) == len(codes) and len(global_scales) in (0, len(codes)),
        f"{len(scales)} scales and {len(global_scales)} global scales of {len(codes)} weights",
    )
    axes.require(
        len(input_of) == count and all(0 <= index < len(xs) for index in input_of),
        f"input_of is {list(input_of)}, expected an index below {len(xs)} for each of "
        f"{count} weights",
    )
    for number, x in enumerate(xs):
        dtype = MODEL_DTYPES if number == 0 else xs[0].dtype
        axes.fit(f"xs[{number}]", x, "T", "K", dtype=dtype)
    for number, weight in enumerate(weights):
        axes.fit(f"weights[{number}]", weight, f"N{number}", "K", dtype=xs[0].dtype)
    block, per_byte = (nvfp4.BLOCK, 2) if global_scales else (mxfp8.BLOCK, 1)
    for number, (code, scale) in enumerate(zip(codes, scales, strict=True)):
        rows = f"M{number}"
        axes.fit(f"codes[{number}]", code, rows, f"K/{per_byte}", dtype=torch.uint8)
        axes.fit(f"scales[{number}]", scale, rows, f"K/{block}", dtype=torch.uint8)
        axes.require(
            per_byte * code.shape[1] == xs[0].shape[1] == block * scale.shape[1],
            f"codes[{number}] has {code.shape[1]} columns and scales[{number}] has "
            f"{scale.shape[1]}, expected K/{per_byte} and K/{block} with K={xs[0].shape[1]}",
        )
    for number, scale in enumerate(global_scales):
        axes.fit(f"global_scales[{number}]", scale, 1, dtype=torch.float32)
    return [xs[0].new_empty(xs[0].shape[0], weight.shape[0]) for weight in (*weights, *codes)]


def _case(
    name: str, num_tokens: int, width: int, plain: Sequence[int], quantized: Sequence[int],
    input_of: Sequence[int], *, is_nvfp4: bool,
) -> Case:  # fmt: skip
    def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        scale = width**-0.5
        weights = [normal(generator, dtype, rows, width, scale=scale) for rows in plain]
        matrices = [
            weight_arguments("w", generator, dtype, rows, width, scale=scale, quantized=True)
            if is_nvfp4
            else mxfp8_arguments("w", generator, dtype, rows, width, scale=scale)
            for rows in quantized
        ]
        return {
            "xs": [normal(generator, dtype, num_tokens, width) for _ in range(max(input_of) + 1)],
            "weights": weights,
            "codes": [matrix["w"] for matrix in matrices],
            "scales": [matrix["w_scales"] for matrix in matrices],
            "global_scales": [matrix["w_global_scale"] for matrix in matrices if is_nvfp4],
            "input_of": list(input_of),
        }

    # Sums of a block with the largest scale lose what others add to them.
    rtol = {torch.float32: 3e-6, torch.bfloat16: 4e-3}
    return Case(f"{name}, {'NVFP4' if is_nvfp4 else 'MXFP8'}", arguments, rtol)


def cases() -> list[Case]:
    """Of both forms: rows and widths of no whole tiles or chunks, inputs out of order."""
    made = []
    for is_nvfp4 in (True, False):

        def case(
            name: str, num_tokens: int, width: int, plain: Sequence[int], quantized: Sequence[int],
            input_of: Sequence[int], is_nvfp4: bool = is_nvfp4,
        ) -> Case:  # fmt: skip
            return _case(name, num_tokens, width, plain, quantized, input_of, is_nvfp4=is_nvfp4)

        made += [
            case("decode", 1, 64, (5, 1), (33, 20), (0, 0, 0, 0)),
            case("verify", 5, 96, (3,), (17, 40), (1, 0, 1)),
            case("prefill", 11, 160, (6, 4), (130, 23), (1, 0, 0, 1)),
            case("quantized alone", 8, 256, (), (16, 50), (1, 0)),
            case("three inputs", 8, 1536, (8, 4, 4), (64, 24, 32), (0, 1, 2, 0, 1, 2)),
            case("model width", 2, 4608, (12, 8), (48, 16, 6), (0, 2, 0, 1, 2)),
            case("model width, wide", 9, 4608, (6,), (8, 40), (0, 0, 0)),
            case("more tiles than blocks", 4, 128, (4,), (1600, 1111), (0, 0, 1)),
        ]
    return made


@operator("linear_group_quantized", fake=fake, cases=cases)
def linear_group_quantized(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    global_scales: Sequence[Tensor],
    input_of: Sequence[int],
) -> list[Tensor]:
    """Multiply rows by several transposed weights.

    Args:
        xs: float32 or bfloat16 [T, K] each.
        weights: [N_i, K] each, dtype of xs; may be none.
        codes: of the quantized weights, uint8 [N_j, K / 2] (NVFP4) or [N_j, K] (MXFP8) each.
        scales: uint8 [N_j, K / 16], or exponents [N_j, K / 32], each.
        global_scales: float32 [1] each, of NVFP4; none for MXFP8.
        input_of: for each weight, the plain ones first, the index of its input.

    Returns:
        For each weight, the plain ones first, [T, N_i] in the inputs' dtype.
    """
    inputs = [xs[index] for index in input_of]
    outs = [linear(x, weight, False) for x, weight in zip(inputs, weights, strict=False)]
    for number, x in enumerate(inputs[len(weights) :]):
        if global_scales:
            parts = (codes[number], scales[number], global_scales[number])
            outs.append(linear_nvfp4(x, *parts, False))
        else:
            outs.append(linear_mxfp8(x, codes[number], scales[number], False))
    return outs
