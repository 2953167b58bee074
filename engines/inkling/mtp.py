"""Chained MTP heads of one rank, written to be traced.

Depth i (from 0) reads the hidden row that depth i-1 made of the token before, or that the model
made (behind its final norm) for i = 0, and the embedding of the token itself; it predicts the next
token. So a head is a causal layer over the same tokens as the model, one row for each, and what it
keeps of a token depends on that token and those before it only:

    c_i(p) = [ norm(h_{i-1}(p-1); hidden_norm_i) ; norm(e(p); embed_norm_i) ]
    h_i(p) = chain_norm( layer_i( input_proj_i c_i ) )
    x(p+1) from h_i(p) by the model's own projection to the vocabulary

where h_{-1} is the model's row and e(p) the token's embedding behind the model's embedding norm.

The literature writes h_i(p) at the position of the model's row that the chain began with, p-1-i,
and then has to compute rows again whose look-ahead crossed a rejected draft. Here every entry
stands at the last token that it depends on, like all other state. The steps of the model run all
depths over their own tokens, so an entry of a rejected token is overwritten before it is read, as
the model's own keys are; forks and shared pages need nothing either. Of the depth before, only the
row of one position back is needed: a ring with a look back of one.

Depth i has no input before position i+1. Rows of zeros stand there, which a layer keeps zero if its
attention does not see their keys.

The draft step begins behind the last token that a step has read. For the anchor at P, depth i runs
over the i+1 rows P..P+i, which are the anchor and the drafts that the depths before it have drawn,
and its last row draws the next. It reads state before P and writes none.

Every rank has the whole chain; only the projection to the vocabulary is shared, and gathered.
Source: dspark.md section 9; `MtpModel` of transformers, which takes embeddings without the model's
norm (the checkpoints were trained with it). Positions, which only the log scaling sees, are those
of transformers.
"""

import dataclasses

import torch
from torch import Tensor, nn

from inkrt.engines.inkling.config import InklingConfig
from inkrt.engines.inkling.layer import Layer
from inkrt.engines.inkling.vocabulary import embed, project
from inkrt.engines.interface import (
    MtpConfig,
    Sharding,
    StateBuffer,
    StateOptions,
    StepInputs,
    ring_tokens,
    vocabulary_share,
)
from inkrt.engines.parts import ink, parameter


