"""The DSpark drafter of one rank, written to be traced: a DFlash backbone and a sequential head.

It has two parts. The context part runs inside of every step of the target: outputs of tapped layers
become the keys and values that the draft layers will see of a token, at the token's position. The
draft step turns the anchor, the last token that is known, into a block of drafts. A block reads
context before the anchor only and writes no state, so that nothing has to be undone when drafts are
rejected: the context of a rejected token is overwritten before it is read.

Ranks share it as they share the target: heads, with their part of the context, the width of the
MLP, rows of the context's projection, and tokens. Norms and what draws one token after the other
(`markov_w1` and the mixing projection) are whole on each. Parameters of a rank, under `drafter.` in
an engine, where H, KV, F and D* are its shares of heads, width and rows:

    ctx_proj [D*, m Dt], or for wide features ctx_proj.{i} [D*, Dt]   ctx_norm [D]   norm [D]
    layers.{i}.  wq [H d, D]   wk, wv [KV d, D]   wo [D, H d]   q_norm, k_norm [d]
                 gate, up [F, D]   down [D, F]   attn_norm, mlp_norm [D]   sinks [H], if it has them
    markov_w1 [V, r]   markov_w2 [Vs, r]
    gate_proj [r, D + r], gate_bias [r]   or   joint_proj [3 r, 2 r + D], joint_bias [3 r]
    confidence_proj [1, D (+ r)]   confidence_bias [1]   d2t int32 [Vd], offsets
    embed [V, D], unembed [Vs, D], if they are not the target's

Sinks, biases and the confidence are float32. The draft step reads the target's `embed`,
`embed_norm` and `unembed`, which the target's steps read too.

Shape letters: T tokens of a step, G rows of a block, g drafts, m taps, Dt width of a tap, D hidden,
H and KV heads, d head dimension, F width, r rank, V rows of the target's embedding, Vd tokens that
can be drafted, Vs those of a rank. Source: dspark.md sections 2 and 5.
"""

import torch
from torch import Tensor, nn

from inkrt.engines.dspark.config import DraftLayerConfig, DSparkConfig
from inkrt.engines.interface import (
    DraftTarget,
    StateBuffer,
    StateOptions,
    StepInputs,
    vocabulary_share,
)
from inkrt.engines.parts import ink, parameter


