"""A tiny random DSpark drafter for a tiny model, in any of the layouts that are read.

The sizes are awkward: no two are equal and most are multiples of no power of two above 2. One layer
of three is sliding, and of its kinds only the sliding one is causal. The numbers are the same in
every layout.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from inkrt.engines.catalog import find_definition
from inkrt.engines.interface import Sharding
from inkrt.engines.tiny.random_tensor import RandomTensor, draw

DrafterLayout = Literal["embedded", "deepspec", "speculators", "specforge"]
HeadKind = Literal["vanilla", "gated", "rnn"]
DRAFTER_LAYOUTS: tuple[DrafterLayout, ...] = ("embedded", "deepspec", "speculators", "specforge")
HEAD_KINDS: tuple[HeadKind, ...] = ("vanilla", "gated", "rnn")

LAYER_TYPES = ("full_attention", "sliding_attention", "full_attention")
NUM_HEADS = 6
NUM_KV_HEADS = 2
HEAD_DIM = 10
WIDTH = 44
WINDOW = 19
RANK = 14
BLOCK_SIZE = 7


@dataclass(frozen=True, slots=True)
class TinyDrafter:
    """What differs between tiny drafters.

    Attributes:
        layout: of its checkpoint.
        head: kind of the sequential head.
        is_trimmed: whether it drafts only two of three tokens.
    """

    layout: DrafterLayout
    head: HeadKind = "rnn"
    is_trimmed: bool = False


def build(
    drafter: TinyDrafter, target_config: Mapping[str, Any], target: Mapping[str, Tensor], seed: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a drafter.

    Args:
        drafter: which.
        target_config: config.json of the target.
        target: its tensors.
        seed: other seeds give other weights.

    Returns:
        Embedded: what is added to the target's config.json and tensors. Else a folder's content.
    """
    definition = find_definition(target_config)
    model = definition.parse_config(target_config)
    fits = definition.draft_target(model)
    sources = definition.weight_sources(model, frozenset(target), 0, Sharding(1, "experts"))
    embed = target[sources["embed"].parts[0].name]
    unembed = target[sources[fits.unembed].parts[0].name]
    last = fits.num_hidden_layers - 1
    # Other layouts number what enters a layer, or cannot name the final state.
    has_final = fits.has_final_tap and drafter.layout == "embedded"
    taps = sorted({1, last // 2, last + has_final})
    kept = _kept_tokens(fits.unpadded_vocab_size) if drafter.is_trimmed else None
    num_drafted = fits.vocab_size if kept is None else len(kept)
    shapes = _specs(drafter.head, fits.hidden_size, len(taps), fits.vocab_size, num_drafted)
    tensors = {spec.name: draw(spec, seed, embed.dtype) for spec in shapes}
    if kept is not None:
        tensors["d2t"] = kept - torch.arange(len(kept))
        tensors["t2d"] = torch.zeros(fits.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    dspark: dict[str, Any] = {
        "markov_rank": RANK,
        "markov_head_type": drafter.head,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "applies_embed_norm": False,
        "tap_point": "layer_output",
    }
    backbone: dict[str, Any] = {
        "num_hidden_layers": len(LAYER_TYPES),
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": WIDTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 4096,
        "layer_types": list(LAYER_TYPES),
        "sliding_window": WINDOW,
    }
    mask = fits.vocab_size - 3
    if drafter.layout == "embedded":
        values = dspark | backbone | {"block_size": BLOCK_SIZE, "noise_token_id": mask}
        values |= {"target_layer_ids": taps, "sample_from_anchor": True}
        if fits.softcap is not None:
            values["softcap_place"] = "before_bias"
        if kept is not None:
            values["draft_vocab_size"] = num_drafted
        config = {f"dspark_{key}": value for key, value in values.items()}
        return config, {f"dspark.{name}": value for name, value in tensors.items()}

    backbone |= {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False}
    backbone |= {"hidden_size": fits.hidden_size, "vocab_size": fits.vocab_size}
    backbone |= {"tie_word_embeddings": False}
    if fits.softcap is not None:
        backbone["final_logit_softcapping"] = fits.softcap
    dspark |= {"mask_token_id": mask, "target_layer_ids": taps}
    if kept is not None:
        dspark["draft_vocab_size"] = num_drafted
    own = {"block_size": BLOCK_SIZE, "num_target_layers": fits.num_hidden_layers}
    if drafter.layout == "deepspec":
        tensors["embed_tokens.weight"] = embed.clone()
        if kept is None:
            tensors["lm_head.weight"] = unembed.clone()
        return {"architectures": ["Qwen3DSparkModel"], **backbone, **dspark, **own}, tensors
    if drafter.layout == "specforge":
        nested = dspark | {"projector_type": "dspark", "attention_mode": "gqa"}
        config = {"architectures": ["DSparkDraftModel"], **backbone, **own}
        named = {_old_name(name): value for name, value in tensors.items()}
        return config | {"dflash_config": nested}, named
    del dspark["target_layer_ids"]
    config = {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": backbone,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in taps],
        "block_size": BLOCK_SIZE,
        "draft_vocab_size": num_drafted,
        "target_hidden_size": fits.hidden_size,
        "sample_from_anchor": True,
        **dspark,
    }
    return config, {f"model.{name}": value for name, value in tensors.items()}


def write_folder(out: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a drafter's own checkpoint folder."""
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(dict(tensors), out / "model.safetensors", metadata={"format": "pt"})


def _old_name(name: str) -> str:
    """Heads were once a part of the vocabulary projection."""
    return f"logit_head.{name}" if name.startswith(("markov_head.", "confidence_head.")) else name


def _kept_tokens(num_tokens: int) -> Tensor:
    """Two of three tokens, ascending."""
    tokens = torch.arange(num_tokens)
    return tokens[tokens % 3 != 1]


def _specs(
    head: HeadKind, hidden: int, num_taps: int, vocab_size: int, num_drafted: int
) -> Iterator[RandomTensor]:
    """What the tensors are like, under DeepSpec's names."""

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> RandomTensor:
        return RandomTensor(f"{name}.weight", (rows, columns), gain * columns**-0.5)

    def norm(name: str, size: int) -> RandomTensor:
        return RandomTensor(f"{name}.weight", (size,), 0.2, mean=1.0)

    yield linear("fc", hidden, num_taps * hidden)
    yield norm("hidden_norm", hidden)
    q_width, kv_width = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    for layer in range(len(LAYER_TYPES)):
        prefix = f"layers.{layer}."
        yield linear(prefix + "self_attn.q_proj", q_width, hidden)
        yield linear(prefix + "self_attn.k_proj", kv_width, hidden)
        yield linear(prefix + "self_attn.v_proj", kv_width, hidden)
        yield linear(prefix + "self_attn.o_proj", hidden, q_width)
        yield norm(prefix + "self_attn.q_norm", HEAD_DIM)
        yield norm(prefix + "self_attn.k_norm", HEAD_DIM)
        yield linear(prefix + "mlp.gate_proj", WIDTH, hidden)
        yield linear(prefix + "mlp.up_proj", WIDTH, hidden)
        yield linear(prefix + "mlp.down_proj", hidden, WIDTH)
        yield norm(prefix + "input_layernorm", hidden)
        yield norm(prefix + "post_attention_layernorm", hidden)
    yield norm("norm", hidden)
    yield RandomTensor("markov_head.markov_w1.weight", (vocab_size, RANK), 1.0)
    yield linear("markov_head.markov_w2", num_drafted, RANK, 2.0)
    if head == "gated":
        yield linear("markov_head.gate_proj", RANK, hidden + RANK)
        yield RandomTensor("markov_head.gate_proj.bias", (RANK,), 0.5)
    if head == "rnn":
        yield linear("markov_head.joint_proj", 3 * RANK, 2 * RANK + hidden)
        yield RandomTensor("markov_head.joint_proj.bias", (3 * RANK,), 0.5)
    yield linear("confidence_head.proj", 1, hidden + RANK)
    yield RandomTensor("confidence_head.proj.bias", (1,), 0.5)
