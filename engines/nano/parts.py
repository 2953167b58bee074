"""Configuration and parts of the training model that attention and the layers around it share.

Shape letters: see model.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

CLIP_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class NanoConfig:
    """Sizes and constants; names are the publisher's."""

    vocab_size: int
    unpadded_vocab_size: int
    eos_token_id: int
    hidden_size: int = 256
    num_hidden_layers: int = 13
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    sliding_window_size: int = 64
    d_rel: int = 8
    rel_extent: int = 128
    log_scaling_n_floor: int = 512
    log_scaling_alpha: float = 0.1
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-6
    conv_kernel_size: int = 4
    moe_intermediate_size: int = 64
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    route_scale: float = 2.0
    qk_l2_clip_threshold: float = 11.313708498984761  # twice the root of head_dim
    rel_l2_clip_threshold: float = 8.0
    n_layers_per_attn_res_block: int = 6
    mlp_gate_softcap: float = 4.0
    mlp_up_softcap: float = 25.0
    final_logit_softcapping: float = 30.0

    def is_full(self, layer: int) -> bool:
        """Whether a layer has full attention: the last of every residual block."""
        return (layer + 1) % 6 == 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the tokens of a batch stand.

    Attributes:
        position: [B, S], counted within the document.
        segment: [B, S], equal for tokens of one document.
    """

    position: Tensor
    segment: Tensor


def plain_rows(tokens: Tensor) -> Rows:
    """One document per sequence of `tokens` [B, S]."""
    position = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    return Rows(position, torch.zeros_like(position))


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """`x` over the root of its mean square along the last dimension, in float32."""
    x = x.float()
    unit: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return unit


def l2_clip(x: Tensor, threshold: float) -> Tensor:
    """`x` shortened to at most `threshold` along the last dimension, in float32."""
    x = x.float()
    # The norm of a zero row has no gradient; the floor is far below float32's rounding of 1e-6.
    norm = x.square().sum(-1, keepdim=True).clamp_min(1e-24).sqrt()
    return x * (threshold / (norm + CLIP_EPS)).clamp_max(1.0)


def shear(rel: Tensor, num_keys: int, first: int) -> Tensor:
    """Bias by key from bias by distance.

    Args:
        rel: [..., Q, X], the bias of query q at distances 0..X-1.
        num_keys: keys; key 0 stands `first` positions before query 0.
        first: distance of query 0 to key 0.

    Returns:
        [..., Q, num_keys]: `rel[q, q + first - key]`, zero where that is no distance of `rel`.
    """
    num_queries, extent = rel.shape[-2:]
    # Reversed and padded by `left`, row q starts at key q of an axis that begins `extent - 1` keys
    # before query 0; rows one longer than the axis move every next row one key on.
    axis = max(num_queries + extent - 1, num_keys + extent - 1 - first)
    padded = functional.pad(rel.flip(-1), (0, axis + 1 - extent))
    flat = padded.flatten(-2)[..., : num_queries * axis]
    by_key = torch.unflatten(flat, -1, (num_queries, axis))
    # Axis index of key k is k - first + extent - 1.
    skip = extent - 1 - first
    if skip < 0:
        return functional.pad(by_key, (-skip, 0))[..., :num_keys]
    return by_key[..., skip : skip + num_keys]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` in the dtype of `x`."""
    return functional.linear(x, weight.to(x.dtype))


def lagged(u: Tensor, lag: int, rows: Rows) -> Tensor:
    """`u` [B, S, C] of `lag` positions before, zero before the document's start."""
    if lag == 0:
        return u
    moved = functional.pad(u, (0, 0, lag, 0))[:, : u.shape[1]]
    return moved * (rows.position >= lag).unsqueeze(-1)


class Weight(nn.Module):
    """A parameter named `weight`."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)


class Norm(Weight):
    """RMS norm with a weight, rounded once."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., size] to the same in `dtype`."""
        return (unit_rms(x, self.eps) * self.weight).to(dtype)


class ShortConv(Weight):
    """Static depthwise causal convolution; index W - 1 of the weight is the current token."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__(torch.randn(channels, 1, taps) * 0.05)

    def forward(self, u: Tensor, rows: Rows) -> Tensor:
        """[B, S, channels] to the same, computed in float32."""
        taps = self.weight.shape[-1]
        u32 = u.float()
        y = u32 * (self.weight[:, 0, taps - 1] + 1.0)
        for lag in range(1, taps):
            y = y + lagged(u32, lag, rows) * self.weight[:, 0, taps - 1 - lag]
        out: Tensor = (y * (taps + 1) ** -0.5).to(u.dtype)
        return out


class DynamicShortConv(nn.Module):
    """Causal convolution with static taps per channel plus taps per token and head."""

    def __init__(self, num_heads: int, channels: int, taps: int, hidden: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.taps = taps
        self.static_w = nn.Parameter(torch.randn(taps, channels) * 0.05)
        self.weight_proj = nn.Parameter(torch.randn(num_heads * taps, hidden) * 0.1 * hidden**-0.5)

    def forward(self, u: Tensor, x: Tensor, rows: Rows) -> Tensor:
        """Inputs [B, S, channels] and what the taps are made of [B, S, D]; float32 inside."""
        dynamic = torch.unflatten(
            linear(x, self.weight_proj).float(), -1, (self.num_heads, self.taps)
        )
        per_head = u.shape[-1] // self.num_heads
        u32 = u.float()
        y = u32
        for lag in range(self.taps):
            weight = dynamic[..., lag].repeat_interleave(per_head, -1) + self.static_w[lag]
            y = y + weight * lagged(u32, lag, rows)
        out: Tensor = (y * (2 * self.taps + 1) ** -0.5).to(u.dtype)
        return out


class Scale(nn.Module):
    """A parameter named `scale`."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(rows, columns))


class RelLogitsProj(nn.Module):
    """What turns relative features into a bias per distance."""

    def __init__(self, d_rel: int, extent: int) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.randn(d_rel, extent) * 0.02)


def matrix(rows: int, columns: int) -> Weight:
    """A random matrix that keeps the variance of its input."""
    return Weight(torch.randn(rows, columns) * columns**-0.5)


def softcap(x: Tensor, cap: float) -> Tensor:
    """`x` squeezed smoothly into (-cap, cap)."""
    return cap * torch.tanh(x / cap)
