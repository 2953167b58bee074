"""The Inkling text model of one rank, written to be traced.

Equations: the reference implementation in transformers (`inkling`). Tensors carry shape letters: T
tokens of the step, D hidden, H query heads, K key/value heads, d head dimension, r relative width,
E experts of a token, S shared experts, F their width, V vocabulary. All are this rank's share
unless said otherwise; h and norms have the full width D on every rank.

Every state buffer is indexed by absolute position. Calls are operators of ours or view operations;
communication is placed by the builder.
"""

import torch
from torch import Tensor, nn

from inkrt.engines.inkling.config import InklingConfig
from inkrt.engines.inkling.layer import Layer
from inkrt.engines.inkling.mtp import Chain
from inkrt.engines.inkling.vocabulary import embed, project
from inkrt.engines.inkling2.parts import MATRIX_ENDS
from inkrt.engines.interface import (
    MtpConfig,
    Sharding,
    StateBuffer,
    StateOptions,
    StepInputs,
    vocabulary_share,
)
from inkrt.engines.parts import ink, parameter

_ROW_PARALLEL = (
    ".attn.wo",
    ".mlp.shared_down",
    *(f".mlp.down{end}" for end in MATRIX_ENDS),
)


class Inkling(nn.Module):
    """Token ids to sampled tokens and logits, for one step of one rank.

    With MTP heads every step also writes what they will see of its tokens.
    """

    def __init__(
        self,
        config: InklingConfig,
        sharding: Sharding,
        dtype: torch.dtype,
        state: StateOptions,
        last_row_only: bool,
        mtp: MtpConfig | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.tp_size = sharding.tp_size
        self.dtype = dtype
        self.last_row_only = last_row_only
        self.embed = parameter(config.vocab_size, config.hidden_size, dtype=dtype)
        self.embed_norm = parameter(config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(
            Layer(
                config,
                is_sliding=config.is_sliding[layer],
                is_dense=config.is_dense[layer],
                sharding=sharding,
                dtype=dtype,
                state=state,
                experts=config.experts[layer],
            )
            for layer in range(config.num_hidden_layers)
        )
        self.norm = parameter(config.hidden_size, dtype=dtype)
        shard = vocabulary_share(config.unpadded_vocab_size, self.tp_size)
        self.unembed = parameter(shard, config.hidden_size, dtype=dtype)
        self.drafter = Chain(config, mtp, dtype, state) if mtp else None

    def row_parallel_weights(self) -> frozenset[str]:
        """Parameters that ranks share along the dimension summed over."""
        return frozenset(
            name
            for name, _ in self.named_parameters()
            if name.startswith("layers.") and name.endswith(_ROW_PARALLEL)
        )

    def state_buffers(self) -> list[StateBuffer]:
        """Every state buffer, in module order."""
        return [self._buffer_kind(name) for name, _ in self.named_buffers()]

    def _buffer_kind(self, name: str) -> StateBuffer:
        if self.drafter is not None and name.startswith("drafter."):
            return self.drafter.buffer_kind(name)
        _, layer, *_, buffer = name.split(".")
        is_paged = buffer in ("k_cache", "v_cache") and not self.config.is_sliding[int(layer)]
        return StateBuffer(name, "paged" if is_paged else "ring")

    def forward(
        self,
        step: StepInputs,
        features: Tensor | None = None,
        is_feature: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `StepInputs`, `TextModel`; gives tokens int32 [R] and logits float32 [R, V].

        R is T, or 1 with `last_row_only`. Logits are not rounded to the model's dtype.
        """
        h_TD = embed(step.tokens, self.embed, self.embed_norm, self.config)
        if features is not None:
            h_TD = ink.place_features(h_TD, features, is_feature)
        embedded_TD = h_TD
        for layer in self.layers:
            h_TD = layer(h_TD, step)
        f_TD = ink.rms_norm(h_TD, self.norm, self.config.rms_norm_eps, self.dtype)
        if self.drafter is not None:
            self.drafter.write_context(f_TD, embedded_TD, step)
        if self.last_row_only:
            f_TD = ink.last_row(f_TD, step.num_tokens)
        logits_TV = project(f_TD, self.unembed, self.config, self.tp_size)
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
