"""A decoder layer of Inkling, which is also what an MTP head is made of.

Shape letters: see model.py. `first_row` is the position of the first token that the layer has an
input for: 0 but in MTP heads, whose rows before it are zeros and stay zeros.
"""

import torch
from torch import Tensor, nn

from inkrt.engines.inkling.config import InklingConfig
from inkrt.engines.inkling2.config import AttentionShape
from inkrt.engines.inkling2.parts import ShortConv, operator_parts, stored_weight
from inkrt.engines.interface import Sharding, StateOptions, StepInputs, ring_tokens
from inkrt.engines.parts import ink, parameter
from inkrt.engines.quantization import WeightForm


class Attention(nn.Module):
    """Grouped-query attention with a relative bias, convolved keys and values and head norms."""

    def __init__(
        self,
        config: InklingConfig,
        shape: AttentionShape,
        tp_size: int,
        dtype: torch.dtype,
        state: StateOptions,
        first_row: int,
    ) -> None:
        super().__init__()
        self.config = config
        self.shape = shape
        self.first_row = first_row
        self.num_heads = shape.num_heads // tp_size
        self.num_kv_heads = shape.num_kv_heads // tp_size
        hidden, size, taps = config.hidden_size, shape.head_dim, config.conv_kernel_size
        q_width, kv_width = self.num_heads * size, self.num_kv_heads * size
        self.wq = parameter(q_width, hidden, dtype=dtype)
        self.wk = parameter(kv_width, hidden, dtype=dtype)
        self.wv = parameter(kv_width, hidden, dtype=dtype)
        self.wr = parameter(self.num_heads * config.d_rel, hidden, dtype=dtype)
        self.wo = parameter(hidden, q_width, dtype=dtype)
        self.q_norm = parameter(size, dtype=dtype)
        self.k_norm = parameter(size, dtype=dtype)
        self.rel_bank = parameter(config.d_rel, shape.rel_extent, dtype=dtype)
        self.k_conv = ShortConv(kv_width, taps, dtype, state, is_scaled=False)
        self.v_conv = ShortConv(kv_width, taps, dtype, state, is_scaled=False)
        rows = (state.num_pages, state.page_tokens)
        if shape.window:
            ring = ring_tokens(shape.window - 1, state.kv_ring_multiple, state.kv_ring_ahead)
            rows = (state.num_slots, ring)
        cache = (*rows, self.num_kv_heads, size)
        self.k_cache: Tensor
        self.v_cache: Tensor
        self.register_buffer("k_cache", torch.empty(cache, dtype=dtype, device="meta"))
        self.register_buffer("v_cache", torch.empty(cache, dtype=dtype, device="meta"))

    def forward(self, x_TD: Tensor, step: StepInputs) -> Tensor:
        """[T, D] to [T, D]."""
        config, shape, eps = self.config, self.shape, self.config.rms_norm_eps
        num_tokens, dtype = x_TD.shape[0], x_TD.dtype
        q_THd = ink.linear(x_TD, self.wq, False).view(num_tokens, self.num_heads, shape.head_dim)
        q_THd = ink.rms_norm(q_THd, self.q_norm, eps, dtype)
        rel_THr = ink.linear(x_TD, self.wr, False).view(num_tokens, self.num_heads, config.d_rel)
        if config.log_scaling_n_floor is not None and not shape.window:
            growth = (step.position, config.log_scaling_n_floor, config.log_scaling_alpha)
            q_THd, rel_THr = ink.log_scale(q_THd, *growth), ink.log_scale(rel_THr, *growth)
        k_TC = self.k_conv(ink.linear(x_TD, self.wk, False), step)
        v_TC = self.v_conv(ink.linear(x_TD, self.wv, False), step)
        k_TKd = k_TC.view(num_tokens, self.num_kv_heads, shape.head_dim)
        k_TKd = ink.rms_norm(k_TKd, self.k_norm, eps, dtype)
        v_TKd = v_TC.view(num_tokens, self.num_kv_heads, shape.head_dim)
        page_table = None if shape.window else step.page_table
        where = (self.k_cache, self.v_cache, page_table, step.position, step.num_tokens, step.slot)
        o_THd = ink.relative_attention(
            q_THd,
            k_TKd,
            v_TKd,
            rel_THr,
            self.rel_bank,
            None,
            *where,
            shape.window,
            1 / shape.head_dim,
            self.first_row,
        )
        if step.num_tokens is not None:
            # Last: a long prefill step overwrites ring rows that its first queries still read.
            ink.kv_write(k_TKd, v_TKd, *where)
        out_TD: Tensor = ink.linear(o_THd.view(num_tokens, -1), self.wo, False)
        return out_TD