class Depth(nn.Module):
    """One head."""

    def __init__(
        self,
        config: InklingConfig,
        mtp: MtpConfig,
        depth: int,
        dtype: torch.dtype,
        state: StateOptions,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.eps = config.rms_norm_eps
        self.dtype = dtype
        self.hidden_first = mtp.hidden_first
        self.first_row = depth + 1
        self.hidden_norm = parameter(hidden, dtype=dtype)
        self.embed_norm = parameter(hidden, dtype=dtype)
        self.input_proj = parameter(hidden, 2 * hidden, dtype=dtype)
        self.layer = Layer(
            config,
            is_sliding=mtp.is_sliding[depth],
            is_dense=True,
            sharding=Sharding(1, "experts"),
            dtype=dtype,
            state=state,
            first_row=self.first_row,
        )
        self.before: Tensor  # normed hidden rows by position
        shape = (state.num_slots, ring_tokens(1), hidden)
        self.register_buffer("before", torch.empty(shape, dtype=dtype, device="meta"))

    def forward(self, hidden_ND: Tensor | None, embedded_TD: Tensor, step: StepInputs) -> Tensor:
        """Rows [T, D] of the tokens of a step.

        Args:
            hidden_ND: of the depth before, of the same tokens; the last may be missing in a step
                that writes no state. None for none.
            embedded_TD: normed embeddings.
            step: which.
        """
        if hidden_ND is not None:
            hidden_ND = ink.rms_norm(hidden_ND, self.hidden_norm, self.eps, self.dtype)
        c_TN = ink.chain_input(
            hidden_ND,
            ink.rms_norm(embedded_TD, self.embed_norm, self.eps, self.dtype),
            self.before,
            step.position,
            step.num_tokens,
            step.slot,
            self.first_row,
            self.hidden_first,
        )
        out_TD: Tensor = self.layer(ink.linear(c_TN, self.input_proj, False), step)
        return out_TD


class Chain(nn.Module):
    """All heads, with their state."""

    def __init__(
        self, config: InklingConfig, mtp: MtpConfig, dtype: torch.dtype, state: StateOptions
    ) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.dtype = dtype
        self.mtp = mtp
        self.depths = nn.ModuleList(
            Depth(config, mtp, depth, dtype, state) for depth in range(mtp.num_depths)
        )
        self.chain_norm = parameter(config.hidden_size, dtype=dtype) if mtp.has_chain_norm else None

    def run(
        self, depth: int, hidden_ND: Tensor | None, embedded_TD: Tensor, step: StepInputs
    ) -> Tensor:
        """See `Depth`; what the next depth and the projection to the vocabulary read."""
        out_TD: Tensor = self.depths[depth](hidden_ND, embedded_TD, step)
        if self.chain_norm is not None:
            out_TD = ink.rms_norm(out_TD, self.chain_norm, self.eps, self.dtype)
        return out_TD

    def write_context(self, f_TD: Tensor, embedded_TD: Tensor, step: StepInputs) -> None:
        """Keep what the heads will see of the tokens of a step of the model.

        Args:
            f_TD: the model's rows behind its final norm.
            embedded_TD: normed embeddings.
            step: of the model.
        """
        for depth in range(self.mtp.num_depths):
            f_TD = self.run(depth, f_TD, embedded_TD, step)

    def buffer_kind(self, name: str) -> StateBuffer:
        """Of a state buffer, named as in the module that has this one as `drafter`."""
        _, _, depth, *_, buffer = name.split(".")
        is_paged = buffer in ("k_cache", "v_cache") and not self.mtp.is_sliding[int(depth)]
        return StateBuffer(name, "paged" if is_paged else "ring")


class ChainStep(nn.Module):
    """The draft step: the anchor to a draft of every depth, for one rank."""

    def __init__(
        self,
        config: InklingConfig,
        sharding: Sharding,
        dtype: torch.dtype,
        state: StateOptions,
        mtp: MtpConfig,
    ) -> None:
        super().__init__()
        self.config = config
        self.tp_size = sharding.tp_size
        self.dtype = dtype
        self.embed = parameter(config.vocab_size, config.hidden_size, dtype=dtype)
        self.embed_norm = parameter(config.hidden_size, dtype=dtype)
        shard = vocabulary_share(config.unpadded_vocab_size, self.tp_size)
        self.unembed = parameter(shard, config.hidden_size, dtype=dtype)
        self.drafter = Chain(config, mtp, dtype, state)

    def row_parallel_weights(self) -> frozenset[str]:
        """None: ranks compute the same."""
        return frozenset()

    def state_buffers(self) -> list[StateBuffer]:
        """Every state buffer, in module order."""
        return [self.drafter.buffer_kind(name) for name, _ in self.named_buffers()]

    def forward(
        self,
        step: StepInputs,
        is_coupled: Tensor,
        wants_logits: Tensor,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """See `StepInputs`: `tokens` is the anchor alone. Gives tokens int32 [g], logits [g, V]."""
        step = dataclasses.replace(step, num_tokens=None)
        tokens = step.tokens
        sampling = (step.temperature, step.top_k, step.top_p, step.min_p, step.seed)
        rows: list[Tensor] = []
        drafted: list[Tensor] = []
        logits: list[Tensor] = []
        h_ND: Tensor | None = None
        for depth in range(self.drafter.mtp.num_depths):
            rows.append(embed(tokens, self.embed, self.embed_norm, self.config))
            h_ND = self.drafter.run(depth, h_ND, ink.concat(rows, 0), step)
            logits.append(project(h_ND[depth : depth + 1], self.unembed, self.config, self.tp_size))
            tokens = ink.draft_sample(logits[-1], is_coupled, *sampling, step.position, depth)
            drafted.append(tokens.view(1, 1))
        return ink.concat(drafted, 0).view(-1), ink.concat(logits, 0)
