"""DSpark drafter in the Qwen3 flavour, for training and export.

Anchor-first blocks: row k of a block anchored at position P stands at P + k, sees the context
before P and the whole block, and predicts the token at P + k + 1. Embedding and vocabulary projection are
the target's, frozen. Embedding rows enter raw, without the target's `embed_norm`. Base logits pass
the target's final soft-cap; the head's bias is added after it, uncapped.

Parameters have DeepSpec's names. `Drafter` trains several heads on one backbone and one pair of
Markov tables; a checkpoint of one head has its own gate or joint projection and confidence head.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from inkrt.engines.nano.export import read_tensors, write_json
from inkrt.engines.nano.model import Nano, Norm, Weight, linear, softcap

Head = Literal["vanilla", "gated", "rnn"]
HEADS: tuple[Head, ...] = ("vanilla", "gated", "rnn")
Layout = Literal["deepspec", "speculators", "specforge"]
PREFIX = "dspark."


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
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 384
    markov_rank: int = 32
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


def _matrix(rows: int, columns: int) -> Weight:
    return Weight(torch.randn(rows, columns) * columns**-0.5)


class BiasedLinear(Weight):
    """A matrix and a bias, both zero at first."""

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
        self.q_proj = _matrix(width, hidden)
        self.k_proj = _matrix(kv_width, hidden)
        self.v_proj = _matrix(kv_width, hidden)
        self.o_proj = _matrix(hidden, width)
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
        q = q.unflatten(3, (config.num_key_value_heads, groups)) * config.head_dim**-0.5
        to_context = torch.einsum("bagkhd,bskd->bakhgs", q, k_context)
        to_context = to_context.masked_fill(~mask[:, :, None, None, None], float("-inf"))
        to_block = torch.einsum("bagkhd,bajkd->bakhgj", q, k_block)
        scores = torch.cat([to_context, to_block], -1)
        weights = scores.softmax(-1, dtype=torch.float32).to(u.dtype)
        on_context, on_block = weights.split([context.shape[1], config.block_size], -1)
        out = torch.einsum("bakhgs,bskd->bagkhd", on_context, v_context)
        out = out + torch.einsum("bakhgj,bajkd->bagkhd", on_block, v_block)
        return linear(out.flatten(3), self.o_proj.weight)


class DraftMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = _matrix(config.intermediate_size, config.hidden_size)
        self.up_proj = _matrix(config.intermediate_size, config.hidden_size)
        self.down_proj = _matrix(config.hidden_size, config.intermediate_size)

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
        return x + self.mlp(self.post_attention_layernorm(x, x.dtype))


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
        self.fc = _matrix(hidden, len(config.target_layer_ids) * hidden)
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
        return self.norm(x, self.dtype)

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


def head_tensors(drafter: Drafter, kind: Head) -> dict[str, Tensor]:
    """The drafter with one head: DeepSpec's names, bfloat16, on the CPU."""
    tensors = {}
    for name, value in drafter.state_dict().items():
        if name.startswith("heads."):
            _, owner, rest = name.split(".", 2)
            if owner != kind:
                continue
            if rest.startswith("confidence."):
                new = rest.replace("confidence.", "confidence_head.proj.")
            else:
                new = "markov_head." + rest
        elif name.startswith("markov_"):
            new = "markov_head." + name
        else:
            new = name
        tensors[new] = value.detach().to("cpu", torch.bfloat16).contiguous()
    return tensors


def embedded_config(config: DrafterConfig, kind: Head) -> dict[str, Any]:
    """Keys that go into the target's config.json.

    `dspark_block_size`, `dspark_markov_rank`, `dspark_markov_head_type`, `dspark_noise_token_id`
    and `dspark_target_layer_ids` (outputs of these layers) are DeepSeek's; the others describe
    the backbone in the same manner.
    """
    return {
        "dspark_block_size": config.block_size,
        "dspark_markov_rank": config.markov_rank,
        "dspark_markov_head_type": kind,
        "dspark_noise_token_id": config.mask_token_id,
        "dspark_target_layer_ids": list(config.target_layer_ids),
        "dspark_num_hidden_layers": config.num_hidden_layers,
        "dspark_num_attention_heads": config.num_attention_heads,
        "dspark_num_key_value_heads": config.num_key_value_heads,
        "dspark_head_dim": config.head_dim,
        "dspark_intermediate_size": config.intermediate_size,
        "dspark_rms_norm_eps": config.rms_norm_eps,
        "dspark_rope_theta": config.rope_theta,
        "dspark_max_position_embeddings": config.max_position_embeddings,
        "dspark_sample_from_anchor": True,
        "dspark_is_causal": False,
        "dspark_enable_confidence_head": True,
        "dspark_confidence_head_with_markov": True,
    }


