"""Independent float64 oracles of the operators of vision towers; the contract is `oracles.py`'s.

Angles of the rotation are the model's float32 numbers; everything after them is float64.
"""

import math

import numpy as np
import torch
from oracles import Oracle, Result
from torch import Tensor


def biased_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Result:
    return (torch.einsum("tk,nk->tn", x, weight) + bias,), {}


def gelu(x: Tensor) -> Result:
    values = [value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in x.flatten().tolist()]
    return (torch.tensor(values, dtype=torch.float64).view_as(x),), {}


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Result:
    out = torch.empty_like(x)
    for t, row in enumerate(x):
        centered = row - row.sum() / len(row)
        out[t] = centered / math.sqrt(centered.dot(centered).item() / len(row) + eps)
    return (out * weight + bias,), {}


def scaled_add(residual: Tensor, update: Tensor, scale: Tensor) -> Result:
    return (torch.stack([r + u * scale for r, u in zip(residual, update, strict=True)]),), {}


def axial_rope(x: Tensor, positions: Tensor, theta: float) -> Result:
    quarter = x.shape[-1] // 4
    exponents = torch.arange(0, 2 * quarter, 2, dtype=torch.float32) / (2 * quarter)
    frequencies = (1.0 / theta**exponents).numpy()
    out = torch.empty_like(x)
    for t, (row, column) in enumerate(positions.tolist()):
        for i in range(quarter):
            for pair, place in ((i, column), (quarter + i, row)):
                angle = float(np.float32(place) * frequencies[i])
                number = complex(math.cos(angle), math.sin(angle))
                turned = torch.view_as_complex(x[t, :, 2 * pair : 2 * pair + 2]) * number
                out[t, :, 2 * pair : 2 * pair + 2] = torch.view_as_real(turned)
    return (out,), {}


def grid_embedding(
    x: Tensor,
    positions: Tensor,
    grid: Tensor,
    table: Tensor,
    class_token: Tensor,
    class_position: Tensor,
) -> Result:
    """By torch's own resampling of the whole table; patches then pick their rows."""
    rows, columns = grid.tolist()
    image = torch.nn.functional.interpolate(
        table.permute(2, 0, 1)[None], size=(rows, columns), mode="bilinear", align_corners=False
    )[0]
    out = [class_token + class_position]
    for value, (row, column) in zip(x, positions[1:].tolist(), strict=True):
        is_patch = row > 0
        out.append(value + image[:, row - 1, column - 1] if is_patch else value * math.nan)
    return (torch.stack(out),), {}


def bidirectional_attention(
    q: Tensor, k: Tensor, v: Tensor, num_rows: Tensor, scale: float
) -> Result:
    count = num_rows.item()
    out = torch.zeros_like(q)
    for h in range(q.shape[1]):
        for t in range(count):
            scores = k[:count, h] @ q[t, h] * scale
            weights = torch.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ v[:count, h]
    return (out,), {}


ORACLES_VISION: dict[str, Oracle] = {
    function.__name__: function
    for function in (
        biased_linear,
        gelu,
        layer_norm,
        scaled_add,
        axial_rope,
        grid_embedding,
        bidirectional_attention,
    )
}
