"""Gated grouped-query attention with a relative bias, per-token sinks and short convolutions.

Sliding layers take one input for queries, keys and values (three where messages have come in, see
`inkling2_loop`), convolve keys and values statically and keep them in a ring; full layers take
three inputs, convolve dynamically, scale queries with the logarithm of the position and keep keys
and values in pages. Shape letters: see model.py.
"""

import torch
from torch import Tensor, nn

from inkrt.engines.inkling2.config import Inkling2Config
from inkrt.engines.inkling2.parts import DynamicShortConv, ShortConv, project, stored_weight
from inkrt.engines.interface import StateOptions, StepInputs, ring_tokens
from inkrt.engines.parts import ink, parameter


class Attention(nn.Module):
    """One attention layer."""

    def __init__(
        self,
        config: Inkling2Config,
        layer: int,
        tp_size: int,
        dtype: torch.dtype,
        state: StateOptions,
    ) -> None:
        super().__init__()
        shape = config.attention(layer)
        self.config = config
        self.shape = shape
        self.is_sliding = config.is_sliding[layer]
        self.num_heads = shape.num_heads // tp_size
        self.num_kv_heads = shape.num_kv_heads // tp_size
        hidden, d_rel = config.hidden_size, config.d_rel
        q_width = self.num_heads * shape.head_dim
        kv_width = self.num_kv_heads * shape.head_dim

        forms = config.projections[layer]
        rel_width = self.num_heads * d_rel
        self.wq = stored_weight(q_width, hidden, dtype=dtype, form=forms.wq)
        self.wk = stored_weight(kv_width, hidden, dtype=dtype, form=forms.wk)
        self.wv = stored_weight(kv_width, hidden, dtype=dtype, form=forms.wv)
        self.wr = stored_weight(rel_width, hidden, dtype=dtype, form=forms.wr)
        self.wsink = parameter(self.num_heads, hidden, dtype=dtype)
        self.wgate = stored_weight(q_width, hidden, dtype=dtype, form=forms.wgate)
        self.wo = stored_weight(hidden, q_width, dtype=dtype, form=forms.wo)
        self.q_scale = parameter(self.num_heads, shape.head_dim, dtype=dtype)
        self.rel_scale = parameter(self.num_heads, d_rel, dtype=dtype)
        self.rel_bank = parameter(d_rel, shape.rel_extent, dtype=dtype)
        if self.is_sliding:
            self.k_conv: nn.Module = ShortConv(kv_width, config.conv_kernel_size, dtype, state)
            self.v_conv: nn.Module = ShortConv(kv_width, config.conv_kernel_size, dtype, state)
            ring = ring_tokens(shape.window - 1, state.kv_ring_multiple, state.kv_ring_ahead)
            rows = (state.num_slots, ring)
        else:
            taps = config.conv_kernel_size
            self.k_conv = DynamicShortConv(self.num_kv_heads, kv_width, taps, hidden, dtype, state)
            self.v_conv = DynamicShortConv(self.num_kv_heads, kv_width, taps, hidden, dtype, state)
            rows = (state.num_pages, state.page_tokens)
        cache = (*rows, self.num_kv_heads, shape.head_dim)
        self.k_cache: Tensor
        self.v_cache: Tensor
        self.register_buffer("k_cache", torch.empty(cache, dtype=dtype, device="meta"))
        self.register_buffer("v_cache", torch.empty(cache, dtype=dtype, device="meta"))

    def forward(self, inputs: list[Tensor], step: StepInputs) -> Tensor:
        """One normed input [T, D], or three for queries, keys and values, to [T, D]."""
        x_q, x_k, x_v = inputs * 3 if len(inputs) == 1 else inputs
        config, shape = self.config, self.shape
        num_tokens = x_q.shape[0]
        q_THd = project(x_q, self.wq).view(num_tokens, self.num_heads, shape.head_dim)
        rel_THr = project(x_q, self.wr).view(num_tokens, self.num_heads, config.d_rel)
        q_THd = ink.l2_clip(q_THd, self.q_scale, config.qk_l2_clip_threshold)
        rel_THr = ink.l2_clip(rel_THr, self.rel_scale, config.rel_l2_clip_threshold)
        if not self.is_sliding:
            floor, alpha = config.log_scaling_n_floor, config.log_scaling_alpha
            q_THd = ink.log_scale(q_THd, step.position, floor, alpha)
            rel_THr = ink.log_scale(rel_THr, step.position, floor, alpha)

        k_TC, v_TC = project(x_k, self.wk), project(x_v, self.wv)
        if self.is_sliding:
            k_TC, v_TC = self.k_conv(k_TC, step), self.v_conv(v_TC, step)
        else:
            k_TC, v_TC = self.k_conv(k_TC, x_k, step), self.v_conv(v_TC, x_v, step)
        k_TKd = k_TC.view(num_tokens, self.num_kv_heads, shape.head_dim)
        v_TKd = v_TC.view(num_tokens, self.num_kv_heads, shape.head_dim)
        k_TKd = ink.l2_clip(k_TKd, None, config.qk_l2_clip_threshold)
        v_TKd = ink.rms_norm(v_TKd, None, config.rms_norm_eps, v_TKd.dtype)

        sinks_TH = ink.linear(x_q, self.wsink, False)
        page_table = None if self.is_sliding else step.page_table
        o_THd = ink.relative_attention(
            q_THd,
            k_TKd,
            v_TKd,
            rel_THr,
            self.rel_bank,
            sinks_TH,
            self.k_cache,
            self.v_cache,
            page_table,
            step.position,
            step.num_tokens,
            step.slot,
            shape.window,
            shape.head_dim**-0.5,
        )
        # A long prefill step overwrites ring rows that its first queries still read: write last.
        ink.kv_write(
            k_TKd,
            v_TKd,
            self.k_cache,
            self.v_cache,
            page_table,
            step.position,
            step.num_tokens,
            step.slot,
        )
        gate = project(x_q, self.wgate)
        gated = ink.sigmoid_gate(o_THd.view(num_tokens, -1), gate)
        return project(gated, self.wo)
