"""quantize_mxfp8: activations as MXFP8, with a power of two per 32 columns.

    exponent[t, b] = the least e with 2^(e - 127) >= max |x| * (1 / 448), at least 0
    code[t, k]     = e4m3(x[t, k] * 2^(127 - exponent[t, k // 32]))       or of 0 where it is 0

1 / 448 is rounded to float32, which makes it larger, and so is the product: no quotient is above
448, where e4m3 would end. e4m3 rounds to nearest, ties to even. An exponent of 0 stands for blocks
of zeros and for those with no value above 448 * 2^-127: their codes are zeros with the signs of x.
Codes and exponents are laid out as those of weights (`plugins.mxfp8`).
Source: inkling2.md section 9.2.
"""

import torch
from torch import Tensor

from inkrt.plugins.caseutil import normal
from inkrt.plugins.mxfp8 import BIAS, BLOCK, E4M3_MAX, encode_codes
from inkrt.plugins.registry import Arguments, Case, operator
from inkrt.plugins.shapes import MODEL_DTYPES, Axes

_MANTISSA_BITS = 23  # of float32


def fake(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [T, K] and exponents uint8 [T, K / 32]."""
    axes = Axes("quantize_mxfp8")
    axes.fit("x", x, "T", "K", dtype=MODEL_DTYPES)
    num_rows, width = x.shape
    axes.require(width % BLOCK == 0, f"x has {width} columns, expected a multiple of {BLOCK}")
    return (
        x.new_empty(num_rows, width, dtype=torch.uint8),
        x.new_empty(num_rows, width // BLOCK, dtype=torch.uint8),
    )


def cases() -> list[Case]:
    """Zeros, one value that dwarfs all, the ends of the exponent's range."""

    def make(
        name: str, num_rows: int, width: int,
        *, scale: float = 1.0, spike: float = 0.0, has_zeros: bool = False,
    ) -> Case:  # fmt: skip
        def arguments(dtype: torch.dtype, generator: torch.Generator) -> Arguments:
            x = normal(generator, dtype, num_rows, width, scale=scale)
            if spike:
                x[:, width // 2] = spike
            if has_zeros:
                x[-1] = 0
                x[0, :BLOCK] = 0
            return {"x": x}

        return Case(name, arguments, {torch.float32: 0.0, torch.bfloat16: 0.0})

    return [
        make("one block", 1, 32),
        make("T5", 5, 160),
        make("zeros", 3, 96, has_zeros=True),
        make("spike", 2, 96, spike=-3e8),
        make("power of two", 2, 96, spike=448.0),
        make("large", 2, 64, scale=1e37),
        make("least exponents", 3, 160, scale=5e-37),
        make("subnormal", 2, 64, scale=1e-40),
        make("T11", 11, 64),
        make("like the model", 1, 2304),
    ]


@operator("quantize_mxfp8", fake=fake, cases=cases)
def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows.

    Args:
        x: finite, float32 or bfloat16 [T, K], K a multiple of 32.

    Returns:
        Codes uint8 [T, K] and exponents uint8 [T, K / 32].
    """
    blocks = x.float().reshape(len(x), x.shape[1] // BLOCK, BLOCK)
    least = blocks.abs().amax(dim=-1) * (1 / torch.tensor(E4M3_MAX))
    # least = mantissa * 2^power, the mantissa in [0.5, 1), or 0.
    mantissa, power = torch.frexp(least)
    exponent = BIAS + power - (mantissa == 0.5).int()
    exponent = torch.where(least == 0, 0, exponent.clamp(min=0))
    # 2^(127 - exponent) by its bits; exponents end at 247.
    factor = ((2 * BIAS - exponent) << _MANTISSA_BITS).view(torch.float32)
    factor = torch.where(exponent == 0, 0.0, factor)
    return encode_codes(blocks * factor[..., None]).flatten(1), exponent.to(torch.uint8)
