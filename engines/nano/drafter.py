"""DSpark drafter in the Qwen3 flavour, for training.

Anchor-first blocks: row k of a block anchored at position P stands at P + k, sees the context
before P and the whole block, and predicts the token at P + k + 1. Embedding and vocabulary
projection are the target's, frozen. Embedding rows enter raw, without the target's `embed_norm`.
Base logits pass the target's final soft-cap; the head's bias is added after it, uncapped.

Backbone parameters have DeepSpec's names. Several heads train on one backbone and one pair of
Markov tables; each has its own gate or joint projection and its own confidence.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from inkrt.engines.nano.model import Nano
from inkrt.engines.nano.parts import Norm, Weight, linear, matrix, softcap

Head = Literal["vanilla", "gated", "rnn"]
HEADS: tuple[Head, ...] = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Sizes of the drafter.

    Attributes:
        target_layer_ids: target layers (0-based) whose outputs are the context's features.
        mask_token_id: of rows that have no token yet; in the vocabulary's padding.
        vocab_size: rows of both Markov tables, padding included.
    """

    vocab_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    hidden_size: int = 256
    block_size: int = 7
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 512
    markov_rank: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 8192


def drafter_config(target: Nano) -> DrafterConfig:
    """Sizes for a target: taps are the finished residual blocks and the last layer."""
    config = target.config
    per_block, last = config.n_layers_per_attn_res_block, config.num_hidden_layers - 1
    taps = tuple(sorted({*range(per_block - 1, last, per_block), last}))
    return DrafterConfig(
        config.vocab_size,
        config.unpadded_vocab_size,
        taps,
        config.hidden_size,
        max_position_embeddings=config.max_position_embeddings,
    )


def rope(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Rotate halves of x [..., N, heads, d] by position [..., N]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device).float() / half)
    angle = position.float()[..., None, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x.float().chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(x.dtype)


class BiasedLinear(Weight):
    """A matrix, small at first, and a bias."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(torch.randn(rows, columns) * 0.1 * columns**-0.5)
        self.bias = nn.Parameter(torch.zeros(rows))

    def forward(self, x: Tensor) -> Tensor:
        """[..., columns] to float32 [..., rows]."""
        return functional.linear(x.float(), self.weight, self.bias)


class DraftAttention(nn.Module):
    """Block rows attend to the context's features and to their block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        hidden, size = config.hidden_size, config.head_dim
        width, kv_width = config.num_attention_heads * size, config.num_key_value_heads * size
        self.q_proj = matrix(width, hidden)
        self.k_proj = matrix(kv_width, hidden)
        self.v_proj = matrix(kv_width, hidden)
        self.o_proj = matrix(hidden, width)
        self.q_norm = Norm(size, config.rms_norm_eps)
        self.k_norm = Norm(size, config.rms_norm_eps)

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight).view(*x.shape[:-1], -1, self.config.head_dim)

    def forward(
        self, u: Tensor, context: Tensor, position: Tensor, block_position: Tensor, mask: Tensor
    ) -> Tensor:
        """Attend.

        Args:
            u: normed block rows [B, A, G, D].
            context: features [B, S, D].
            position: [B, S] of the context.
            block_position: [B, A, G].
            mask: [B, A, S], whether a block sees a token of the context.
        """
        config = self.config
        theta, groups = config.rope_theta, config.num_attention_heads // config.num_key_value_heads
        q = self.q_norm(self._heads(u, self.q_proj.weight), u.dtype)
        k_block = self.k_norm(self._heads(u, self.k_proj.weight), u.dtype)
        k_context = self.k_norm(self._heads(context, self.k_proj.weight), u.dtype)
        q, k_block = rope(q, block_position, theta), rope(k_block, block_position, theta)
        k_context = rope(k_context, position, theta)
        v_block = self._heads(u, self.v_proj.weight)
        v_context = self._heads(context, self.v_proj.weight)
        # Letters: b sequences, a blocks, g rows of a block, k kv heads, h heads of a group.
        q = torch.unflatten(q, 3, (config.num_key_value_heads, groups)) * config.head_dim**-0.5
        to_context = torch.einsum("bagkhd,bskd->bakhgs", q, k_context)
        to_context = to_context.masked_fill(~mask[:, :, None, None, None], float("-inf"))
        to_block = torch.einsum("bagkhd,bajkd->bakhgj", q, k_block)
        scores = torch.cat([to_context, to_block], -1)
        weights = scores.softmax(-1, dtype=torch.float32).to(u.dtype)
        on_context, on_block = torch.split(weights, [context.shape[1], config.block_size], -1)
        out = torch.einsum("bakhgs,bskd->bagkhd", on_context, v_context)
        out = out + torch.einsum("bakhgj,bajkd->bagkhd", on_block, v_block)
        return linear(out.flatten(3), self.o_proj.weight)


class DraftMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = matrix(config.intermediate_size, config.hidden_size)
        self.up_proj = matrix(config.intermediate_size, config.hidden_size)
        self.down_proj = matrix(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to the same."""
        gate = functional.silu(linear(x, self.gate_proj.weight))
        return linear(gate * linear(x, self.up_proj.weight), self.down_proj.weight)


class DraftLayer(nn.Module):
    """One layer of the backbone."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMlp(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, context: Tensor, position: Tensor, block_position: Tensor, mask: Tensor
    ) -> Tensor:
        """Block rows [B, A, G, D]; see `DraftAttention`."""
        u = self.input_layernorm(x, x.dtype)
        x = x + self.self_attn(u, context, position, block_position, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x, x.dtype))
        return out


class SequentialHead(nn.Module):
    """What one head has of its own: how it makes its bias, and its confidence."""

    def __init__(self, config: DrafterConfig, kind: Head) -> None:
        super().__init__()
        self.kind = kind
        rank, hidden = config.markov_rank, config.hidden_size
        if kind == "gated":
            self.gate_proj = BiasedLinear(rank, hidden + rank)
        if kind == "rnn":
            self.joint_proj = BiasedLinear(3 * rank, 2 * rank + hidden)
        self.confidence = BiasedLinear(1, hidden + rank)

    def forward(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """What the second Markov table multiplies, and the confidence's logit.

        Args:
            hidden: final rows [..., G, D].
            previous: rows of the first Markov table for the tokens before, [..., G, r].

        Returns:
            float32 [..., G, r] and [..., G].
        """
        h, e = hidden.float(), previous.float()
        confidence = self.confidence(torch.cat([h, e], -1)).squeeze(-1)
        if self.kind == "vanilla":
            return e, confidence
        if self.kind == "gated":
            return self.gate_proj(torch.cat([h, e], -1)).sigmoid() * e, confidence
        state, outputs = torch.zeros_like(e[..., 0, :]), []
        for row in range(h.shape[-2]):
            joint = self.joint_proj(torch.cat([state, e[..., row, :], h[..., row, :]], -1))
            gate, candidate, output = joint.chunk(3, -1)
            # The output comes from the old state; the new one counts from the next row on.
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            outputs.append(output.tanh())
        return torch.stack(outputs, -2), confidence


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks to draft, by sequence.

    Attributes:
        anchor: int64 [B, A], index of the anchor in its sequence.
        counts: bool [B, A, G], rows whose token is to be predicted and lies in the same document.
    """

    anchor: Tensor
    counts: Tensor


class Drafter(nn.Module):
    """Backbone, Markov tables and heads."""

    def __init__(
        self, config: DrafterConfig, heads: tuple[Head, ...], dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = matrix(hidden, len(config.target_layer_ids) * hidden)
        self.hidden_norm = Norm(hidden, eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(hidden, eps)
        self.markov_w1 = Weight(torch.randn(config.vocab_size, config.markov_rank) * 0.3)
        self.markov_w2 = Weight(torch.zeros(config.vocab_size, config.markov_rank))
        self.heads = nn.ModuleDict({kind: SequentialHead(config, kind) for kind in heads})

    def forward(
        self,
        target: Nano,
        taps: list[Tensor],
        tokens: Tensor,
        position: Tensor,
        segment: Tensor,
        anchor: Tensor,
    ) -> Tensor:
        """Final hidden rows [B, A, G, D].

        Args:
            target: gives the embedding.
            taps: outputs [B, S, D] of the tapped layers.
            tokens: [B, S].
            position: [B, S].
            segment: [B, S].
            anchor: [B, A].
        """
        config = self.config
        context = self.hidden_norm(linear(torch.cat(taps, -1), self.fc.weight), self.dtype)
        index = torch.arange(tokens.shape[1], device=tokens.device)
        own = segment.gather(1, anchor)
        mask = (index < anchor[..., None]) & (segment[:, None] == own[..., None])
        steps = torch.arange(config.block_size, device=tokens.device)
        block_position = position.gather(1, anchor)[..., None] + steps
        ids = torch.full_like(block_position, config.mask_token_id, dtype=torch.int64)
        ids[..., 0] = tokens.gather(1, anchor)
        x = functional.embedding(ids, target.embed.weight).to(self.dtype)
        for layer in self.layers:
            x = layer(x, context, position, block_position, mask)
        hidden: Tensor = self.norm(x, self.dtype)
        return hidden

    def draft(
        self, kind: str, target: Nano, hidden: Tensor, previous: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draft logits and confidence logits of one head.

        Args:
            kind: of the head.
            target: gives the vocabulary projection.
            hidden: final rows [..., G, D].
            previous: tokens before each row's prediction [..., G].

        Returns:
            float32 [..., G, V] and [..., G].
        """
        vocab, cap = target.config.unpadded_vocab_size, target.config.final_logit_softcapping
        base = softcap(linear(hidden, target.unembed.weight[:vocab]).float(), cap)
        before = functional.embedding(previous, self.markov_w1.weight)
        z, confidence = self.heads[kind](hidden, before)
        return base + linear(z.to(self.dtype), self.markov_w2.weight[:vocab]).float(), confidence