class DenseMlp(nn.Module):
    """A gated MLP whose output a learned number scales."""

    def __init__(self, config: InklingConfig, tp_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size // tp_size
        self.gate_up = parameter(2 * width, hidden, dtype=dtype)
        self.down = parameter(hidden, width, dtype=dtype)
        self.global_scale = parameter(1, dtype=dtype)

    def forward(self, z_TD: Tensor, step: StepInputs) -> Tensor:  # noqa: ARG002 (as Experts)
        """[T, D] to [T, D]."""
        a_TF = ink.silu_mul(ink.linear(z_TD, self.gate_up, False))
        out_TD: Tensor = ink.scale(ink.linear(a_TF, self.down, False), self.global_scale, 1.0)
        return out_TD


class Experts(nn.Module):
    """Routed experts and shared ones, which compete with them for a token's weight."""

    def __init__(
        self, config: InklingConfig, sharding: Sharding, dtype: torch.dtype, form: WeightForm
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        hidden, num_shared = config.hidden_size, config.n_shared_experts
        num_own, width = config.n_routed_experts, config.moe_intermediate_size
        shared_width = width // sharding.tp_size
        self.is_split_by_expert = sharding.tp_size > 1 and sharding.moe_split == "experts"
        if self.is_split_by_expert:
            num_own //= sharding.tp_size
        else:
            width = shared_width
        num_rows = config.n_routed_experts + num_shared
        self.router = parameter(num_rows, hidden, dtype=torch.float32)
        self.router_bias = parameter(config.n_routed_experts, dtype=torch.float32)
        self.router_scale = parameter(1, dtype=torch.float32)
        self.gate_up = stored_weight(num_own, 2 * width, hidden, dtype=dtype, form=form)
        self.down = stored_weight(num_own, hidden, width, dtype=dtype, form=form)
        self.shared_gate_up = parameter(num_shared, 2 * shared_width, hidden, dtype=dtype)
        self.shared_down = parameter(num_shared, hidden, shared_width, dtype=dtype)

    def forward(self, z_TD: Tensor, step: StepInputs) -> Tensor:
        """[T, D] to [T, D]."""
        config = self.config
        weights_TE, experts_TE, shared_TS, shared_ids_TS = ink.sink_router(
            z_TD,
            self.router,
            self.router_bias,
            self.router_scale,
            config.num_experts_per_tok,
            config.route_scale,
        )
        routed_TD = ink.swiglu_experts(
            z_TD,
            weights_TE,
            experts_TE,
            *operator_parts(self.gate_up),
            *operator_parts(self.down),
            step.rank if self.is_split_by_expert else None,
            False,
        )
        shared_TD = ink.swiglu_experts(
            z_TD,
            shared_TS,
            shared_ids_TS,
            *operator_parts(self.shared_gate_up),
            *operator_parts(self.shared_down),
            None,
            False,
        )
        out_TD: Tensor = ink.residual_add(routed_TD, shared_TD, self.dtype)
        return out_TD


class Layer(nn.Module):
    """Attention and MLP, each normed before and convolved behind.

    Args:
        config: of the model.
        is_sliding: kind of attention.
        is_dense: kind of MLP.
        sharding: how ranks share the layer.
        dtype: compute dtype.
        state: of the engine.
        first_row: see the module.
        experts: form of the routed experts.
    """

    def __init__(
        self,
        config: InklingConfig,
        *,
        is_sliding: bool,
        is_dense: bool,
        sharding: Sharding,
        dtype: torch.dtype,
        state: StateOptions,
        first_row: int = 0,
        experts: WeightForm = "plain",
    ) -> None:
        super().__init__()
        hidden, taps, tp_size = config.hidden_size, config.conv_kernel_size, sharding.tp_size
        shape = config.attention(is_sliding=is_sliding)
        self.eps = config.rms_norm_eps
        self.dtype = dtype
        self.attn_norm = parameter(hidden, dtype=dtype)
        self.attn = Attention(config, shape, tp_size, dtype, state, first_row)
        self.attn_conv = ShortConv(hidden, taps, dtype, state, is_scaled=False)
        self.mlp_norm = parameter(hidden, dtype=dtype)
        self.mlp: nn.Module = (
            DenseMlp(config, tp_size, dtype)
            if is_dense
            else Experts(config, sharding, dtype, experts)
        )
        self.mlp_conv = ShortConv(hidden, taps, dtype, state, is_scaled=False)

    def forward(self, h_TD: Tensor, step: StepInputs) -> Tensor:
        """The residual stream [T, D], before and after."""
        x_TD = ink.rms_norm(h_TD, self.attn_norm, self.eps, self.dtype)
        h_TD = ink.residual_add(h_TD, self.attn_conv(self.attn(x_TD, step), step), self.dtype)
        z_TD = ink.rms_norm(h_TD, self.mlp_norm, self.eps, self.dtype)
        out_TD: Tensor = ink.residual_add(
            h_TD, self.mlp_conv(self.mlp(z_TD, step), step), self.dtype
        )
        return out_TD
