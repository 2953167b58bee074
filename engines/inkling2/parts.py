"""Short convolutions, which attention and the layers around it share."""

import torch
from torch import Tensor, nn

from inkrt.engines.interface import StateOptions, StepInputs, ring_tokens
from inkrt.engines.parts import ink, parameter


def conv_state(channels: int, taps: int, dtype: torch.dtype, state: StateOptions) -> Tensor:
    """The ring [slots, R, channels] of a convolution's last inputs, on the meta device."""
    shape = (state.num_slots, ring_tokens(taps - 1), channels)
    return torch.empty(shape, dtype=dtype, device="meta")


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
