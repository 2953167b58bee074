"""Independent oracles of the quantizing operators; the contract is that of `oracles.py`.

Their results are defined bit by bit in float32, so these go through a row value by value in numpy's
float32 numbers; the narrow formats round by looking for the nearest of all their values.
"""

from collections.abc import Sequence

import numpy as np
import torch
from oracles import Oracle, Result
from oracles_flint import e2m1, e4m3
from torch import Tensor

F32 = np.float32
LARGEST = np.finfo(F32).max
E2M1_VALUES = e2m1(np.arange(8)).tolist()
E4M3_VALUES = e4m3(np.arange(0x7F)).tolist()


def nearest(value: F32, values: Sequence[float]) -> int:
    """The number of the nearest value, of two that are equally near the even one."""
    size = min(float(value), values[-1])
    return min(range(len(values)), key=lambda code: (abs(values[code] - size), code % 2))


def reciprocal(value: F32) -> F32:
    return min(F32(1) / value, LARGEST)


Block = tuple[list[int], int, F32]


def four_over_six(
    block: Sequence[F32], row: F32, enc: F32, e4m3_max: int, factors: Sequence[float] = (1, 1.5)
) -> Block:
    """Codes, scale and error of the first of the best candidates: 1 is max at 6, 1.5 max at 4."""
    big = max(abs(value) for value in block)
    if big == 0:
        return [0] * 16, 0, F32(0)
    found: list[Block] = []
    for factor in factors:
        scale_code = nearest(F32(big / F32(6)) * enc * F32(factor), E4M3_VALUES)
        scale = F32(E4M3_VALUES[scale_code])
        multiplier = reciprocal(scale * (F32(1) / enc))
        codes, error = [], F32(0)
        for value in block:
            code = nearest(abs(value * multiplier), E2M1_VALUES)
            code += 8 * int(np.signbit(value))
            back = ((F32(e2m1(np.array(code))) * scale) * row) / F32(6 * e4m3_max)
            error = error + abs(back - value)
            codes.append(code)
        found.append((codes, scale_code, error))
    return min(found, key=lambda candidate: candidate[2])


@np.errstate(all="ignore")
def quantize_nvfp4(x: Tensor, e4m3_max: int) -> Result:
    num_rows, width = x.shape
    codes = np.zeros((num_rows, width // 2), np.uint8)
    scales = np.zeros((num_rows, width // 16), np.uint8)
    token_scales = np.zeros(num_rows, F32)
    for t, values in enumerate(x.numpy().astype(F32)):
        row = max(abs(value) for value in values)
        if row == 0:
            continue
        enc = min((F32(1) / (F32(1) / F32(6 * e4m3_max))) / row, LARGEST)
        token_scales[t] = F32(1) / enc
        for b in range(width // 16):
            block = values[16 * b : 16 * b + 16]
            own, scales[t, b], _ = four_over_six(block, row, enc, e4m3_max)
            for i in range(8):
                codes[t, 8 * b + i] = own[2 * i] + 16 * own[2 * i + 1]
    return (torch.tensor(codes), torch.tensor(scales), torch.tensor(token_scales).double()), {}


@np.errstate(all="ignore")
def quantize_mxfp8(x: Tensor) -> Result:
    codes = np.zeros(x.shape, np.uint8)
    exponents = np.zeros((len(x), x.shape[1] // 32), np.uint8)
    for t, values in enumerate(x.numpy().astype(F32)):
        for b in range(x.shape[1] // 32):
            block = values[32 * b : 32 * b + 32]
            least = float(max(abs(value) for value in block) * (F32(1) / F32(448)))
            exponent = 0
            while least > 2.0 ** (exponent - 127):
                exponent += 1
            exponents[t, b] = exponent
            for i, value in enumerate(block):
                size = 0.0 if exponent == 0 else abs(float(value)) * 2.0 ** (127 - exponent)
                code = nearest(F32(size), E4M3_VALUES)
                codes[t, 32 * b + i] = code + 128 * int(np.signbit(value))
    return (torch.tensor(codes), torch.tensor(exponents)), {}


ORACLES_QUANTIZE: dict[str, Oracle] = {
    function.__name__: function for function in (quantize_nvfp4, quantize_mxfp8)
}