def embed_in_checkpoint(folder: Path, drafter: Drafter, kind: Head) -> None:
    """Put the drafter with head `kind` into a checkpoint folder, in place of any other.

    The other heads' own tensors go to `heads/KIND.safetensors`, from which `choose_head` takes
    them.
    """
    tensors = {k: v for k, v in read_tensors(folder).items() if not k.startswith(PREFIX)}
    tensors |= {PREFIX + name: value for name, value in head_tensors(drafter, kind).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values = {k: v for k, v in values.items() if not k.startswith("dspark_")}
    write_json(folder / "config.json", values | embedded_config(drafter.config, kind))
    (folder / "heads").mkdir(exist_ok=True)
    for other in drafter.heads:
        own = {k: v for k, v in head_tensors(drafter, _head(other)).items() if _is_own(k)}
        save_file(own, folder / "heads" / f"{other}.safetensors")


def choose_head(folder: Path, out: Path, kind: Head) -> None:
    """Copy a checkpoint folder with another head embedded."""
    shutil.copytree(folder, out)
    tensors = read_tensors(folder)
    tensors = {k: v for k, v in tensors.items() if not _is_own(k.removeprefix(PREFIX))}
    own = load_file(folder / "heads" / f"{kind}.safetensors")
    tensors |= {PREFIX + name: value for name, value in own.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    write_json(out / "config.json", values | {"dspark_markov_head_type": kind})


def as_layout(
    drafter: Drafter, kind: Head, target: Nano, layout: Layout
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of a drafter folder of its own, in one of three ecosystems' layouts.

    DeepSpec has copies of the target's embedding and projection; the others share them.
    """
    config, tensors = drafter.config, head_tensors(drafter, kind)
    own = asdict(config) | {"target_layer_ids": list(config.target_layer_ids)}
    dspark = {
        name: own.pop(name)
        for name in ("block_size", "mask_token_id", "markov_rank", "target_layer_ids")
    }
    dspark |= {
        "markov_head_type": kind,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    layers = config.num_hidden_layers
    backbone = own | {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * layers,
    }
    if layout == "deepspec":
        for name, weight in (("embed_tokens", target.embed), ("lm_head", target.unembed)):
            tensors[f"{name}.weight"] = weight.weight.detach().to("cpu", torch.bfloat16)
        many = {"num_target_layers": target.config.num_hidden_layers, "num_anchors": 512}
        return {"architectures": ["Qwen3DSparkModel"], **backbone, **dspark, **many}, tensors
    if layout == "specforge":
        block = {"block_size": dspark.pop("block_size")}
        nested = dspark | {"attention_mode": "gqa", "projector_type": "dspark"}
        nested["confidence_head_alpha"] = 1.0
        block["num_target_layers"] = target.config.num_hidden_layers
        return {
            "architectures": ["DSparkDraftModel"],
            **backbone,
            **block,
            "dflash_config": nested,
        }, tensors
    # This layout names what enters a layer, the others what leaves it.
    entering = [layer + 1 for layer in dspark.pop("target_layer_ids")]
    return {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": backbone,
        "aux_hidden_state_layer_ids": entering,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "sample_from_anchor": True,
        "use_aux_hidden_state": True,
        **dspark,
    }, tensors


def _is_own(name: str) -> bool:
    """Whether a tensor differs between heads."""
    return name.startswith(("confidence_head.", "markov_head.gate_", "markov_head.joint_"))


def _head(name: str) -> Head:
    for kind in HEADS:
        if kind == name:
            return kind
    raise ValueError(f"no head is called {name!r}")
