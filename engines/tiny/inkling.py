"""A tiny Inkling: its configuration and its tensors under the publisher's names.

As with the tiny Inkling-2, sizes are small and awkward: heads of full and sliding layers differ in
number and size, both windows are shorter than a test's prompt, and the log scaling starts inside
it. Two layers are dense. Heads, widths and experts divide by 1 and 2 ranks. There are three MTP
heads, the second with full attention.

Weights keep every part audible: the router's bias changes which experts win, and shared experts
take a good part of the weight.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inkrt.engines.tiny import tokenizer
from inkrt.engines.tiny.random_tensor import RandomTensor, draw

NUM_LAYERS = 7
FULL_LAYERS = (2, 5)
NUM_DENSE = 2
HEADS = {"full": (6, 2, 10), "sliding": (12, 4, 8)}  # query heads, key/value heads, their size
WINDOW = 22
REL_DIM = 4
REL_EXTENT = 37
CONV_TAPS = 4
NUM_EXPERTS = 12
NUM_SHARED = 2
DENSE_WIDTH = 44
PADDED_VOCAB = 512
MUP = 3.0
NUM_MTP = 3
SLIDING_MTP = (0, 2)
HAS_CHAIN_NORM = False
HIDDEN_FIRST = True

MEL_BINS, MEL_VOCAB = 6, 5
TILE_SIZE, NUM_FRAMES = 2, 2
NUM_VISION_LAYERS = 3


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that variants of the tiny model differ in.

    Attributes:
        hidden: of the residual stream.
        expert_width: hidden units of an expert.
    """

    hidden: int
    expert_width: int


TINY = Sizes(hidden=60, expert_width=20)

_LLM = "model.llm."
_MTP = "model.mtp."

# Publisher's name to module name of transformers, applied in this order to the whole name.
_RENAMES = (
    (r"^model\.llm\.unembed\.", "lm_head."),
    (r"^model\.llm\.", "model.language_model."),
    (r"\.embed\.weight$", ".embed_tokens.weight"),
    (r"\.embed_norm\.", ".embed_tokens.embed_norm."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"_sconv\.", "_sconv.conv1d."),
    (r"\.attn\.", ".self_attn."),
    (r"\.w([qkvro])_[duv]+\.", r".\1_proj."),
    (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.experts\.w13_weight$", ".experts.gate_up_proj"),
    (r"\.experts\.w2_weight$", ".experts.down_proj"),
    (r"\.shared_w2_weight$", ".down_proj"),
    (r"\.w2_md\.", ".down_proj."),
    (r"^model\.audio\.encoder\.", "model.audio_tower.embed_audio_tokens.embed_audio_tokens."),
    (r"^model\.audio\.final_norm\.", "model.audio_tower.norm."),
    (r"^model\.visual\.layers\.linear_(\d)", r"model.vision_tower.encoder_layers.\1.projection"),
    (r"^model\.visual\.layers\.norm_(\d)", r"model.vision_tower.encoder_layers.\1.layer_norm"),
    (r"^model\.visual\.", "model.vision_tower."),
)


def config(dtype: str, sizes: Sizes = TINY) -> dict[str, Any]:
    """The content of `config.json`, in the publisher's spelling.

    Args:
        dtype: main dtype, "bfloat16" or "float32".
        sizes: of the model.
    """
    ids = tokenizer.special_ids(tokenizer.INKLING_AUDIO)
    heads, kv_heads, size = HEADS["full"]
    swa_heads, swa_kv_heads, swa_size = HEADS["sliding"]
    return {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "dtype": dtype,
        "image_token_id": ids[tokenizer.IMAGE_TOKEN],
        "audio_token_id": ids[tokenizer.AUDIO_TOKEN],
        "image_bos_token_id": ids["<|content_image|>"],
        "audio_bos_token_id": ids["<|content_audio_input|>"],
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "inkling_text",
            "dtype": dtype,
            "vocab_size": PADDED_VOCAB,
            "unpadded_vocab_size": tokenizer.VOCAB_SIZE,
            "hidden_size": sizes.hidden,
            "num_hidden_layers": NUM_LAYERS,
            "local_layer_ids": [i for i in range(NUM_LAYERS) if i not in FULL_LAYERS],
            "dense_mlp_idx": NUM_DENSE,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": size,
            "swa_num_attention_heads": swa_heads,
            "swa_num_key_value_heads": swa_kv_heads,
            "swa_head_dim": swa_size,
            "sliding_window_size": WINDOW,
            "d_rel": REL_DIM,
            "rel_extent": REL_EXTENT,
            "log_scaling_n_floor": 50,
            "log_scaling_alpha": 0.1,
            "sconv_kernel_size": CONV_TAPS,
            "dense_intermediate_size": DENSE_WIDTH,
            "intermediate_size": sizes.expert_width,
            "n_routed_experts": NUM_EXPERTS,
            "num_experts_per_tok": 3,
            "n_shared_experts": NUM_SHARED,
            "shared_expert_sink": True,
            "use_gate_bias": True,
            "use_global_scale": True,
            "norm_after_topk": True,
            "use_embed_norm": True,
            "use_sconv": True,
            "gate_activation": "sigmoid",
            "route_scale": 2.0,
            "logits_mup_width_multiplier": MUP,
            "final_logit_softcapping": None,
            "q_bias": False,
            "o_bias": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "model_max_length": 4096,
            "mtp_hidden_states_first": HIDDEN_FIRST,
            "bos_token_id": None,
            "eos_token_id": ids[tokenizer.EOS_TOKEN],
            "pad_token_id": None,
            "tie_word_embeddings": False,
        },
        "audio_config": {
            "model_type": "inkling_audio",
            "n_mel_bins": MEL_BINS,
            "mel_vocab_size": MEL_VOCAB,
            "decoder_dmodel": sizes.hidden,
            "audio_mode": "dmel",
            "use_audio_norm": True,
        },
        "vision_config": {
            "model_type": "inkling_vision",
            "patch_size": TILE_SIZE,
            "temporal_patch_size": NUM_FRAMES,
            "num_channels": 3,
            "n_layers": NUM_VISION_LAYERS,
            "decoder_dmodel": sizes.hidden,
            "use_vision_norm": True,
        },
        "mtp_config": {
            "num_nextn_predict_layers": NUM_MTP,
            "chain_hidden_post_norm": HAS_CHAIN_NORM,
            "local_layer_ids": list(SLIDING_MTP),
        },
    }


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
    for layer in range(NUM_LAYERS):
        prefix = f"{_LLM}layers.{layer}."
        yield from _block(prefix, "full" if layer in FULL_LAYERS else "sliding", sizes)
        yield from _dense(prefix, sizes) if layer < NUM_DENSE else _experts(prefix, sizes)
    yield _norm(_LLM + "norm", sizes.hidden)
    # Padding rows are not zero: whoever forgets to drop them samples them.
    yield RandomTensor(
        _LLM + "unembed.weight", (PADDED_VOCAB, sizes.hidden), 3.0 * MUP * sizes.hidden**-0.5
    )
    yield from _towers(sizes)
    yield from mtp_specs(sizes)


