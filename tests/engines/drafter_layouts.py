"""Configurations and headers of one tiny drafter in every layout, to be damaged and read."""

from collections.abc import Callable
from typing import Any

import torch

from inkrt.engines.dspark.config import DraftLayerConfig, DSparkConfig
from inkrt.engines.dspark.layouts import DraftLayout, read_bundled, read_folder
from inkrt.engines.dspark.weights import draft_tensors, weight_sources
from inkrt.engines.interface import DraftTarget
from inkrt.engines.tiny import inkling2
from inkrt.engines.tiny.drafter import DrafterLayout, HeadKind, TinyDrafter, build

Edit = Callable[[dict[str, Any]], object]

TARGET = DraftTarget(
    hidden_size=60,
    num_hidden_layers=14,
    vocab_size=512,
    unpadded_vocab_size=490,
    max_position_embeddings=4096,
    softcap=30.0,
    has_embed_norm=True,
    has_mlp_conv=True,
)
# What all layouts of the tiny drafter with the default head must come to.
EXPECTED = DSparkConfig(
    hidden_size=60,
    target_hidden_size=60,
    layers=(
        DraftLayerConfig(is_causal=False, window=None),
        DraftLayerConfig(is_causal=True, window=19),
        DraftLayerConfig(is_causal=False, window=None),
    ),
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=10,
    intermediate_size=44,
    rms_norm_eps=1e-5,
    rope_theta=5000.0,
    max_position_embeddings=4096,
    block_size=7,
    anchor_first=True,
    mask_token_id=509,
    taps=(1, 6, 13),
    tap_point="layer_output",
    head="rnn",
    markov_rank=14,
    vocab_size=512,
    draft_vocab_size=512,
    is_trimmed=False,
    has_confidence=True,
    confidence_reads_markov=True,
    confidence_has_bias=True,
    has_own_embedding=False,
    has_own_unembed=False,
    applies_embed_norm=False,
    softcap_place="before_bias",
    logits_divisor=1.0,
    has_sinks=False,
)


def read(
    layout: DrafterLayout,
    edit: Edit = lambda _config: None,
    edit_shapes: Edit = lambda _shapes: None,
    *,
    head: HeadKind = "rnn",
    is_trimmed: bool = False,
    target: DraftTarget = TARGET,
    has_tensors: bool = True,
) -> DraftLayout:
    """Read a tiny drafter whose configuration and headers were changed.

    Args:
        layout: of its checkpoint.
        edit: changes its configuration.
        edit_shapes: changes shapes by stored names.
        head: of the drafter.
        is_trimmed: whether it drafts some tokens only.
        target: what it has to fit.
        has_tensors: whether there are headers to read.
    """
    tables = {
        f"model.llm.{name}.weight": torch.zeros(512, 60, dtype=torch.bfloat16)
        for name in ("embed", "unembed")
    }
    base = inkling2.config("bfloat16")
    config, values = build(TinyDrafter(layout, head, is_trimmed), base, tables, seed=0)
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    is_embedded = layout == "embedded"
    config = base | config if is_embedded else config
    edit(config)
    edit_shapes(shapes)
    tensors = draft_tensors(shapes, "FOLDER", bundled=is_embedded) if has_tensors else None
    reader = read_bundled if is_embedded else read_folder
    found = reader(config, tensors, target, "FOLDER/config.json")
    if tensors is not None:
        weight_sources(found.config, tensors, "FOLDER", target.unpadded_vocab_size)
    return found


def put(**values: object) -> Edit:
    """Set keys of the configuration."""
    return lambda config: config.update(values)


def put_in(key: str, **values: object) -> Edit:
    """Set keys of an object in the configuration."""
    return lambda config: config.setdefault(key, {}).update(values)


def drop(*keys: str) -> Edit:
    """Remove keys; a dot leads into an object."""

    def edit(config: dict[str, Any]) -> None:
        for key in keys:
            *path, last = [key] if key in config else key.split(".")
            values = config
            for name in path:
                values = values[name]
            del values[last]

    return edit


def both(*edits: Edit) -> Edit:
    """One change after the other."""

    def edit(config: dict[str, Any]) -> None:
        for each in edits:
            each(config)

    return edit
