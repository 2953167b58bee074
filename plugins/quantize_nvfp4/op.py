"""quantize_nvfp4: activations as NVFP4, with a scale per token and the better of two per block.

    value[t, k] = e2m1(code[t, k]) * e4m3(scale[t, k // 16]) * token_scale[t]

The scale of a block puts its largest value at 6 or at 4, the two largest values of E2M1 that are
apart by a factor of less than 2: whichever has the smaller sum of absolute errors ("Four Over
Six"). With m = e4m3_max, row = max |x[t]| and big = max |x| of a block:

    top         = 1 / (1 / (6 m))                         which is 6 m for both values of m
    enc         = min(top / row, FLT_MAX)
    token_scale = 1 / enc
    s6, s4      = e4m3((big / 6) enc), e4m3(((big / 6) enc) 1.5)
    code        = e2m1(x min(1 / (s token_scale), FLT_MAX))
    error       = sum |((e2m1(code) s) row) / (6 m) - x|             in the order of columns, from 0

and s4 is taken where its error is smaller, s6 where they are equal. Every operation is one of
float32, rounded to nearest, so that two implementations agree in all bits: a kernel must not
contract, reassociate, flush subnormal numbers or use approximate reciprocals. e4m3 and e2m1 round
to nearest, ties to even, and end at 448 and at 6. A row of zeros is zeros throughout, its scale
too; a block of zeros has codes and scale of 0.

e4m3_max is that of the weights' quantizer. With 448, s4 ends at 448 in blocks with values beyond
two thirds of the row's largest; with 256 it never does. Codes and scales are laid out as those of
weights (`plugins.nvfp4`).
Source: inkling2.md section 9.1.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.nvfp4 import BLOCK, decode_codes, decode_scales, encode_codes, encode_scales
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes

LARGEST = torch.finfo(torch.float32).max
E4M3_MAXIMA = (448, 256)


def fake(x: Tensor, e4m3_max: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [T, K / 2], scales uint8 [T, K / 16] and float32 [T]."""
    axes = Axes("quantize_nvfp4")
    axes.fit("x", x, "T", "K", dtype=MODEL_DTYPES)
    num_rows, width = x.shape
    axes.require(width % BLOCK == 0, f"x has {width} columns, expected a multiple of {BLOCK}")
    axes.require(e4m3_max in E4M3_MAXIMA, f"e4m3_max is {e4m3_max}, expected 448 or 256")
    return (
        x.new_empty(num_rows, width // 2, dtype=torch.uint8),
        x.new_empty(num_rows, width // BLOCK, dtype=torch.uint8),
        x.new_empty(num_rows, dtype=torch.float32),
    )


def cases() -> list[Case]:
    """Both maxima; rows and blocks of zeros, one value that dwarfs all, sizes far from 1."""

    def make(
        name: str, num_rows: int, width: int, e4m3_max: int,
        *, scale: float = 1.0, spike: float = 0.0, has_zeros: bool = False,
    ) -> Case:  # fmt: skip
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            x = normal(generator, dtype, num_rows, width, scale=scale)
            if spike:
                x[:, width // 2] = spike
            if has_zeros:
                x[-1] = 0
                x[0, :BLOCK] = 0
            return {"x": x, "e4m3_max": e4m3_max}

        return Case(name, arguments, {torch.float32: 0.0, torch.bfloat16: 0.0})

    return [
        make("one block", 1, 16, 448),
        make("T5_448", 5, 80, 448),
        make("T5_256", 5, 80, 256),
        make("zeros", 3, 48, 448, has_zeros=True),
        make("zeros_256", 3, 48, 256, has_zeros=True),
        make("spike", 2, 112, 448, spike=3e4),
        make("spike_256", 2, 112, 256, spike=-3e8),
        make("large", 2, 48, 448, scale=1e37),
        make("small", 2, 48, 256, scale=1e-37),
        make("subnormal", 2, 48, 448, scale=1e-41),
        make("T11", 11, 48, 256),
        make("like the model", 1, 4608, 448),
    ]


@operator("quantize_nvfp4", fake=fake, cases=cases)
def quantize_nvfp4(x: Tensor, e4m3_max: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize rows.

    Args:
        x: finite, float32 or bfloat16 [T, K], K a multiple of 16.
        e4m3_max: 448 or 256, the scale of a block that puts the row's largest value at 6.

    Returns:
        Codes uint8 [T, K / 2], bytes of scales uint8 [T, K / 16], scales of tokens float32 [T].
    """
    return quantize_rows(x, x.float().abs().amax(dim=1), e4m3_max)


def quantize_rows(x: Tensor, row: Tensor, e4m3_max: int) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_nvfp4` of parts of rows, whose largest sizes are given: `row`, float32 [T]."""
    blocks = x.float().reshape(len(x), x.shape[1] // BLOCK, BLOCK)
    largest = torch.tensor(6.0 * e4m3_max)
    enc = ((1 / (1 / largest)) / row).clamp(max=LARGEST)
    token_scale = torch.where(row == 0, 0.0, 1 / enc)

    big = blocks.abs().amax(dim=-1)
    at_six = (big / 6) * enc[:, None]
    candidates = []
    for wanted in (at_six, at_six * 1.5):
        scales = encode_scales(wanted)
        scale = decode_scales(scales)[..., None]
        factor = (1 / (scale * token_scale[:, None, None])).clamp(max=LARGEST)
        codes = encode_codes(blocks * factor)
        values = ((decode_codes(codes) * scale) * row[:, None, None]) / largest
        candidates.append((codes, scales, _sum_in_order((values - blocks).abs())))
    (codes6, scales6, error6), (codes4, scales4, error4) = candidates
    takes_four = error4 < error6
    codes = torch.where(takes_four[..., None], codes4, codes6)
    codes = torch.where((big == 0)[..., None], 0, codes)
    return codes.flatten(1), torch.where(takes_four, scales4, scales6), token_scale


def _sum_in_order(errors: Tensor) -> Tensor:
    """Sum over the last dimension, one after the other, from 0."""
    total = torch.zeros_like(errors[..., 0])
    for error in errors.unbind(-1):
        total = total + error
    return total
