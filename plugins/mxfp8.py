"""MXFP8: matrices of 8-bit floats with a power of two per 32 columns.

    value[n, k] = e4m3(code[n, k]) * 2^(exponent[n, k // 32] - 127)

A product has 4 significant bits, so it is exact in bfloat16 but for the far ends of the exponent's
range. An operator takes such a weight in the three arguments of `plugins.nvfp4`:

    w               uint8 [..., N, K]        bits of E4M3, no NaN (0x7F and 0xFF)
    w_scales        uint8 [..., N, K / 32]   E8M0, 255 is no number
    w_global_scale  None

Source: inkling2.md section 9.
"""

import torch
from torch import Tensor

from inkrt.plugins.shapes import Axes

BLOCK = 32
BIAS = 127
# The code, without its sign, that is no number.
NO_NUMBER = 0x7F
E4M3_MAX = 448.0
# Root mean square of uniform codes.
CODE_RMS = 100.0


def dequantize(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Values, [..., N, K] of `dtype`.

    Args:
        codes: uint8 [..., N, K].
        exponents: uint8 [..., N, K / 32].
        dtype: of the result.
    """
    blocks = codes.view(torch.float8_e4m3fn).float().view(*exponents.shape, BLOCK)
    return torch.ldexp(blocks, exponents[..., None].int() - BIAS).flatten(-2).to(dtype)


def encode_codes(values: Tensor) -> Tensor:
    """The nearest E4M3 codes, uint8, of float32 values; ties go to even, sizes end at 448."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def fit_weight(axes: Axes, name: str, codes: Tensor, exponents: Tensor, *letters: str) -> None:
    """Check codes and exponents; `letters` as for `plugins.nvfp4.fit_weight`.

    Raises:
        BuildError: a shape or dtype does not fit.
    """
    *rows, columns = letters
    axes.fit(name, codes, *rows, columns, dtype=torch.uint8)
    axes.fit(f"{name}_scales", exponents, *rows, f"{columns}/{BLOCK}", dtype=torch.uint8)
    axes.require(
        BLOCK * exponents.shape[-1] == codes.shape[-1],
        f"{name} has {codes.shape[-1]} columns and {name}_scales has {exponents.shape[-1]}, "
        f"expected {columns} and {columns}/{BLOCK}",
    )
