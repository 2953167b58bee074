"""A tiny Flint: its configuration, and its tensors under the publisher's names.

Widths are multiples of 64, as NVFP4 in a GGUF file wants, and of little else. Every query group has
8 heads, the window is shorter than a test's prompt, and 8 layers have all kinds in the published
order: two dense full ones, sliding ones, full ones, a full last one.

Matrices are rounded to NVFP4 before anything is written, with global scales that are powers of two.
So they are exact in bfloat16 too, and a GGUF file and safetensors of one seed are the same model.

Weight scales keep every part audible and the random network calm, as for `inkling2`.
"""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inkrt.engines.tiny import tokenizer
from inkrt.engines.tiny.nvfp4 import QuantizedMatrix, power_of_two, quantize
from inkrt.engines.tiny.random_tensor import RandomTensor, draw

HIDDEN = 192
NUM_LAYERS = 8
NUM_DENSE = 2
NUM_HEADS = 16
NUM_KV_HEADS = 2
HEAD_DIM = 32
WINDOW = 21
DENSE_WIDTH = 320
NUM_EXPERTS = 16
TOP_K = 6
EXPERT_WIDTH = 64
SHARED_WIDTH = 128

# Matrices that are one operator argument in an engine must have one global scale.
_GROUPS = (
    (r"\.[qkv]_proj$", ".qkv_proj"),
    (r"\.(gate|up)_proj$", ".gate_up_proj"),
)


def config(dtype: str) -> dict[str, Any]:
    """The content of `config.json`.

    Args:
        dtype: main dtype, "bfloat16" or "float32".
    """
    return {
        "architectures": ["FlintForCausalLM"],
        "model_type": "flint",
        "dtype": dtype,
        "vocab_size": tokenizer.VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE_WIDTH,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": [
            "full_attention" if is_full(i) else "sliding_attention" for i in range(NUM_LAYERS)
        ],
        "no_rope_layer_indices": [i for i in range(NUM_LAYERS) if is_full(i)],
        "mlp_only_layers": list(range(NUM_DENSE)),
        "moe_intermediate_size": EXPERT_WIDTH,
        "shared_expert_intermediate_size": SHARED_WIDTH,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
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


def is_full(layer: int) -> bool:
    """Whether a layer has full attention (and no positional encoding)."""
    return layer < 2 or layer % 4 == 1 or layer == NUM_LAYERS - 1


def contents(seed: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
    """Every tensor of the checkpoint, layer by layer, by its publisher's name.

    Args:
        seed: other seeds give other weights.
        dtype: of the tensors that are neither quantized nor kept in float32.
    """
    for spec in _plain():
        yield spec.name, draw(spec, seed, dtype)
    for spec in _matrices():
        scale = power_of_two(spec.std) * _variation(spec.name)
        yield spec.name, quantize(draw(spec, seed, torch.float64), scale)


def tensors(seed: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The same as plain tensors, as safetensors hold them; nothing is rounded."""
    for name, value in contents(seed, dtype):
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
        parts = ("gate", "up") if match[2] == "gate" else ("down",)
        renamed[f"{match[1]}.{'_'.join(parts)}_proj"] = torch.stack(
            [
                torch.cat([published[f"{match[1]}.{e}.{x}_proj.weight"] for x in parts])
                for e in range(NUM_EXPERTS)
            ]
        )
    return renamed


def _variation(name: str) -> float:
    """1, 2 or 4, equal for matrices of a group and different from expert to expert."""
    group = name.removesuffix(".weight")
    for pattern, replacement in _GROUPS:
        group = re.sub(pattern, replacement, group)
    return 2.0 ** (hashlib.sha256(group.encode()).digest()[0] % 3)


def _plain() -> Iterator[RandomTensor]:
    """Tensors that no release quantizes."""
    yield RandomTensor("model.embed_tokens.weight", (tokenizer.VOCAB_SIZE, HIDDEN), 1.0)
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        yield _norm(prefix + "input_layernorm", HIDDEN)
        # Sharp attention: queries and keys that agree stand out.
        yield _norm(prefix + "self_attn.q_norm", HEAD_DIM, mean=1.2)
        yield _norm(prefix + "self_attn.k_norm", HEAD_DIM, mean=1.2)
        yield RandomTensor(prefix + "self_attn.softmax_offset", (NUM_HEADS,), 1.5, float32=True)
        yield _norm(prefix + "post_attention_layernorm", HIDDEN)
        if layer >= NUM_DENSE:
            std = 1.5 * HIDDEN**-0.5
            yield RandomTensor(prefix + "mlp.gate.weight", (NUM_EXPERTS, HIDDEN), std)
    yield _norm("model.norm", HIDDEN)


def _matrices() -> Iterator[RandomTensor]:
    """Tensors that are NVFP4 in a GGUF release."""
    q_width, kv_width = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        yield _linear(prefix + "self_attn.q_proj", q_width, HIDDEN)
        yield _linear(prefix + "self_attn.k_proj", kv_width, HIDDEN)
        yield _linear(prefix + "self_attn.v_proj", kv_width, HIDDEN)
        yield _linear(prefix + "self_attn.o_proj", HIDDEN, q_width)
        if layer < NUM_DENSE:
            yield from _mlp(prefix + "mlp.", DENSE_WIDTH, 0.7)
            continue
        for expert in range(NUM_EXPERTS):
            yield from _mlp(f"{prefix}mlp.experts.{expert}.", EXPERT_WIDTH, 1.0)
        yield from _mlp(prefix + "mlp.shared_expert.", SHARED_WIDTH, 0.5)
    yield _linear("lm_head", tokenizer.VOCAB_SIZE, HIDDEN, 3.0)


def _mlp(prefix: str, width: int, gain: float) -> Iterator[RandomTensor]:
    yield _linear(prefix + "gate_proj", width, HIDDEN)
    yield _linear(prefix + "up_proj", width, HIDDEN)
    yield _linear(prefix + "down_proj", HIDDEN, width, gain)


def _norm(prefix: str, size: int, mean: float = 1.0) -> RandomTensor:
    return RandomTensor(prefix + ".weight", (size,), 0.2, mean=mean)


def _linear(prefix: str, rows: int, columns: int, gain: float = 1.0) -> RandomTensor:
    """A matrix that maps unit-variance columns to rows of standard deviation `gain`."""
    return RandomTensor(prefix + ".weight", (rows, columns), gain * columns**-0.5)
