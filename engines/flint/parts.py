"""Weights of Flint, which are plain or NVFP4; the convention is that of `plugins.nvfp4`."""

import torch
from torch import Tensor, nn

from inkrt.engines.parts import ink, parameter
from inkrt.plugins.nvfp4 import BLOCK


class Matrix(nn.Module):
    """A matrix [N, K], or a stack of them [L, N, K], in either form.

    Args:
        *shape: of it.
        dtype: of values.
        is_nvfp4: whether the checkpoint has codes.
        is_decoded: of a stack, whether the engine has their values instead.
    """

    scales: nn.Parameter | None
    global_scale: nn.Parameter | None

    def __init__(
        self, *shape: int, dtype: torch.dtype, is_nvfp4: bool, is_decoded: bool = False
    ) -> None:
        super().__init__()
        *rows, width = shape
        stack = rows[0] if len(rows) == 2 else 1
        if is_nvfp4 and is_decoded:
            self.weight = parameter(*shape, dtype=dtype)
            self.scales = None
            self.global_scale = parameter(stack, dtype=torch.float32)
        elif is_nvfp4:
            self.weight = parameter(*rows, width // 2, dtype=torch.uint8)
            self.scales = parameter(*rows, width // BLOCK, dtype=torch.uint8)
            self.global_scale = parameter(stack, dtype=torch.float32)
        else:
            self.weight = parameter(*shape, dtype=dtype)
            self.scales = None
            self.global_scale = None

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The three arguments as which operators take it."""
        return self.weight, self.scales, self.global_scale

    def forward(self, x_TK: Tensor, *, in_float32: bool = False) -> Tensor:
        """Project rows [T, K] to [T, N], rounded to x's dtype unless `in_float32`."""
        y_TN: Tensor
        if self.scales is None:
            y_TN = ink.linear(x_TK, self.weight, in_float32)
        else:
            y_TN = ink.linear_nvfp4(x_TK, *self.parts, in_float32)
        return y_TN
