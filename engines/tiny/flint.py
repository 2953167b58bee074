"""Small Flints: their configuration, and their tensors under the publisher's names.

Widths of the tiny one are multiples of 64, as NVFP4 in a GGUF file wants, and of little else; those
of the wide one fit the kernels for a GPU. Every query group has 8 heads, the window is shorter than
a test's prompt, and 8 layers have all kinds in the published order: two dense full ones, sliding
ones, full ones, a full last one.

Matrices are rounded to NVFP4 before anything is written, with global scales that are powers of two.
So they are exact in bfloat16 too, and a GGUF file and safetensors of one seed are the same model.

Weight scales keep every part audible and the random network calm, as for `inkling2`.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inkrt.engines.tiny import tokenizer
from inkrt.engines.tiny.nvfp4 import QuantizedMatrix, power_of_two, quantize
from inkrt.engines.tiny.random_tensor import RandomTensor, draw


@dataclass(frozen=True, slots=True)
class Sizes:
    """Dimensions of a small Flint; see `FlintConfig` for what they mean."""

    hidden: int
    num_layers: int
    num_dense: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    dense_width: int
    num_experts: int
    top_k: int
    expert_width: int
    shared_width: int

    def is_full(self, layer: int) -> bool:
        """Whether a layer has full attention (and no positional encoding)."""
        return layer < 2 or layer % 4 == 1 or layer == self.num_layers - 1


TINY = Sizes(
    hidden=192, num_layers=8, num_dense=2, num_heads=16, num_kv_heads=2, head_dim=32, window=21,
    dense_width=320, num_experts=16, top_k=6, expert_width=64, shared_width=128,
)  # fmt: skip
# As narrow as the kernels for a GPU take: widths of 256 and heads of 128.
WIDE = Sizes(
    hidden=256, num_layers=8, num_dense=2, num_heads=16, num_kv_heads=2, head_dim=128, window=70,
    dense_width=512, num_experts=16, top_k=6, expert_width=256, shared_width=512,
)  # fmt: skip

# Matrices that are one operator argument in an engine must have one global scale.
_GROUPS = (
    (r"\.[qkv]_proj$", ".qkv_proj"),
    (r"\.(gate|up)_proj$", ".gate_up_proj"),
)


def config(dtype: str, sizes: Sizes = TINY) -> dict[str, Any]:
    """The content of `config.json`.

    Args:
        dtype: main dtype, "bfloat16" or "float32".
        sizes: of the model.
    """
    return {
        "architectures": ["FlintForCausalLM"],
        "model_type": "flint",
        "dtype": dtype,
        "vocab_size": tokenizer.VOCAB_SIZE,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.dense_width,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": sizes.window,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": [
            "full_attention" if sizes.is_full(i) else "sliding_attention"
            for i in range(sizes.num_layers)
        ],
        "no_rope_layer_indices": [i for i in range(sizes.num_layers) if sizes.is_full(i)],
        "mlp_only_layers": list(range(sizes.num_dense)),
        "moe_intermediate_size": sizes.expert_width,
        "shared_expert_intermediate_size": sizes.shared_width,
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.top_k,
        "norm_topk_prob": True,
        "router_score_function": "sigmoid",
        "decoder_sparse_step": 1,
        "router_aux_loss_coef": 0.0005,
        "output_router_logits": False,
        "initializer_range": 0.02,
        "use_cache": True,
        # As published: they stand in generation_config.json.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def contents(
    seed: int, dtype: torch.dtype, sizes: Sizes = TINY
) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
    """Every tensor of the checkpoint, layer by layer, by its publisher's name.

    Args:
        seed: other seeds give other weights.
        dtype: of the tensors that are neither quantized nor kept in float32.
        sizes: of the model.
    """
    for spec in _plain(sizes):
        yield spec.name, draw(spec, seed, dtype)
    for spec in _matrices(sizes):
        scale = power_of_two(spec.std) * _variation(spec.name)
        yield spec.name, quantize(draw(spec, seed, torch.float64), scale)


def tensors(seed: int, dtype: torch.dtype, sizes: Sizes = TINY) -> Iterator[tuple[str, Tensor]]:
    """The same as plain tensors, as safetensors hold them; nothing is rounded."""
    for name, value in contents(seed, dtype, sizes):
        yield name, value if isinstance(value, Tensor) else value.values().to(dtype)


def to_transformers(published: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names and values in `FlintForCausalLM.state_dict()`: experts are stacked, gates first."""
    renamed: dict[str, Tensor] = {}
    for name, value in published.items():
        match = re.fullmatch(r"(.*\.mlp\.experts)\.0\.(gate|down)_proj\.weight", name)
        if match is None:
            if ".mlp.experts." not in name:
                renamed[name.replace(".softmax_offset", ".sinks")] = value
            continue
        num_experts = sum(
            bool(re.fullmatch(rf"{re.escape(match[1])}\.\d+\.down_proj\.weight", x))
            for x in published
        )
        parts = ("gate", "up") if match[2] == "gate" else ("down",)
        renamed[f"{match[1]}.{'_'.join(parts)}_proj"] = torch.stack(
            [
                torch.cat([published[f"{match[1]}.{e}.{x}_proj.weight"] for x in parts])
                for e in range(num_experts)
            ]
        )
    return renamed


