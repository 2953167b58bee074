"""What attention, experts and the layers around them are made of."""

import torch
from torch import Tensor, nn

from inkrt.engines.interface import StateOptions, StepInputs, ring_tokens
from inkrt.engines.parts import ink, parameter
from inkrt.engines.quantization import SCALE_BLOCK, WeightForm


def conv_state(channels: int, taps: int, dtype: torch.dtype, state: StateOptions) -> Tensor:
    """The ring [slots, R, channels] of a convolution's last inputs, on the meta device."""
    shape = (state.num_slots, ring_tokens(taps - 1), channels)
    return torch.empty(shape, dtype=dtype, device="meta")


class QuantizedWeight(nn.Module):
    """A quantized matrix [N, K] or a stack of them [L, N, K]: `plugins.nvfp4` or `.mxfp8`."""

    def __init__(self, *shape: int, form: WeightForm) -> None:
        super().__init__()
        *stack, rows, width = shape
        self.form = form
        scales = (*stack, rows, width // SCALE_BLOCK[form])
        if form == "nvfp4":
            self.codes = parameter(*stack, rows, width // 2, dtype=torch.uint8)
            self.scales = parameter(*scales, dtype=torch.uint8)
            self.global_scale = parameter(*(stack or [1]), dtype=torch.float32)
        else:
            self.e4m3 = parameter(*shape, dtype=torch.uint8)
            self.exponents = parameter(*scales, dtype=torch.uint8)


class ScaledWeight(nn.Module):
    """Matrices [L, N, K] with a float32 factor each: decoded NVFP4."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrix = parameter(*shape, dtype=dtype)
        self.global_scale = parameter(shape[0], dtype=torch.float32)


# Of the parameters of a weight in any form, the one that operators multiply with, behind its name.
MATRIX_ENDS = ("", ".codes", ".e4m3", ".matrix")
StoredWeight = nn.Parameter | QuantizedWeight | ScaledWeight


def stored_weight(*shape: int, dtype: torch.dtype, form: WeightForm) -> StoredWeight:
    """A matrix [N, K] or matrices [L, N, K], of `dtype` if they are plain or scaled."""
    if form == "plain":
        return parameter(*shape, dtype=dtype)
    if form == "scaled":
        return ScaledWeight(*shape, dtype=dtype)
    return QuantizedWeight(*shape, form=form)


def project(x: Tensor, weight: StoredWeight) -> Tensor:
    """Rows x [T, K] times a transposed matrix of any form that checkpoints have."""
    assert not isinstance(weight, ScaledWeight), "only experts are decoded"
    out: Tensor
    if isinstance(weight, nn.Parameter):
        out = ink.linear(x, weight, False)
    elif weight.form == "nvfp4":
        out = ink.linear_nvfp4(x, weight.codes, weight.scales, weight.global_scale, False)
    else:
        out = ink.linear_mxfp8(x, weight.e4m3, weight.exponents, False)
    return out


def operator_parts(weight: StoredWeight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The three arguments as which operators of experts take matrices."""
    if isinstance(weight, nn.Parameter):
        return weight, None, None
    if isinstance(weight, ScaledWeight):
        return weight.matrix, None, weight.global_scale
    if weight.form == "nvfp4":
        return weight.codes, weight.scales, weight.global_scale
    return weight.e4m3, weight.exponents, None


class ShortConv(nn.Module):
    """Static depthwise causal convolution over the last W inputs, with their ring of state.

    Args:
        channels: of inputs and outputs.
        taps: W.
        dtype: of inputs.
        state: of the engine.
        is_scaled: whether the sum of convolution and input is divided by sqrt(W + 1).
    """

    def __init__(
        self,
        channels: int,
        taps: int,
        dtype: torch.dtype,
        state: StateOptions,
        *,
        is_scaled: bool = True,
    ) -> None:
        super().__init__()
        self.is_scaled = is_scaled
        self.weight = parameter(channels, taps, dtype=torch.float32)
        self.state: Tensor
        self.register_buffer("state", conv_state(channels, taps, dtype, state))

    def forward(self, u_TC: Tensor, step: StepInputs) -> Tensor:
        """Map inputs [T, channels] to outputs [T, channels]."""
        where = (self.state, step.position, step.num_tokens, step.slot)
        y_TC: Tensor = ink.short_conv(u_TC, self.weight, *where, self.is_scaled)
        return y_TC


class DynamicShortConv(nn.Module):
    """Causal convolution whose taps are static per channel plus dynamic per token and head."""

    def __init__(
        self,
        num_heads: int,
        channels: int,
        taps: int,
        hidden_size: int,
        dtype: torch.dtype,
        state: StateOptions,
    ) -> None:
        super().__init__()
        self.static_weight = parameter(taps, channels, dtype=dtype)
        self.dynamic_proj = parameter(num_heads * taps, hidden_size, dtype=dtype)
        self.state: Tensor
        self.register_buffer("state", conv_state(channels, taps, dtype, state))

    def forward(self, u_TC: Tensor, x_TD: Tensor, step: StepInputs) -> Tensor:
        """Convolve u [T, channels] with the taps that x [T, D] gives."""
        dynamic = ink.linear(x_TD, self.dynamic_proj, False)
        y_TC: Tensor = ink.dynamic_short_conv(
            u_TC,
            self.static_weight,
            dynamic,
            self.state,
            step.position,
            step.num_tokens,
            step.slot,
        )
        return y_TC