class DraftLayer(nn.Module):
    """One layer of the backbone, with the context's keys and values, on one rank."""

    def __init__(
        self,
        config: DSparkConfig,
        layer: DraftLayerConfig,
        tp_size: int,
        dtype: torch.dtype,
        state: StateOptions,
    ) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        hidden, size, width = config.hidden_size, config.head_dim, config.intermediate_size
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        heads, kv_heads, width = (number // tp_size for number in (heads, kv_heads, width))
        q_width, kv_width = heads * size, kv_heads * size
        self.wq = parameter(q_width, hidden, dtype=dtype)
        self.wk = parameter(kv_width, hidden, dtype=dtype)
        self.wv = parameter(kv_width, hidden, dtype=dtype)
        self.wo = parameter(hidden, q_width, dtype=dtype)
        self.q_norm = parameter(size, dtype=dtype)
        self.k_norm = parameter(size, dtype=dtype)
        self.gate = parameter(width, hidden, dtype=dtype)
        self.up = parameter(width, hidden, dtype=dtype)
        self.down = parameter(hidden, width, dtype=dtype)
        self.attn_norm = parameter(hidden, dtype=dtype)
        self.mlp_norm = parameter(hidden, dtype=dtype)
        self.sinks = parameter(heads, dtype=torch.float32) if config.has_sinks else None
        # Pages for sliding layers too: context is as long as a session, and forks share it.
        cache = (state.num_pages, state.page_tokens, kv_heads, size)
        self.k_cache: Tensor
        self.v_cache: Tensor
        self.register_buffer("k_cache", torch.empty(cache, dtype=dtype, device="meta"))
        self.register_buffer("v_cache", torch.empty(cache, dtype=dtype, device="meta"))

    def write_context(self, c_TD: Tensor, step: StepInputs) -> None:
        """Keep the keys and values of context features [T, D]."""
        k_TKd, v_TKd = self._keys_values(c_TD, step.position)
        ink.kv_write(
            k_TKd,
            v_TKd,
            self.k_cache,
            self.v_cache,
            step.page_table,
            step.position,
            step.num_tokens,
            step.slot,
        )

    def forward(self, x_GD: Tensor, step: StepInputs) -> Tensor:
        """Block rows [G, D], before and after."""
        config, eps, dtype = self.config, self.config.rms_norm_eps, x_GD.dtype
        num_rows = x_GD.shape[0]
        u_GD = ink.rms_norm(x_GD, self.attn_norm, eps, dtype)
        q_GHd = self._heads(ink.linear(u_GD, self.wq, False), self.q_norm, step.position)
        k_GKd, v_GKd = self._keys_values(u_GD, step.position)
        o_GHd = ink.draft_attention(
            q_GHd,
            k_GKd,
            v_GKd,
            self.sinks,
            self.k_cache,
            self.v_cache,
            step.page_table,
            step.position,
            self.layer.is_causal,
            self.layer.window or 0,
            config.head_dim**-0.5,
        )
        o_GD = ink.linear(o_GHd.view(num_rows, -1), self.wo, False)
        x_GD = ink.residual_add(x_GD, o_GD, dtype)
        z_GD = ink.rms_norm(x_GD, self.mlp_norm, eps, dtype)
        halves = [ink.linear(z_GD, self.gate, False), ink.linear(z_GD, self.up, False)]
        m_GD = ink.linear(ink.silu_mul(ink.concat(halves, 1)), self.down, False)
        out_GD: Tensor = ink.residual_add(x_GD, m_GD, dtype)
        return out_GD

    def _keys_values(self, x_TD: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Normed and turned keys [T, KV, d], and values, of context or block rows alike."""
        k_TKd = self._heads(ink.linear(x_TD, self.wk, False), self.k_norm, position)
        v_TC = ink.linear(x_TD, self.wv, False)
        return k_TKd, v_TC.view(x_TD.shape[0], -1, self.config.head_dim)

    def _heads(self, rows_TC: Tensor, norm: Tensor, position: Tensor) -> Tensor:
        heads = rows_TC.view(rows_TC.shape[0], -1, self.config.head_dim)
        normed = ink.rms_norm(heads, norm, self.config.rms_norm_eps, rows_TC.dtype)
        turned: Tensor = ink.rope(normed, position, self.config.rope_theta)
        return turned


class Drafter(nn.Module):
    """All parameters and state of a drafter on one rank; see the module for both of its parts.

    Args:
        config: of the drafter.
        num_tokens: of the target's that can be sampled.
        tp_size: number of ranks.
        dtype: compute dtype.
        state: of the engine.
    """

    def __init__(
        self,
        config: DSparkConfig,
        num_tokens: int,
        tp_size: int,
        dtype: torch.dtype,
        state: StateOptions,
    ) -> None:
        super().__init__()
        self.config = config
        self.tp_size = tp_size
        self.dtype = dtype
        self.num_tokens = num_tokens
        hidden, rank = config.hidden_size, config.markov_rank
        float32 = torch.float32
        share = vocabulary_share(config.num_drafted(num_tokens), tp_size)
        rows, width = hidden // tp_size, config.target_hidden_size
        self.ctx_proj: nn.Parameter | nn.ParameterList = (
            nn.ParameterList(parameter(rows, width, dtype=dtype) for _ in config.taps)
            if config.is_cut
            else parameter(rows, config.num_features, dtype=dtype)
        )
        self.ctx_norm = parameter(hidden, dtype=dtype)
        self.layers = nn.ModuleList(
            DraftLayer(config, layer, tp_size, dtype, state) for layer in config.layers
        )
        self.norm = parameter(hidden, dtype=dtype)
        self.markov_w1 = parameter(config.vocab_size, rank, dtype=dtype)
        self.markov_w2 = parameter(share, rank, dtype=dtype)
        if config.head == "gated":
            self.gate_proj = parameter(rank, hidden + rank, dtype=dtype)
            self.gate_bias = parameter(rank, dtype=float32)
        if config.head == "rnn":
            self.joint_proj = parameter(3 * rank, 2 * rank + hidden, dtype=dtype)
            self.joint_bias = parameter(3 * rank, dtype=float32)
        if config.has_confidence:
            num_read = hidden + (rank if config.confidence_reads_markov else 0)
            self.confidence_proj = parameter(1, num_read, dtype=float32)
            if config.confidence_has_bias:
                self.confidence_bias = parameter(1, dtype=float32)
        if config.is_trimmed:
            self.d2t = parameter(config.draft_vocab_size, dtype=torch.int32)
        if config.has_own_embedding:
            self.embed = parameter(config.vocab_size, hidden, dtype=dtype)
        if config.has_own_unembed:
            self.unembed = parameter(share, hidden, dtype=dtype)

    def write_context(self, features: list[Tensor], step: StepInputs) -> None:
        """Keep what the draft layers will see of the tokens of a step of the target.

        Args:
            features: outputs [T, Dt] of the tapped layers, in order.
            step: of the target.
        """
        config = self.config
        if isinstance(self.ctx_proj, nn.ParameterList):
            pairs = zip(features, self.ctx_proj, strict=True)
            parts = [ink.linear(feature_TD, weight, True) for feature_TD, weight in pairs]
            c_TD = ink.sum_parts(parts, self.dtype)
        else:
            c_TD = ink.linear(ink.concat(features, 1), self.ctx_proj, False)
        if self.tp_size > 1:
            c_TD = ink.all_gather(c_TD, self.tp_size)
        c_TD = ink.rms_norm(c_TD, self.ctx_norm, config.rms_norm_eps, self.dtype)
        for layer in self.layers:
            layer.write_context(c_TD, step)  # type: ignore[operator]

    def rows(self, x_GD: Tensor, step: StepInputs) -> Tensor:
        """Embedded block rows [G, D] to the final rows [g, D] that predict a token each.

        Rows stand at the anchor's position and behind. They may reach beyond the last position of
        a session: no table is indexed by a row's own position, and pages only by the context's.
        """
        for layer in self.layers:
            x_GD = layer(x_GD, step)
        h_GD: Tensor = ink.rms_norm(x_GD, self.norm, self.config.rms_norm_eps, self.dtype)
        return h_GD if self.config.anchor_first else h_GD[1:]

    def head(
        self,
        base_gV: Tensor,
        h_gD: Tensor,
        step: StepInputs,
        is_coupled: Tensor,
        wants_logits: Tensor,
        target: DraftTarget,
    ) -> tuple[Tensor, ...]:
        """Tokens int32 [g], logits float32 [g, V] and, if it has any, confidences float32 [g].

        Args:
            base_gV: logits [g, Vs] of this rank's tokens that can be drafted; where these are some
                of the target's, and there is no own projection, [g, V] of all that can be sampled.
            h_gD: the rows they come from.
            step: the draft step.
            is_coupled: int32 [1], see `ink::draft_head`.
            wants_logits: int32 [1], likewise.
            target: the drafter's.
        """
        config = self.config
        mix: tuple[Tensor | None, Tensor | None] = (None, None)
        if config.head == "gated":
            mix = (self.gate_proj, self.gate_bias)
        if config.head == "rnn":
            mix = (self.joint_proj, self.joint_bias)
        has_bias = config.has_confidence and config.confidence_has_bias
        tokens, logits, confidences = ink.draft_head(
            base_gV,
            h_gD,
            step.tokens,
            self.markov_w1,
            self.markov_w2,
            *mix,
            self.confidence_proj if config.has_confidence else None,
            self.confidence_bias if has_bias else None,
            self.d2t if config.is_trimmed else None,
            is_coupled,
            wants_logits,
            step.temperature,
            step.top_k,
            step.top_p,
            step.min_p,
            step.seed,
            step.position,
            config.head,
            self.num_tokens,
            config.num_drafted(self.num_tokens),
            config.has_own_unembed,
            target.softcap or 0.0,
            config.softcap_place,
            config.logits_divisor,
            self.tp_size,
        )
        return (tokens, logits, confidences) if config.has_confidence else (tokens, logits)


class DraftStep(nn.Module):
    """The anchor to a block of drafts, for one rank.

    Args:
        config: of the drafter.
        target: whose embedding and projection it may share.
        embed_norm_eps: of the target's embedding norm.
        tp_size: number of ranks.
        dtype: compute dtype.
        state: of the engine.
    """

    def __init__(
        self,
        config: DSparkConfig,
        target: DraftTarget,
        embed_norm_eps: float,
        tp_size: int,
        dtype: torch.dtype,
        state: StateOptions,
    ) -> None:
        super().__init__()
        self.config = config
        self.target = target
        self.embed_norm_eps = embed_norm_eps
        self.tp_size = tp_size
        self.dtype = dtype
        hidden = config.hidden_size
        if not config.has_own_embedding:
            self.embed = parameter(target.vocab_size, hidden, dtype=dtype)
        if config.applies_embed_norm:
            self.embed_norm = parameter(hidden, dtype=dtype)
        if not config.has_own_unembed:
            shard = vocabulary_share(target.unpadded_vocab_size, tp_size)
            self.unembed = parameter(shard, hidden, dtype=dtype)
        self.drafter = Drafter(config, target.unpadded_vocab_size, tp_size, dtype, state)

    def row_parallel_weights(self) -> frozenset[str]:
        """Parameters that ranks share along the dimension summed over."""
        layers = range(len(self.config.layers))
        return frozenset(f"drafter.layers.{i}.{name}" for i in layers for name in ("wo", "down"))

    def state_buffers(self) -> list[StateBuffer]:
        """Every state buffer, in module order."""
        return [StateBuffer(name, "paged") for name, _ in self.named_buffers()]

    def forward(
        self,
        step: StepInputs,
        is_coupled: Tensor,
        wants_logits: Tensor,
    ) -> tuple[Tensor, ...]:
        """See `StepInputs` and `Drafter.head`; `tokens` is the anchor alone, at `position`."""
        config, drafter = self.config, self.drafter
        h_gD = drafter.rows(self._block(step.tokens), step)
        if config.has_own_unembed:
            base_gV = ink.linear(h_gD, drafter.unembed, False)
        else:
            base_gV = ink.linear(h_gD, self.unembed, False)
        if config.is_trimmed and not config.has_own_unembed and self.tp_size > 1:
            # A drafted token and its logit may be two ranks'.
            base_gV = ink.all_gather(base_gV, self.tp_size)[:, : self.target.unpadded_vocab_size]
        return drafter.head(base_gV, h_gD, step, is_coupled, wants_logits, self.target)

    def _block(self, anchor: Tensor) -> Tensor:
        """Embeddings [G, D] of the anchor and of rows that have no token yet."""
        config = self.config
        table = self.drafter.embed if config.has_own_embedding else self.embed
        x_GD: Tensor = ink.embedding(anchor, table)
        if config.num_rows > 1:
            mask = table[config.mask_token_id : config.mask_token_id + 1]
            masks = mask.expand(config.num_rows - 1, config.hidden_size)
            x_GD = ink.concat([x_GD, masks], 0)
        if config.applies_embed_norm:
            x_GD = ink.rms_norm(x_GD, self.embed_norm, self.embed_norm_eps, self.dtype)
        return x_GD