def _variation(name: str) -> float:
    """1, 2 or 4, equal for matrices of a group and different from expert to expert."""
    group = name.removesuffix(".weight")
    for pattern, replacement in _GROUPS:
        group = re.sub(pattern, replacement, group)
    return 2.0 ** (hashlib.sha256(group.encode()).digest()[0] % 3)


def _plain(sizes: Sizes) -> Iterator[RandomTensor]:
    """Tensors that no release quantizes."""
    yield RandomTensor("model.embed_tokens.weight", (tokenizer.VOCAB_SIZE, sizes.hidden), 1.0)
    for layer in range(sizes.num_layers):
        prefix = f"model.layers.{layer}."
        yield _norm(prefix + "input_layernorm", sizes.hidden)
        # Sharp attention: queries and keys that agree stand out.
        yield _norm(prefix + "self_attn.q_norm", sizes.head_dim, mean=1.2)
        yield _norm(prefix + "self_attn.k_norm", sizes.head_dim, mean=1.2)
        yield RandomTensor(
            prefix + "self_attn.softmax_offset", (sizes.num_heads,), 1.5, float32=True
        )
        yield _norm(prefix + "post_attention_layernorm", sizes.hidden)
        if layer >= sizes.num_dense:
            std = 1.5 * sizes.hidden**-0.5
            yield RandomTensor(prefix + "mlp.gate.weight", (sizes.num_experts, sizes.hidden), std)
    yield _norm("model.norm", sizes.hidden)


def _matrices(sizes: Sizes) -> Iterator[RandomTensor]:
    """Tensors that are NVFP4 in a GGUF release."""
    q_width, kv_width = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    for layer in range(sizes.num_layers):
        prefix = f"model.layers.{layer}."
        yield _linear(prefix + "self_attn.q_proj", q_width, sizes.hidden)
        yield _linear(prefix + "self_attn.k_proj", kv_width, sizes.hidden)
        yield _linear(prefix + "self_attn.v_proj", kv_width, sizes.hidden)
        yield _linear(prefix + "self_attn.o_proj", sizes.hidden, q_width)
        if layer < sizes.num_dense:
            yield from _mlp(prefix + "mlp.", sizes.hidden, sizes.dense_width, 0.7)
            continue
        for expert in range(sizes.num_experts):
            yield from _mlp(f"{prefix}mlp.experts.{expert}.", sizes.hidden, sizes.expert_width, 1.0)
        yield from _mlp(prefix + "mlp.shared_expert.", sizes.hidden, sizes.shared_width, 0.5)
    yield _linear("lm_head", tokenizer.VOCAB_SIZE, sizes.hidden, 3.0)


def _mlp(prefix: str, hidden: int, width: int, gain: float) -> Iterator[RandomTensor]:
    yield _linear(prefix + "gate_proj", width, hidden)
    yield _linear(prefix + "up_proj", width, hidden)
    yield _linear(prefix + "down_proj", hidden, width, gain)


def _norm(prefix: str, size: int, mean: float = 1.0) -> RandomTensor:
    return RandomTensor(prefix + ".weight", (size,), 0.2, mean=mean)


def _linear(prefix: str, rows: int, columns: int, gain: float = 1.0) -> RandomTensor:
    """A matrix that maps unit-variance columns to rows of standard deviation `gain`."""
    return RandomTensor(prefix + ".weight", (rows, columns), gain * columns**-0.5)
