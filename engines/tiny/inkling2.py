"""A tiny Inkling-2: its configuration and its tensors under the publisher's names.

The sizes are small and awkward on purpose: most are multiples of no power of two above 4, both
windows are shorter than a test's prompt and differ, the log scaling starts inside it, and 14 layers
make two whole residual blocks and a tail. Heads, experts and padded vocabulary divide by 1, 2 and 4
ranks; like the real one, the unpadded vocabulary does not.

Weight scales keep every part of the model audible: clips bite, the router's bias changes which
experts win, mixing weights are uneven and the next token depends on the prompt. They also keep the
random network calm: in bfloat16 its logits are within some 3 % of float32, so that a comparison in
bfloat16 can tell rounding from mistakes.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inkrt.engines.tiny import tokenizer
from inkrt.engines.tiny.random_tensor import RandomTensor, draw

NUM_HEADS = 12
NUM_KV_HEADS = 4
HEAD_DIM = 8
WINDOW = 22
REL_DIM = 4
REL_EXTENT = 37
CONV_TAPS = 4
NUM_EXPERTS = 12
PADDED_VOCAB = 512


@dataclass(frozen=True, slots=True)
class Sizes:
    """What differs between the tiny models.

    Attributes:
        hidden: width of the residual stream.
        expert_width: units of an expert.
        num_layers: decoder layers.
        block_layers: of a residual block; also the distance of the full-attention layers.
    """

    hidden: int
    expert_width: int
    num_layers: int = 14
    block_layers: int = 6


TINY = Sizes(hidden=60, expert_width=20)

VISION_HIDDEN = 24
VISION_WIDTH = 40
VISION_LAYERS = 2
VISION_HEADS = 2
VISION_PATCH = 4
VISION_MERGE = 2
VISION_GRID = 6
VISION_PROJECTION = 48

_LLM = "model.llm."
_VISUAL = "model.visual."

# Publisher's name to module name of transformers, applied in this order to the whole name.
_RENAMES = (
    (r"^model\.llm\.unembed\.", "lm_head."),
    (r"^model\.llm\.", "model.language_model."),
    (r"\.embed\.weight$", ".embed_tokens.weight"),
    (r"\.embed_norm\.", ".embed_tokens.embed_norm."),
    (r"\.attn_res\.mlp_queries\.(\d+)$", r".layers.\1.mlp_input.query"),
    (r"\.attn_res\.output_query$", ".final_input.query"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.([qkv])_input_norm\.", r".\1_input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.attn_sconv\.", ".post_attention_convolution.conv1d."),
    (r"\.mlp_sconv\.", ".post_mlp_convolution.conv1d."),
    (r"\.attn\.", ".self_attn."),
    (r"\.w([qkv])_d[uv]\.", r".\1_proj.linear."),
    (r"\.([kv])_sconv\.weight$", r".\1_proj.sconv.conv1d.weight"),
    (r"\.([kv])_sconv\.static_w$", r".\1_proj.sconv.static_weight"),
    (r"\.([kv])_sconv\.weight_proj$", r".\1_proj.sconv.weight_proj.weight"),
    (r"\.q_l2_clip\.", ".q_proj.norm."),
    (r"\.wr_du\.", ".relative_position_bias.linear."),
    (r"\.rel_l2_clip\.", ".relative_position_bias.norm."),
    (r"\.rel_logits_proj\.", ".relative_position_bias."),
    (r"\.gate_attn\.", ".o_proj.gate_proj."),
    (r"\.wo_ud\.", ".o_proj.linear."),
    (r"\.attn_sink_proj\.", ".sink_proj."),
    (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.experts\.w13_weight$", ".experts.gate_up_proj"),
    (r"\.experts\.w2_weight$", ".experts.down_proj"),
    (r"^model\.visual\.(backbone\.)?", "model.vision_tower."),
    (r"\.position_embedding$", ".position_embedding.weight"),
    (r"\.ln_pre\.", ".pre_layernorm."),
    (r"\.ln_1\.", ".layernorm_before."),
    (r"\.ln_2\.", ".layernorm_after."),
    (r"\.ls_([12])\.gamma$", r".lambda_\1"),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    (r"\.proj_in\.", ".merger.linear_1."),
    (r"\.proj_out\.", ".merger.linear_2."),
)


def config(dtype: str, sizes: Sizes = TINY) -> dict[str, Any]:
    """The content of `config.json`.

    Args:
        dtype: main dtype, "bfloat16" or "float32".
        sizes: of the model.
    """
    ids = tokenizer.special_ids()
    return {
        "architectures": ["Inkling2ForConditionalGeneration"],
        "model_type": "inkling2",
        "dtype": dtype,
        "image_token_id": ids[tokenizer.IMAGE_TOKEN],
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "inkling2_text",
            "dtype": dtype,
            "vocab_size": PADDED_VOCAB,
            "unpadded_vocab_size": tokenizer.VOCAB_SIZE,
            "hidden_size": sizes.hidden,
            "num_hidden_layers": sizes.num_layers,
            "layer_types": [
                "hybrid" if is_full(layer, sizes) else "hybrid_sliding"
                for layer in range(sizes.num_layers)
            ],
            "num_attention_heads": NUM_HEADS,
            "num_key_value_heads": NUM_KV_HEADS,
            "head_dim": HEAD_DIM,
            "swa_num_attention_heads": NUM_HEADS,
            "swa_num_key_value_heads": NUM_KV_HEADS,
            "swa_head_dim": HEAD_DIM,
            "sliding_window_size": WINDOW,
            "d_rel": REL_DIM,
            "rel_extent": REL_EXTENT,
            "log_scaling_n_floor": 50,
            "log_scaling_alpha": 0.1,
            "qk_l2_clip_threshold": 2.5,
            "rel_l2_clip_threshold": 0.7,
            "n_layers_per_attn_res_block": sizes.block_layers,
            "conv_kernel_size": CONV_TAPS,
            "number_of_conv_states": 4,
            "n_routed_experts": NUM_EXPERTS,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": sizes.expert_width,
            "route_scale": 2.0,
            "scoring_func": "sigmoid",
            "hidden_act": "silu",
            "mlp_gate_softcap": 4.0,
            "mlp_up_softcap": 25.0,
            "final_logit_softcapping": 30.0,
            "rms_norm_eps": 1e-5,  # not the constant that the residual mix uses
            "max_position_embeddings": 4096,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "bos_token_id": None,
            "eos_token_id": ids[tokenizer.EOS_TOKEN],
            "pad_token_id": None,
            "tie_word_embeddings": False,
            "use_cache": True,
        },
        "vision_config": {
            "model_type": "inkling2_vision",
            "dtype": dtype,
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": VISION_WIDTH,
            "mlp_ratio": VISION_WIDTH / VISION_HIDDEN,
            "num_hidden_layers": VISION_LAYERS,
            "num_attention_heads": VISION_HEADS,
            "num_channels": 3,
            "patch_size": VISION_PATCH,
            "spatial_merge_size": VISION_MERGE,
            "posemb_grid_size": VISION_GRID,
            "projection_hidden_dim": VISION_PROJECTION,
            "projector_bias": False,
            "text_hidden_size": sizes.hidden,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "layer_scale_init_value": 0.1,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
        },
    }


def is_full(layer: int, sizes: Sizes = TINY) -> bool:
    """Whether a layer has full attention."""
    return (layer + 1) % sizes.block_layers == 0


def tensors(seed: int, dtype: torch.dtype, sizes: Sizes = TINY) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint by its publisher's name, layer by layer.

    Args:
        seed: other seeds give other weights.
        dtype: of the tensors that the publisher does not keep in float32.
        sizes: of the model.
    """
    for spec in specs(sizes):
        yield spec.name, draw(spec, seed, dtype)