def mtp_specs(sizes: Sizes = TINY) -> Iterator[RandomTensor]:
    """What the tensors of the MTP heads are like."""
    for depth in range(NUM_MTP):
        prefix = f"{_MTP}layers.{depth}."
        yield _norm(prefix + "hidden_norm", sizes.hidden)
        yield _norm(prefix + "embed_norm", sizes.hidden)
        yield _linear(prefix + "input_proj.weight", sizes.hidden, 2 * sizes.hidden)
        block = prefix + "transformer_block."
        yield from _block(block, "sliding" if depth in SLIDING_MTP else "full", sizes)
        yield from _dense(block, sizes)
    if HAS_CHAIN_NORM:
        yield _norm(_MTP + "chain_norm", sizes.hidden)


def to_transformers(published: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names and values in `InklingForConditionalGeneration.state_dict()`.

    They are the same numbers, but gate and up rows stand one after the other or apart instead of
    interleaved. The model has no MTP heads there.
    """
    renamed: dict[str, Tensor] = {}
    for full_name, value in published.items():
        if full_name.startswith(_MTP):
            continue
        name = full_name
        for pattern, replacement in _RENAMES:
            name = re.sub(pattern, replacement, name)
        if full_name.endswith("experts.w13_weight"):
            found = {name: torch.cat([value[:, 0::2], value[:, 1::2]], dim=1)}
        elif match := re.fullmatch(r"(.*\.)(w13_dn|shared_w13_weight)(\.weight)?", name):
            root, end = match[1], match[3] or ""
            halves = (("gate", value[..., 0::2, :]), ("up", value[..., 1::2, :]))
            found = {f"{root}{which}_proj{end}": half.contiguous() for which, half in halves}
        else:
            found = {name: value}
        assert not renamed.keys() & found.keys(), f"two tensors are named {name}"
        renamed |= found
    return renamed


def _norm(prefix: str, size: int) -> RandomTensor:
    return RandomTensor(prefix + ".weight", (size,), 0.2, mean=1.0)


def _linear(name: str, rows: int, columns: int, gain: float = 1.0) -> RandomTensor:
    """A matrix that maps unit-variance columns to rows of standard deviation `gain`."""
    return RandomTensor(name, (rows, columns), gain * columns**-0.5)


def _block(prefix: str, kind: str, sizes: Sizes) -> Iterator[RandomTensor]:
    """All of a layer but its MLP."""
    num_heads, num_kv_heads, size = HEADS[kind]
    q_width, kv_width = num_heads * size, num_kv_heads * size
    yield _norm(prefix + "attn_norm", sizes.hidden)
    attn = prefix + "attn."
    yield _linear(attn + "wq_du.weight", q_width, sizes.hidden)
    yield _linear(attn + "wk_dv.weight", kv_width, sizes.hidden)
    yield _linear(attn + "wv_dv.weight", kv_width, sizes.hidden)
    yield _linear(attn + "wr_du.weight", num_heads * REL_DIM, sizes.hidden, 0.5)
    yield _linear(attn + "wo_ud.weight", sizes.hidden, q_width)
    # Scores are divided by the size of a head, so norms that are large make them tell.
    yield RandomTensor(attn + "q_norm.weight", (size,), 0.2, mean=1.4)
    yield RandomTensor(attn + "k_norm.weight", (size,), 0.2, mean=1.4)
    extent = REL_EXTENT if kind == "full" else WINDOW
    yield RandomTensor(attn + "rel_logits_proj.proj", (REL_DIM, extent), 1.2)
    for name in ("k_sconv", "v_sconv"):
        yield RandomTensor(f"{attn}{name}.weight", (kv_width, 1, CONV_TAPS), 0.3)
    yield RandomTensor(prefix + "attn_sconv.weight", (sizes.hidden, 1, CONV_TAPS), 0.3)
    yield _norm(prefix + "mlp_norm", sizes.hidden)
    yield RandomTensor(prefix + "mlp_sconv.weight", (sizes.hidden, 1, CONV_TAPS), 0.3)


def _dense(prefix: str, sizes: Sizes) -> Iterator[RandomTensor]:
    yield _linear(prefix + "mlp.w13_dn.weight", 2 * DENSE_WIDTH, sizes.hidden)
    yield _linear(prefix + "mlp.w2_md.weight", sizes.hidden, DENSE_WIDTH)
    yield RandomTensor(prefix + "mlp.global_scale", (1,), 0.2, mean=1.0)


def _experts(prefix: str, sizes: Sizes) -> Iterator[RandomTensor]:
    mlp = prefix + "mlp."
    yield _linear(mlp + "gate.weight", NUM_EXPERTS + NUM_SHARED, sizes.hidden, 1.5)
    yield RandomTensor(mlp + "gate.bias", (NUM_EXPERTS,), 0.25, float32=True)
    yield RandomTensor(mlp + "gate.global_scale", (1,), 0.2, mean=1.0, float32=True)
    for name, count in (("experts.", NUM_EXPERTS), ("shared_experts.shared_", NUM_SHARED)):
        w13, w2 = (
            (count, 2 * sizes.expert_width, sizes.hidden),
            (count, sizes.hidden, sizes.expert_width),
        )
        yield RandomTensor(f"{mlp}{name}w13_weight", w13, 0.5 * sizes.hidden**-0.5)
        yield RandomTensor(f"{mlp}{name}w2_weight", w2, 0.5 * sizes.expert_width**-0.5)


def _towers(sizes: Sizes) -> Iterator[RandomTensor]:
    yield RandomTensor("model.audio.encoder.weight", (MEL_BINS * MEL_VOCAB, sizes.hidden), 1.0)
    yield _norm("model.audio.final_norm", sizes.hidden)
    # With patches of 2 x 2 x 2 x 3; the last projects to the text.
    shapes = ((64, 12), (1536, 128), (sizes.hidden, 1536))
    assert len(shapes) == NUM_VISION_LAYERS
    for place, (rows, columns) in enumerate(shapes):
        yield _linear(f"model.visual.layers.linear_{place}.weight", rows, columns)
        if place + 1 < len(shapes):
            yield _norm(f"model.visual.layers.norm_{place}", rows)
    yield _norm("model.visual.final_norm", sizes.hidden)
