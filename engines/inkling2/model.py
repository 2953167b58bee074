"""The Inkling-2 text model of one rank, written to be traced.

Layer equations: docs/architecture.md and the reference implementation in transformers
(`inkling2`). Tensors carry shape letters: T tokens of the step, D hidden, H query heads, K
key/value heads, d head dimension, r relative width, E experts, F expert width, V vocabulary, W
convolution taps, R ring positions. All are this rank's share unless said otherwise; only h, the
residual blocks and norms have the full width D on every rank.

Every state buffer is indexed by absolute position. Calls are operators of ours or view operations.
The definition only says which weights are split along the dimension that is summed over; the
builder makes those operators give partial sums and places the collectives.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from inkrt.engines.dspark.config import DSparkConfig, TapPoint
from inkrt.engines.dspark.model import Drafter, DraftStep
from inkrt.engines.inkling2.attention import Attention
from inkrt.engines.inkling2.config import Inkling2Config, draft_target
from inkrt.engines.inkling2.parts import MATRIX_ENDS, ShortConv, operator_parts, stored_weight
from inkrt.engines.interface import (
    Sharding,
    StateBuffer,
    StateOptions,
    StepInputs,
    vocabulary_share,
)
from inkrt.engines.parts import ink, parameter

# Epsilon of the norms inside the residual mix: the reference's constant, not rms_norm_eps.
MIX_EPS = 1e-6


class Experts(nn.Module):
    """Sigmoid router with a selection bias and softcapped SwiGLU experts."""

    def __init__(
        self, config: Inkling2Config, layer: int, sharding: Sharding, dtype: torch.dtype
    ) -> None:
        super().__init__()
        num_experts, width = config.n_routed_experts, config.moe_intermediate_size
        self.config = config
        self.is_split_by_expert = sharding.tp_size > 1 and sharding.moe_split == "experts"
        num_own = num_experts // sharding.tp_size if self.is_split_by_expert else num_experts
        if not self.is_split_by_expert:
            width //= sharding.tp_size
        self.router = parameter(num_experts, config.hidden_size, dtype=torch.float32)
        self.router_bias = parameter(num_experts, dtype=torch.float32)
        form = config.experts[layer]
        hidden = config.hidden_size
        self.gate_up = stored_weight(num_own, 2 * width, hidden, dtype=dtype, form=form)
        self.down = stored_weight(num_own, hidden, width, dtype=dtype, form=form)

    def forward(self, z_TD: Tensor, step: StepInputs) -> Tensor:
        """[T, D] to [T, D]."""
        config = self.config
        weights_TE, experts_TE = ink.router(
            z_TD, self.router, self.router_bias, config.num_experts_per_tok, config.route_scale
        )
        out_TD: Tensor = ink.experts(
            z_TD,
            weights_TE,
            experts_TE,
            *operator_parts(self.gate_up),
            *operator_parts(self.down),
            step.rank if self.is_split_by_expert else None,
            config.mlp_gate_softcap,
            config.mlp_up_softcap,
            False,
        )
        return out_TD


class MixedInput(nn.Module):
    """Block attention residual: normed mixtures of the finished blocks and the current partial sum.

    One learned query per output; keys and values are the RMS-normalised sources (section "Block
    attention residual" of docs/architecture.md).
    """

    def __init__(
        self, hidden_size: int, num_queries: int, eps: float, dtype: torch.dtype, *, has_mix: bool
    ) -> None:
        super().__init__()
        self.eps = eps
        self.dtype = dtype
        self.queries = parameter(num_queries, hidden_size, dtype=torch.float32) if has_mix else None
        self.norms = nn.ParameterList(
            parameter(hidden_size, dtype=dtype) for _ in range(num_queries)
        )

    def forward(self, blocks: list[Tensor], current_TD: Tensor) -> list[Tensor]:
        """[T, D] sources to one normed [T, D] per query."""
        if self.queries is None:
            sources = [current_TD] * len(self.norms)
        else:
            mixed = ink.residual_mix([*blocks, current_TD], self.queries, MIX_EPS)
            sources = [mixed[index] for index in range(len(self.norms))]
        return [
            ink.rms_norm(source, weight, self.eps, self.dtype)
            for source, weight in zip(sources, self.norms, strict=True)
        ]


class Layer(nn.Module):
    """One decoder layer; `tap` says where a drafter takes its features from, if it does."""

    def __init__(
        self,
        config: Inkling2Config,
        layer: int,
        sharding: Sharding,
        dtype: torch.dtype,
        state: StateOptions,
        tap: TapPoint | None,
    ) -> None:
        super().__init__()
        num_queries = 1 if config.is_sliding[layer] else 3
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.starts_block = layer % config.n_layers_per_attn_res_block == 0
        self.dtype = dtype
        self.tap = tap
        self.attn_input = MixedInput(hidden, num_queries, eps, dtype, has_mix=layer > 0)
        self.attn = Attention(config, layer, sharding.tp_size, dtype, state)
        self.attn_conv = ShortConv(hidden, config.conv_kernel_size, dtype, state)
        self.mlp_input = MixedInput(hidden, 1, eps, dtype, has_mix=True)
        self.mlp = Experts(config, layer, sharding, dtype)
        self.mlp_conv = ShortConv(hidden, config.conv_kernel_size, dtype, state)

    def forward(
        self, h_TD: Tensor, blocks: list[Tensor], step: StepInputs
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """The partial sum of the current block and the finished blocks, before and after.

        Behind them what a drafter taps, [T, D], or None.
        """
        return self.visit(h_TD, blocks, step, self.attn_input, self.mlp_input)

    def visit(
        self,
        h_TD: Tensor,
        blocks: list[Tensor],
        step: StepInputs,
        attn_input: Callable[[list[Tensor], Tensor], list[Tensor]],
        mlp_input: Callable[[list[Tensor], Tensor], list[Tensor]],
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """As `forward`, with what makes the inputs of attention and experts.

        Between attention and experts the partial sum stays in float32; it is rounded once a layer.
        """
        inputs = attn_input(blocks, h_TD)
        o_TD = self.attn_conv(self.attn(inputs, step), step)
        if self.starts_block:
            blocks = [*blocks, h_TD]
            y_TD = ink.residual_add(None, o_TD, torch.float32)
        else:
            y_TD = ink.residual_add(h_TD, o_TD, torch.float32)
        (z_TD,) = mlp_input(blocks, y_TD)
        m_TD = self.mlp(z_TD, step)
        h_TD = ink.residual_add(y_TD, self.mlp_conv(m_TD, step), self.dtype)
        if self.tap == "pre_mlp_conv":
            return h_TD, blocks, ink.residual_add(y_TD, m_TD, self.dtype)
        return h_TD, blocks, h_TD if self.tap else None


class Inkling2(nn.Module):
    """Token ids to sampled tokens and logits, for one step of one rank.

    With a drafter every step also writes what the drafter will see of its tokens.
    """

    def __init__(
        self,
        config: Inkling2Config,
        sharding: Sharding,
        dtype: torch.dtype,
        state: StateOptions,
        last_row_only: bool,
        drafter: DSparkConfig | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.tp_size = sharding.tp_size
        self.dtype = dtype
        self.last_row_only = last_row_only
        self.embed = parameter(config.vocab_size, config.hidden_size, dtype=dtype)
        self.embed_norm = parameter(config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(self.make_layers(sharding, state, drafter))
        self.output_input = MixedInput(
            config.hidden_size, 1, config.rms_norm_eps, dtype, has_mix=True
        )
        shard = vocabulary_share(config.unpadded_vocab_size, self.tp_size)
        self.unembed = parameter(shard, config.hidden_size, dtype=dtype)
        self.drafter = (
            Drafter(drafter, config.unpadded_vocab_size, self.tp_size, dtype, state)
            if drafter
            else None
        )

    def make_layers(
        self, sharding: Sharding, state: StateOptions, drafter: DSparkConfig | None
    ) -> Iterator[Layer]:
        """The layers in the order in which a token passes them."""
        for layer in range(self.config.num_hidden_layers):
            tap = drafter.tap_point if drafter and layer in drafter.taps else None
            yield Layer(self.config, layer, sharding, self.dtype, state, tap)

    def run_layers(
        self, h_TD: Tensor, step: StepInputs
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Embedded tokens [T, D] to the last partial sum, the finished blocks and all taps."""
        blocks: list[Tensor] = []
        taps: list[Tensor] = []
        for layer in self.layers:
            h_TD, blocks, tap_TD = layer(h_TD, blocks, step)
            if tap_TD is not None:
                taps.append(tap_TD)
        return h_TD, blocks, taps

    def row_parallel_weights(self) -> frozenset[str]:
        """Parameters that ranks share along the dimension summed over."""
        ends = tuple(f"{name}{end}" for name in (".attn.wo", ".mlp.down") for end in MATRIX_ENDS)
        return frozenset(name for name, _ in self.named_parameters() if name.endswith(ends))

    def state_buffers(self) -> list[StateBuffer]:
        """Every state buffer, in module order."""
        paged = {
            f"layers.{index}.attn.{cache}"
            for index, layer in enumerate(self.layers)
            if not layer.attn.is_sliding  # type: ignore[union-attr]
            for cache in ("k_cache", "v_cache")
        }
        return [
            StateBuffer(name, "paged" if name in paged or name.startswith("drafter.") else "ring")
            for name, _ in self.named_buffers()
        ]

    def forward(
        self,
        step: StepInputs,
        features: Tensor | None = None,
        is_feature: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `StepInputs`, `TextModel`; gives tokens int32 [R] and logits float32 [R, V].

        R is T, or 1 with `last_row_only`.
        """
        embedded_TD = ink.embedding(step.tokens, self.embed)
        h_TD = ink.rms_norm(embedded_TD, self.embed_norm, self.config.rms_norm_eps, self.dtype)
        if features is not None:
            h_TD = ink.place_features(h_TD, features, is_feature)
        h_TD, blocks, taps = self.run_layers(h_TD, step)
        is_final_tapped = self.drafter and self.drafter.config.taps[-1] == len(self.layers)
        if self.drafter and not is_final_tapped:
            self.drafter.write_context(taps, step)
        (f_TD,) = self.output_input(blocks, h_TD)
        if self.drafter and is_final_tapped:
            self.drafter.write_context([*taps, f_TD], step)
        if self.last_row_only:
            f_TD = ink.last_row(f_TD, step.num_tokens)
        shard_TV = ink.linear(f_TD, self.unembed, False)
        if self.tp_size > 1:
            shard_TV = ink.all_gather(shard_TV, self.tp_size)
        logits_TV = ink.softcap(
            shard_TV[:, : self.config.unpadded_vocab_size], self.config.final_logit_softcapping
        )
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


def draft_step(
    config: Inkling2Config,
    sharding: Sharding,
    dtype: torch.dtype,
    state: StateOptions,
    drafter: DSparkConfig,
) -> DraftStep:
    """The draft step of a drafter of this model."""
    eps = config.rms_norm_eps
    return DraftStep(drafter, draft_target(config), eps, sharding.tp_size, dtype, state)
