"""Quantized tiny checkpoints of few layers, and everything that a build reads of one."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inkrt.builder.build import PAGE_TOKENS
from inkrt.builder.checkpoint import CheckpointSource, open_checkpoint
from inkrt.builder.pack import PackedTensor, packed_tensors, read_weight
from inkrt.engines.catalog import find_definition
from inkrt.engines.interface import Sharding, StateOptions, WeightSource
from inkrt.engines.tiny import checkpoint, flint, inkling, inkling2, inkling2_quantized
from inkrt.engines.tiny.checkpoint import write_checkpoint

STATE = StateOptions(num_slots=1, max_seq_len=64, page_tokens=PAGE_TOKENS)
SMALL_FLINT = replace(flint.TINY, num_layers=4, num_experts=6, top_k=3)
# Models, and how their checkpoint is written.
QUANTIZED: dict[str, dict[str, Any]] = {
    "inkling-nvfp4": {},
    "inkling2-quantized": {},
    "inkling2-quantized-attention": {},
    "inkling2-mxfp8": {},
    "flint": {"format": "gguf"},
}


@contextmanager
def few_layers() -> Iterator[None]:
    """Inside of it, models have a layer or two of every kind."""
    with pytest.MonkeyPatch.context() as patch:
        # Dense, dense, full with plain experts, NVFP4 experts; one MTP head.
        patch.setattr(inkling, "NUM_LAYERS", 4)
        # NVFP4, three of MXFP8, of which one is full, plain.
        sizes = replace(inkling2_quantized.SIZES, num_layers=5)
        for name, choices in (
            ("inkling2-quantized", {}),
            ("inkling2-quantized-attention", {"has_projections": True}),
            ("inkling2-mxfp8", {"is_mixed": False}),
        ):
            of_sizes = checkpoint.quantized_model(inkling2, sizes, **choices)
            patch.setitem(checkpoint.MODELS, name, of_sizes)
        # Two dense full ones, a sliding one with experts, a full one.
        patch.setitem(checkpoint.MODELS, "flint", checkpoint.flint_model(SMALL_FLINT))
        yield


def write_few(folder: Path, model: str, **arguments: Any) -> Path:
    """Write a tiny checkpoint of few layers, as published unless said otherwise."""
    with few_layers():
        write_checkpoint(folder, model=model, **(QUANTIZED[model] | arguments))
    return folder


def sources_of(
    source: CheckpointSource, sharding: Sharding, *, decoded: bool = False
) -> tuple[list[PackedTensor], list[dict[str, WeightSource]]]:
    """What an engine of a checkpoint holds, and of every rank where it comes from."""
    definition = find_definition(source.config)
    model = definition.parse_config(source.config)
    if decoded:
        assert definition.dequantize_experts is not None
        model, _ = definition.dequantize_experts(model)
    model.check_sharding(sharding)
    module = definition.build_module(model, sharding, torch.float32, STATE, False)
    ranks = [
        definition.weight_sources(model, source.names, rank, sharding)
        for rank in range(sharding.tp_size)
    ]
    return packed_tensors(module), ranks


def read_all(
    folder: Path, sharding: Sharding | None = None, *, decoded: bool = False
) -> list[dict[str, Tensor]]:
    """All weights of every rank, as they are packed; by parameter."""
    opened = open_checkpoint(folder)
    sharding = sharding or Sharding(1, "experts")
    tensors, ranks = sources_of(opened, sharding, decoded=decoded)
    return [
        {tensor.name: read_weight(tensor, opened, sources[tensor.name]) for tensor in tensors}
        for sources in ranks
    ]
