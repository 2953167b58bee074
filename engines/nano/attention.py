"""Gated grouped-query attention with relative bias, sinks and short convolutions, for training.

Shape letters: see model.py.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from inkrt.engines.nano.parts import (
    DynamicShortConv,
    NanoConfig,
    RelLogitsProj,
    Rows,
    Scale,
    ShortConv,
    Weight,
    l2_clip,
    linear,
    matrix,
    shear,
    unit_rms,
)


class Attention(nn.Module):
    """Gated grouped-query attention with relative bias, sinks and short convolutions."""

    def __init__(self, config: NanoConfig, *, is_full: bool) -> None:
        super().__init__()
        self.config = config
        self.is_full = is_full
        hidden, taps = config.hidden_size, config.conv_kernel_size
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        width, kv_width = heads * config.head_dim, kv * config.head_dim
        self.wq_du = matrix(width, hidden)
        self.wk_dv = matrix(kv_width, hidden)
        self.wv_dv = matrix(kv_width, hidden)
        self.wr_du = matrix(heads * config.d_rel, hidden)
        self.gate_attn = matrix(width, hidden)
        self.attn_sink_proj = Weight(torch.zeros(heads, hidden))
        self.wo_ud = matrix(hidden, width)
        self.q_l2_clip = Scale(heads, config.head_dim)
        self.rel_l2_clip = Scale(heads, config.d_rel)
        extent = config.rel_extent if is_full else config.sliding_window_size
        self.rel_logits_proj = RelLogitsProj(config.d_rel, extent)
        self.k_sconv: nn.Module
        self.v_sconv: nn.Module
        if is_full:
            self.k_sconv = DynamicShortConv(kv, kv_width, taps, hidden)
            self.v_sconv = DynamicShortConv(kv, kv_width, taps, hidden)
        else:
            self.k_sconv = ShortConv(kv_width, taps)
            self.v_sconv = ShortConv(kv_width, taps)

    def forward(self, inputs: list[Tensor], rows: Rows) -> Tensor:
        """One input [B, S, D] (sliding) or three for queries, keys, values (full)."""
        config = self.config
        x_q, x_k, x_v = inputs if self.is_full else inputs * 3
        dtype = x_q.dtype
        heads, kv, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        q = torch.unflatten(linear(x_q, self.wq_du.weight), -1, (heads, size))
        r = torch.unflatten(linear(x_q, self.wr_du.weight), -1, (heads, config.d_rel))
        q = l2_clip(q.float() * self.q_l2_clip.scale, config.qk_l2_clip_threshold).to(dtype)
        r = l2_clip(r.float() * self.rel_l2_clip.scale, config.rel_l2_clip_threshold).to(dtype)
        if self.is_full:
            ratio = (rows.position + 1) / config.log_scaling_n_floor
            tau = 1.0 + config.log_scaling_alpha * ratio.float().clamp_min(1.0).log()
            tau = tau[..., None, None]
            q, r = (q.float() * tau).to(dtype), (r.float() * tau).to(dtype)
        k, v = linear(x_k, self.wk_dv.weight), linear(x_v, self.wv_dv.weight)
        if self.is_full:
            k, v = self.k_sconv(k, x_k, rows), self.v_sconv(v, x_v, rows)
        else:
            k, v = self.k_sconv(k, rows), self.v_sconv(v, rows)
        k = l2_clip(torch.unflatten(k, -1, (kv, size)), config.qk_l2_clip_threshold).to(dtype)
        v = unit_rms(torch.unflatten(v, -1, (kv, size)), config.rms_norm_eps).to(dtype)
        rel = r @ self.rel_logits_proj.proj.to(dtype)
        sink = linear(x_q, self.attn_sink_proj.weight)
        attend = self._full if self.is_full else self._sliding
        out = attend(q, k, v, rel, sink, rows)
        gate = linear(x_q, self.gate_attn.weight).float().sigmoid()
        return linear((out.flatten(-2).float() * gate).to(dtype), self.wo_ud.weight)

    def _full(
        self, q: Tensor, k: Tensor, v: Tensor, rel: Tensor, sink: Tensor, rows: Rows
    ) -> Tensor:
        """All [B, S, heads, .], sink [B, S, H]; returns [B, S, H, d]."""
        length = q.shape[1]
        bias = shear(rel.transpose(1, 2), length, 0)
        position = torch.arange(length, device=q.device)
        mask = (position[:, None] >= position) & (
            rows.segment[:, :, None] == rows.segment[:, None, :]
        )
        out = _softmax_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            bias,
            sink.transpose(1, 2),
            mask[:, None],
        )
        return out.transpose(1, 2)

    def _sliding(
        self, q: Tensor, k: Tensor, v: Tensor, rel: Tensor, sink: Tensor, rows: Rows
    ) -> Tensor:
        """As `_full`; chunks of one window look at themselves and the chunk before."""
        batch, length = q.shape[:2]
        window = self.config.sliding_window_size
        extra = -length % window
        chunks = (length + extra) // window

        def chunked(x: Tensor) -> Tensor:  # [B, S, N, c] to [B, chunks, N, window, c]
            x = functional.pad(x, (0, 0, 0, 0, 0, extra))
            return torch.unflatten(x, 1, (chunks, window)).transpose(2, 3)

        def with_previous(x: Tensor) -> Tensor:
            return torch.cat([functional.pad(x, (0,) * 6 + (1, 0))[:, :-1], x], dim=3)

        segment = torch.unflatten(
            functional.pad(rows.segment, (0, extra), value=-1), 1, (chunks, window)
        )
        before = functional.pad(segment, (0, 0, 1, 0), value=-2)[:, :-1]
        keys_segment = torch.cat([before, segment], dim=2)
        query = torch.arange(window, device=q.device)
        distance = query[:, None] + window - torch.arange(2 * window, device=q.device)
        mask = (distance >= 0) & (distance < window)
        mask = mask & (segment[..., :, None] == keys_segment[..., None, :])
        out = _softmax_attention(
            chunked(q),
            with_previous(chunked(k)),
            with_previous(chunked(v)),
            shear(chunked(rel), 2 * window, window),
            chunked(sink.unsqueeze(-1)).squeeze(-1),
            mask[:, :, None],
        )
        return out.transpose(2, 3).reshape(batch, chunks * window, *q.shape[2:])[:, :length]


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor, mask: Tensor
) -> Tensor:
    """Attention with a bias [..., H, Q, N] and one sink logit per query and head [..., H, Q].

    Args:
        q: [..., H, Q, d].
        k: [..., K, N, d].
        v: [..., K, N, d].
        bias: added to the scaled products.
        sink: one more logit, whose value is zero.
        mask: [..., 1, Q, N], false where a query does not see a key.
    """
    groups = q.shape[-3] // k.shape[-3]
    grouped = torch.unflatten(q, -3, (k.shape[-3], groups))
    scores = (grouped @ k.unsqueeze(-3).transpose(-1, -2)).flatten(-4, -3) * q.shape[-1] ** -0.5
    scores = (scores + bias).masked_fill(~mask, float("-inf"))
    logits = torch.cat([scores, sink.unsqueeze(-1)], dim=-1)
    weights = logits.softmax(-1, dtype=torch.float32)[..., :-1].to(v.dtype)
    out = torch.unflatten(weights, -3, (k.shape[-3], groups)) @ v.unsqueeze(-3)
    return out.flatten(-4, -3)