def specs(sizes: Sizes = TINY) -> Iterator[RandomTensor]:
    """What these tensors are like."""
    yield RandomTensor(_LLM + "embed.weight", (PADDED_VOCAB, sizes.hidden), 1.0)
    yield _norm(_LLM + "embed_norm", sizes.hidden)
    for layer in range(sizes.num_layers):
        yield from _residual_queries(layer, sizes)
        yield from _layer_norms(layer, sizes)
        yield from _attention(layer, sizes)
        yield from _experts(layer, sizes)
    yield RandomTensor(_LLM + "attn_res.output_query", (sizes.hidden,), 0.6, float32=True)
    yield _norm(_LLM + "norm", sizes.hidden)
    # Padding rows are not zero: whoever forgets to drop them samples them.
    yield RandomTensor(
        _LLM + "unembed.weight", (PADDED_VOCAB, sizes.hidden), 3.0 * sizes.hidden**-0.5
    )
    yield from _vision(sizes)


def to_transformers(published: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names and values in `Inkling2ForConditionalGeneration.state_dict()`.

    They are the same numbers, but gate and up rows of the experts stand one after the other instead
    of interleaved, and the head has no padding rows.
    """
    renamed: dict[str, Tensor] = {}
    for full_name, value in published.items():
        name = full_name
        if name.endswith(".w13_weight"):
            value = torch.cat([value[:, 0::2], value[:, 1::2]], dim=1)  # noqa: PLW2901
        if name == _LLM + "unembed.weight":
            value = value[: tokenizer.VOCAB_SIZE].clone()  # noqa: PLW2901
        if match := re.fullmatch(r"model\.llm\.attn_res\.attn_queries\.(\d+)", name):
            # The first layer has no query, so the publisher counts from the second.
            name = f"{_LLM}layers.{int(match[1]) + 1}.attention_input.query"
        for pattern, replacement in _RENAMES:
            name = re.sub(pattern, replacement, name)
        assert name not in renamed, f"two tensors are named {name}"
        renamed[name] = value
    return renamed


def _norm(prefix: str, size: int) -> RandomTensor:
    return RandomTensor(prefix + ".weight", (size,), 0.2, mean=1.0)


def _linear(name: str, rows: int, columns: int, gain: float = 1.0) -> RandomTensor:
    """A matrix that maps unit-variance columns to rows of standard deviation `gain`."""
    return RandomTensor(name, (rows, columns), gain * columns**-0.5)


def _residual_queries(layer: int, sizes: Sizes) -> Iterator[RandomTensor]:
    prefix = _LLM + "attn_res."
    if layer > 0:
        shape = (3, sizes.hidden) if is_full(layer, sizes) else (sizes.hidden,)
        yield RandomTensor(f"{prefix}attn_queries.{layer - 1}", shape, 0.6, float32=True)
    yield RandomTensor(f"{prefix}mlp_queries.{layer}", (sizes.hidden,), 0.6, float32=True)


def _layer_norms(layer: int, sizes: Sizes) -> Iterator[RandomTensor]:
    prefix = f"{_LLM}layers.{layer}."
    inputs = (
        ["q_input_norm", "k_input_norm", "v_input_norm"] if is_full(layer, sizes) else ["attn_norm"]
    )
    for name in [*inputs, "mlp_norm"]:
        yield _norm(prefix + name, sizes.hidden)


def _attention(layer: int, sizes: Sizes) -> Iterator[RandomTensor]:
    prefix = f"{_LLM}layers.{layer}.attn."
    q_width, kv_width = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    yield _linear(prefix + "wq_du.weight", q_width, sizes.hidden)
    yield _linear(prefix + "wk_dv.weight", kv_width, sizes.hidden, 1.5)
    yield _linear(prefix + "wv_dv.weight", kv_width, sizes.hidden)
    yield _linear(prefix + "wr_du.weight", NUM_HEADS * REL_DIM, sizes.hidden, 0.5)
    yield _linear(prefix + "gate_attn.weight", q_width, sizes.hidden, 0.5)
    yield _linear(prefix + "attn_sink_proj.weight", NUM_HEADS, sizes.hidden)
    yield _linear(prefix + "wo_ud.weight", sizes.hidden, q_width, 6.0)
    yield RandomTensor(prefix + "q_l2_clip.scale", (NUM_HEADS, HEAD_DIM), 0.2, mean=1.0)
    yield RandomTensor(prefix + "rel_l2_clip.scale", (NUM_HEADS, REL_DIM), 0.2, mean=1.0)
    extent = REL_EXTENT if is_full(layer, sizes) else WINDOW
    yield RandomTensor(prefix + "rel_logits_proj.proj", (REL_DIM, extent), 1.2)
    for name in ("k_sconv", "v_sconv"):
        if is_full(layer, sizes):
            taps = NUM_KV_HEADS * CONV_TAPS
            yield RandomTensor(prefix + name + ".static_w", (CONV_TAPS, kv_width), 0.5)
            yield _linear(prefix + name + ".weight_proj", taps, sizes.hidden, 0.5)
        else:
            yield RandomTensor(prefix + name + ".weight", (kv_width, 1, CONV_TAPS), 0.5)
    yield RandomTensor(f"{_LLM}layers.{layer}.attn_sconv.weight", (sizes.hidden, 1, CONV_TAPS), 0.5)


def _experts(layer: int, sizes: Sizes) -> Iterator[RandomTensor]:
    prefix = f"{_LLM}layers.{layer}.mlp."
    yield _linear(prefix + "gate.weight", NUM_EXPERTS, sizes.hidden, 1.5)
    yield RandomTensor(prefix + "gate.bias", (NUM_EXPERTS,), 0.25, float32=True)
    w13, w2 = (
        (NUM_EXPERTS, 2 * sizes.expert_width, sizes.hidden),
        (NUM_EXPERTS, sizes.hidden, sizes.expert_width),
    )
    yield RandomTensor(prefix + "experts.w13_weight", w13, 0.5 * sizes.hidden**-0.5)
    yield RandomTensor(prefix + "experts.w2_weight", w2, 0.5 * sizes.expert_width**-0.5)
    yield RandomTensor(f"{_LLM}layers.{layer}.mlp_sconv.weight", (sizes.hidden, 1, CONV_TAPS), 0.5)


def _vision(sizes: Sizes) -> Iterator[RandomTensor]:
    prefix, hidden = _VISUAL + "backbone.", VISION_HIDDEN
    patch = 3 * VISION_PATCH**2
    yield RandomTensor(prefix + "embeddings.class_embedding", (hidden,), 1.0)
    yield RandomTensor(prefix + "embeddings.cls_position_embedding", (hidden,), 0.5)
    yield _linear(prefix + "embeddings.patch_embedding.weight", hidden, patch)
    grid = (VISION_GRID**2, hidden)
    yield RandomTensor(prefix + "embeddings.position_embedding", grid, 0.5)
    yield from _layer_norm(prefix + "ln_pre")
    for layer in range(VISION_LAYERS):
        base = f"{prefix}layers.{layer}."
        for name in ("ln_1", "ln_2"):
            yield from _layer_norm(base + name)
        for name in ("ls_1.gamma", "ls_2.gamma"):
            yield RandomTensor(base + name, (hidden,), 0.1, mean=0.5)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _biased_linear(f"{base}self_attn.{name}", hidden, hidden)
        yield from _biased_linear(base + "mlp.c_fc", VISION_WIDTH, hidden)
        yield from _biased_linear(base + "mlp.c_proj", hidden, VISION_WIDTH)
    merged = VISION_MERGE**2 * hidden
    yield _linear(_VISUAL + "proj_in.weight", VISION_PROJECTION, merged)
    yield _linear(_VISUAL + "proj_out.weight", sizes.hidden, VISION_PROJECTION)


def _layer_norm(prefix: str) -> Iterator[RandomTensor]:
    yield _norm(prefix, VISION_HIDDEN)
    yield RandomTensor(prefix + ".bias", (VISION_HIDDEN,), 0.1)


def _biased_linear(prefix: str, rows: int, columns: int) -> Iterator[RandomTensor]:
    yield _linear(prefix + ".weight", rows, columns)
    yield RandomTensor(prefix + ".bias", (rows,), 0.1)
