"""The Flint text model of one rank, written to be traced.

Equations: flint.md section 4, with the roundings of section 5's reference column. They are those of
the operators called here and differ from transformers' in bfloat16. Tensors carry shape letters: T
tokens of the step, D hidden, H query heads, K key/value heads, d head dimension, E experts, k
experts of a token, V vocabulary. All are this rank's share unless said otherwise; x, the residual
stream, and its norm z have the full width D on every rank.

A sub-layer's output is added to the residual stream by the norm in front of the next one, which
reads the unrounded sum. Every state buffer is indexed by absolute position. Calls are operators of
ours or view operations; communication is placed by the builder.
"""

import torch
from torch import Tensor, nn

from inkrt.engines.flint.config import FlintConfig
from inkrt.engines.flint.parts import Matrix
from inkrt.engines.interface import (
    Sharding,
    StateBuffer,
    StateOptions,
    StepInputs,
    ring_tokens,
    vocabulary_share,
)
from inkrt.engines.parts import ink, parameter


class Attention(nn.Module):
    """Grouped-query attention with norms of query and key heads and a sink per head."""

    def __init__(
        self,
        config: FlintConfig,
        layer: int,
        tp_size: int,
        dtype: torch.dtype,
        state: StateOptions,
    ) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads // tp_size
        self.num_kv_heads = config.num_key_value_heads // tp_size
        is_sliding = config.is_sliding[layer]
        self.window = config.sliding_window if is_sliding else 0
        self.rope_theta = config.rope_theta if is_sliding else 0.0

        num_rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        width = self.num_heads * self.head_dim
        is_nvfp4 = config.has_nvfp4
        self.qkv = Matrix(num_rows, config.hidden_size, dtype=dtype, is_nvfp4=is_nvfp4)
        self.q_norm = parameter(self.head_dim, dtype=dtype)
        self.k_norm = parameter(self.head_dim, dtype=dtype)
        self.sinks = parameter(self.num_heads, dtype=torch.float32)
        self.o_proj = Matrix(config.hidden_size, width, dtype=dtype, is_nvfp4=is_nvfp4)
        if is_sliding:
            ring = ring_tokens(self.window - 1, state.kv_ring_multiple, state.kv_ring_ahead)
            rows = (state.num_slots, ring)
        else:
            rows = (state.num_pages, state.page_tokens)
        cache = (*rows, self.num_kv_heads, self.head_dim)
        self.k_cache: Tensor
        self.v_cache: Tensor
        self.register_buffer("k_cache", torch.empty(cache, dtype=dtype, device="meta"))
        self.register_buffer("v_cache", torch.empty(cache, dtype=dtype, device="meta"))

    def forward(self, z_TD: Tensor, step: StepInputs) -> Tensor:
        """[T, D] to [T, D]."""
        qkv_TN = self.qkv(z_TD)
        q_THd = self._heads(qkv_TN, 0, self.num_heads)
        k_TKd = self._heads(qkv_TN, self.num_heads, self.num_kv_heads)
        v_TKd = self._heads(qkv_TN, self.num_heads + self.num_kv_heads, self.num_kv_heads)
        q_THd = ink.rms_norm(q_THd, self.q_norm, self.eps, z_TD.dtype)
        k_TKd = ink.rms_norm(k_TKd, self.k_norm, self.eps, z_TD.dtype)
        if self.rope_theta > 0:
            q_THd = ink.rope(q_THd, step.position, self.rope_theta)
            k_TKd = ink.rope(k_TKd, step.position, self.rope_theta)
        page_table = None if self.window else step.page_table
        where = (self.k_cache, self.v_cache, page_table, step.position, step.num_tokens, step.slot)
        o_THd = ink.sink_attention(
            q_THd, k_TKd, v_TKd, self.sinks, *where, self.window, self.head_dim**-0.5
        )
        # A long prefill step overwrites ring rows that its first queries still read: write last.
        ink.kv_write(k_TKd, v_TKd, *where)
        out_TD: Tensor = self.o_proj(o_THd.view(z_TD.shape[0], -1))
        return out_TD

    def _heads(self, rows_TN: Tensor, first: int, count: int) -> Tensor:
        """Heads first..first+count-1 of rows of all heads, [T, count, d]."""
        columns = rows_TN[:, first * self.head_dim : (first + count) * self.head_dim]
        return columns.view(rows_TN.shape[0], count, self.head_dim)


class DenseMlp(nn.Module):
    """A gated MLP, of a layer without experts or the part of the experts that all tokens share."""

    def __init__(self, hidden_size: int, width: int, dtype: torch.dtype, *, is_nvfp4: bool) -> None:
        super().__init__()
        self.gate_up = Matrix(2 * width, hidden_size, dtype=dtype, is_nvfp4=is_nvfp4)
        self.down = Matrix(hidden_size, width, dtype=dtype, is_nvfp4=is_nvfp4)

    def forward(self, z_TD: Tensor, step: StepInputs) -> Tensor:  # noqa: ARG002 (as Experts)
        """[T, D] to [T, D]."""
        out_TD: Tensor = self.down(ink.silu_mul(self.gate_up(z_TD)))
        return out_TD


