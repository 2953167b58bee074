"""NVFP4: matrices of 4-bit codes with a scale per 16 columns and one scale per matrix.

    value[n, k] = e2m1(code[n, k]) * e4m3(scale[n, k // 16]) * global_scale

E2M1 has 2 significant bits and E4M3 has 4, so their product has at most 6 and lies in 2^-10..2688:
it is exact in bfloat16, which is what kernels multiply with. The global scale is no part of it. It
multiplies the float32 sum of a row.

An operator takes a weight that may be NVFP4 as three arguments that stand side by side, named after
the weight: `w`, `w_scales`, `w_global_scale` (an operator with one weight drops the prefix). Either
`w` has the model's dtype and the others are None, or it has decoded values of that dtype and only
the scales are None (operators of experts), or `w` holds codes:

    w               uint8 [..., N, K / 2]   column 2i in the low, 2i + 1 in the high four bits
    w_scales        uint8 [..., N, K / 16]  bits of E4M3 without a sign, 0 to 0x7E
    w_global_scale  float32 [1], or [L] where w is a stack of L matrices

Source: flint.md section 9; the layout of two codes and of scales is that of ModelOpt checkpoints.
"""

from itertools import pairwise

import torch
from torch import Tensor

from inkrt.plugins.shapes import Axes

BLOCK = 16
# Largest byte of a scale: 0x7F is no number.
MAX_SCALE = 0x7E
E4M3_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_codes(codes: Tensor) -> Tensor:
    """E2M1 values, float32 [..., K], of two codes per byte, uint8 [..., K / 2]."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
    pairs = torch.stack([codes & 0xF, codes >> 4], dim=-1)
    return table[pairs.flatten(-2).int()]


def decode_scales(scales: Tensor) -> Tensor:
    """E4M3 values, float32, of bytes in 0..MAX_SCALE."""
    return scales.view(torch.float8_e4m3fn).float()


def encode_codes(values: Tensor) -> Tensor:
    """The nearest E2M1 codes, two per byte: uint8 [..., K / 2] of float32 [..., K].

    Ties go to the even code, sizes above 6 become 6, and zeros keep their sign.
    """
    size = values.abs()
    codes = values.signbit().to(torch.uint8) << 3
    for code, (below, above) in enumerate(pairwise(E2M1)):
        middle = (below + above) / 2
        codes += size >= middle if code % 2 else size > middle
    return codes[..., 0::2] | codes[..., 1::2] << 4


def encode_scales(values: Tensor) -> Tensor:
    """The nearest bytes of E4M3, ties to even, of float32 values >= 0; above 448 they are 448."""
    return values.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Values without the global scale; exact in float32 and in bfloat16.

    Args:
        codes: uint8 [..., N, K / 2].
        scales: uint8 [..., N, K / 16].
        dtype: of the result.

    Returns:
        [..., N, K], contiguous.
    """
    blocks = decode_codes(codes).view(*scales.shape, BLOCK)
    return (blocks * decode_scales(scales)[..., None]).flatten(-2).to(dtype)


def float32_matrices(weight: Tensor, scales: Tensor | None) -> Tensor:
    """A weight of either form without its global scale, float32 [..., N, K]."""
    return weight.float() if scales is None else dequantize(weight, scales, torch.float32)


def fit_weight(
    axes: Axes,
    name: str,
    weight: Tensor,
    scales: Tensor | None,
    global_scale: Tensor | None,
    *letters: str,
    dtype: torch.dtype,
    decoded: bool = False,
) -> None:
    """Check a weight of any form.

    Args:
        axes: of the call.
        name: of the weight's parameter.
        weight: [N, K] or [L, N, K] of `dtype`, or codes.
        scales: see the module docstring.
        global_scale: see the module docstring.
        *letters: two or three axes of the matrix; the last may be new to `axes`.
        dtype: of the weight if it is not quantized.
        decoded: whether the operator takes a global scale beside such a weight.

    Raises:
        BuildError: a shape or dtype does not fit, or the three do not make one form.
    """
    prefix = "" if name in ("weight", "codes") else f"{name}_"
    *rows, columns = letters
    if scales is None:
        axes.require(
            decoded or global_scale is None,
            f"{prefix}global_scale is a tensor, expected None without scales",
        )
        axes.fit(name, weight, *letters, dtype=dtype)
        if global_scale is not None:
            axes.fit(f"{prefix}global_scale", global_scale, rows[0], dtype=torch.float32)
        return
    axes.fit(name, weight, *rows, f"{columns}/2", dtype=torch.uint8)
    axes.fit(f"{prefix}scales", scales, *rows, f"{columns}/{BLOCK}", dtype=torch.uint8)
    axes.require(global_scale is not None, f"{prefix}global_scale is None, expected float32")
    assert global_scale is not None
    axes.fit(
        f"{prefix}global_scale",
        global_scale,
        rows[0] if len(rows) == 2 else 1,
        dtype=torch.float32,
    )
    num_columns = 2 * weight.shape[-1]
    wanted = axes.sizes.setdefault(columns, num_columns)
    axes.require(
        num_columns == wanted and BLOCK * scales.shape[-1] == num_columns,
        f"{name} has {num_columns} columns and {prefix}scales has {scales.shape[-1]}, expected "
        f"{columns}={wanted} and {columns}/{BLOCK}",
    )
