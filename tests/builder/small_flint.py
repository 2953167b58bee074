"""A four-layer tiny Flint with all kinds of layers: its traced graphs, weights and state."""

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_run import step_inputs
from small_model import STATE
from torch import Tensor

from inkrt.builder.checkpoint import open_checkpoint
from inkrt.builder.pack import packed_tensors, read_weight
from inkrt.builder.trace import StepGraph, trace
from inkrt.engines.flint.config import FlintConfig, parse_config
from inkrt.engines.flint.model import Flint
from inkrt.engines.flint.weights import weight_sources
from inkrt.engines.interface import Sharding
from inkrt.engines.tiny import flint
from inkrt.engines.tiny.checkpoint import MODELS, flint_model, write_checkpoint
from inkrt.runtime.engine_file import StepSpec

# Dense and full, dense and full, sliding, full; the latter two with experts.
SIZES = replace(flint.TINY, num_layers=4)


def write_small(folder: Path, **arguments: Any) -> Path:
    """Write its checkpoint; arguments are those of `write_checkpoint`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "flint", flint_model(SIZES))
        write_checkpoint(folder, model="flint", **arguments)
    return folder


def small_config(*, is_nvfp4: bool) -> FlintConfig:
    """Its configuration."""
    quantization = {"quant_method": "nvfp4"} if is_nvfp4 else None
    return parse_config(flint.config("bfloat16", SIZES) | {"quantization_config": quantization})


def small_module(sharding: Sharding, *, is_nvfp4: bool, last_row_only: bool = False) -> Flint:
    """Its module of one rank."""
    config = small_config(is_nvfp4=is_nvfp4)
    return Flint(config, sharding, torch.bfloat16, STATE, last_row_only)


def small_graph(step: StepSpec, sharding: Sharding, *, is_nvfp4: bool = False) -> StepGraph:
    """Its traced graph of one rank, for the caller to change."""
    return copy.deepcopy(_trace_once(step, sharding, is_nvfp4=is_nvfp4))


@cache
def _trace_once(step: StepSpec, sharding: Sharding, *, is_nvfp4: bool) -> StepGraph:
    last_row_only = step.num_rows < step.num_tokens
    module = small_module(sharding, is_nvfp4=is_nvfp4, last_row_only=last_row_only)
    return trace(module, step, STATE, sharding.tp_size, torch.bfloat16)


def rank_weights(folder: Path, sharding: Sharding) -> list[dict[str, Tensor]]:
    """Weights of every rank by parameter name, as packing makes them from the checkpoint."""
    checkpoint = open_checkpoint(folder)
    config = parse_config(checkpoint.config)
    tensors = packed_tensors(small_module(sharding, is_nvfp4=config.has_nvfp4))
    ranks = []
    for rank in range(sharding.tp_size):
        sources = weight_sources(config, checkpoint.names, rank, sharding)
        ranks.append({x.name: read_weight(x, checkpoint, sources[x.name]) for x in tensors})
    return ranks


def rank_states(sharding: Sharding) -> list[dict[str, Tensor]]:
    """Random state of every rank, as if other tokens had come before."""
    module = small_module(sharding, is_nvfp4=False)
    generator = torch.Generator().manual_seed(5)
    return [
        {
            name: torch.randn(buffer.shape, generator=generator).to(buffer.dtype)
            for name, buffer in module.named_buffers()
        }
        for _ in range(sharding.tp_size)
    ]


def inputs_of(num_rows: int, num_tokens: int) -> dict[str, Tensor]:
    """`step_inputs` with tokens of its vocabulary."""
    inputs = step_inputs(num_rows, num_tokens)
    return inputs | {"tokens": inputs["tokens"] % small_config(is_nvfp4=False).vocab_size}