class Experts(nn.Module):
    """Sigmoid router, gated experts, and a shared expert that is always added."""

    def __init__(self, config: FlintConfig, sharding: Sharding, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.dtype = dtype
        tp_size, hidden, is_nvfp4 = sharding.tp_size, config.hidden_size, config.has_nvfp4
        num_own, width = config.num_experts, config.moe_intermediate_size
        self.is_split_by_expert = tp_size > 1 and sharding.moe_split == "experts"
        if self.is_split_by_expert:
            num_own //= tp_size
        else:
            width //= tp_size
        self.router = parameter(config.num_experts, hidden, dtype=dtype)
        is_decoded = config.decodes_experts
        self.gate_up = Matrix(
            num_own, 2 * width, hidden, dtype=dtype, is_nvfp4=is_nvfp4, is_decoded=is_decoded
        )
        self.down = Matrix(
            num_own, hidden, width, dtype=dtype, is_nvfp4=is_nvfp4, is_decoded=is_decoded
        )
        shared_width = config.shared_expert_intermediate_size // tp_size
        self.shared = DenseMlp(hidden, shared_width, dtype, is_nvfp4=is_nvfp4)

    def forward(self, z_TD: Tensor, step: StepInputs) -> Tensor:
        """[T, D] to [T, D]."""
        logits_TE = ink.linear(z_TD, self.router, False)
        weights_Tk, experts_Tk = ink.router_top_k(logits_TE, self.top_k)
        rank = step.rank if self.is_split_by_expert else None
        routed_TD = ink.swiglu_experts(
            z_TD, weights_Tk, experts_Tk, *self.gate_up.parts, *self.down.parts, rank, False
        )
        shared_TD = self.shared(z_TD, step)
        out_TD: Tensor = ink.residual_add(routed_TD, shared_TD, self.dtype)
        return out_TD


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(
        self,
        config: FlintConfig,
        layer: int,
        sharding: Sharding,
        dtype: torch.dtype,
        state: StateOptions,
    ) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.dtype = dtype
        self.input_norm = parameter(config.hidden_size, dtype=dtype)
        self.attn = Attention(config, layer, sharding.tp_size, dtype, state)
        self.mlp_norm = parameter(config.hidden_size, dtype=dtype)
        if config.is_dense[layer]:
            width = config.intermediate_size // sharding.tp_size
            self.mlp: nn.Module = DenseMlp(
                config.hidden_size, width, dtype, is_nvfp4=config.has_nvfp4
            )
        else:
            self.mlp = Experts(config, sharding, dtype)

    def forward(
        self, x_TD: Tensor, delta_TD: Tensor | None, step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and what is still to be added to it, before and after."""
        x_TD, z_TD = ink.add_rms_norm(x_TD, delta_TD, self.input_norm, self.eps, self.dtype)
        delta_TD = self.attn(z_TD, step)
        x_TD, z_TD = ink.add_rms_norm(x_TD, delta_TD, self.mlp_norm, self.eps, self.dtype)
        return x_TD, self.mlp(z_TD, step)


class Flint(nn.Module):
    """Token ids to sampled tokens and logits, for one step of one rank."""

    def __init__(
        self,
        config: FlintConfig,
        sharding: Sharding,
        dtype: torch.dtype,
        state: StateOptions,
        last_row_only: bool,
    ) -> None:
        super().__init__()
        self.config = config
        self.tp_size = sharding.tp_size
        self.dtype = dtype
        self.last_row_only = last_row_only
        hidden = config.hidden_size
        self.embed = parameter(config.vocab_size, hidden, dtype=dtype)
        self.layers = nn.ModuleList(
            Layer(config, layer, sharding, dtype, state)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = parameter(hidden, dtype=dtype)
        shard = vocabulary_share(config.vocab_size, self.tp_size)
        self.lm_head = Matrix(shard, hidden, dtype=dtype, is_nvfp4=config.has_nvfp4_head)

    def row_parallel_weights(self) -> frozenset[str]:
        """Parameters that ranks share along the dimension summed over."""
        return frozenset(
            name
            for name, _ in self.named_parameters()
            if name.endswith((".o_proj.weight", ".down.weight"))
        )

    def state_buffers(self) -> list[StateBuffer]:
        """Every state buffer, in module order."""
        return [
            StateBuffer(name, "ring" if self.config.is_sliding[_layer_of(name)] else "paged")
            for name, _ in self.named_buffers()
        ]

    def forward(
        self,
        step: StepInputs,
    ) -> tuple[Tensor, Tensor]:
        """See `StepInputs`; gives tokens int32 [R] and logits float32 [R, V].

        R is T, or 1 with `last_row_only`. Logits are not rounded to the model's dtype.
        """
        x_TD = ink.embedding(step.tokens, self.embed)
        delta_TD: Tensor | None = None
        for layer in self.layers:
            x_TD, delta_TD = layer(x_TD, delta_TD, step)
        eps = self.config.rms_norm_eps
        _, f_TD = ink.add_rms_norm(x_TD, delta_TD, self.norm, eps, self.dtype)
        if self.last_row_only:
            f_TD = ink.last_row(f_TD, step.num_tokens)
        shard_TV = self.lm_head(f_TD, in_float32=True)
        if self.tp_size > 1:
            shard_TV = ink.all_gather(shard_TV, self.tp_size)
        logits_TV = shard_TV[:, : self.config.vocab_size]
        sampled_T = ink.sample(
            logits_TV,
            step.temperature,
            step.top_k,
            step.top_p,
            step.min_p,
            step.seed,
            step.position,
            step.num_tokens,
            self.last_row_only,
        )
        return sampled_T, logits_TV


def _layer_of(name: str) -> int:
    """The layer of a parameter or buffer `layers.<n>....`."""
    return int(name.split(".")[1])
