"""A three-layer tiny model: checkpoints of it, its traced graphs, its weights and state."""

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inkrt.builder.build import PAGE_TOKENS
from inkrt.builder.checkpoint import Checkpoint, CheckpointSource
from inkrt.builder.lower import lower
from inkrt.builder.options import BuildOptions
from inkrt.builder.pack import PackedTensor, packed_tensors, read_weight
from inkrt.builder.trace import StepGraph, trace
from inkrt.builder.weights import WeightWriter, plan_weights
from inkrt.builder.writer import JOURNAL_NAME, Staging
from inkrt.engines.inkling2.config import Inkling2Config, parse_config
from inkrt.engines.inkling2.model import Inkling2
from inkrt.engines.inkling2.weights import weight_sources
from inkrt.engines.interface import Sharding, StateOptions, WeightSource
from inkrt.engines.tiny import inkling2, inkling2_quantized
from inkrt.engines.tiny.checkpoint import (
    MODELS,
    inkling2_model,
    quantized_model,
    write_checkpoint,
)
from inkrt.errors import InkError
from inkrt.runtime.engine_file import FileEntry, StepSpec
from inkrt.runtime.plan import Plan

# Changes a checkpoint; what `refuse` of conftest.py takes, and what it gives.
Damage = Callable[[Path], object]
Refuse = Callable[[Damage], InkError | None]

# Two steps and few pages: what most tests need of an engine, quickly built.
OPTIONS = BuildOptions(max_verify_tokens=1, max_seq_len=200, prefill_chunk=16, towers="none")
# Of weight files, so that the model has some.
FILE_BYTES = 150_000
STATE = StateOptions(num_slots=2, max_seq_len=200, page_tokens=PAGE_TOKENS)
SIZES = dataclasses.replace(inkling2.TINY, num_layers=3, block_layers=2)
_QUANTIZED = dataclasses.replace(inkling2_quantized.SIZES, num_layers=3, block_layers=2)
_SMALL_MODELS = {
    "inkling2": inkling2_model(SIZES),
    "inkling2-quantized": quantized_model(inkling2, _QUANTIZED),
    "inkling2-quantized-attention": quantized_model(inkling2, _QUANTIZED, has_projections=True),
}
DECODE = StepSpec("decode", 1, 1)
VERIFY3 = StepSpec("verify3", 3, 3)
PREFILL40 = StepSpec("prefill40", 40, 1)


def write_small(folder: Path, **arguments: Any) -> Path:
    """Write a tiny checkpoint with a sliding, a full and a sliding layer; the last starts a block.

    Args:
        folder: to make.
        **arguments: of `write_checkpoint`.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, model in _SMALL_MODELS.items():
            patch.setitem(MODELS, name, model)
        write_checkpoint(folder, **arguments)
    return folder


def small_config() -> Inkling2Config:
    """Its configuration."""
    return parse_config(inkling2.config("bfloat16", SIZES))


def small_graph(
    step: StepSpec,
    tp_size: int,
    moe_split: str = "experts",
    dtype: torch.dtype = torch.bfloat16,
) -> StepGraph:
    """Its traced graph of one rank, for the caller to change."""
    return copy.deepcopy(_trace_once(step, tp_size, moe_split, dtype))


@cache
def _trace_once(step: StepSpec, tp_size: int, moe_split: str, dtype: torch.dtype) -> StepGraph:
    module = small_module(tp_size, moe_split, dtype, last_row_only=step.num_rows < step.num_tokens)
    return trace(module, step, STATE, tp_size, dtype)


def lower_graph(graph: StepGraph) -> Plan:
    """Its plan for the CPU."""
    return lower(graph)


def small_module(
    tp_size: int, moe_split: str, dtype: torch.dtype, *, last_row_only: bool
) -> Inkling2:
    """Its module of one rank."""
    return Inkling2(small_config(), Sharding(tp_size, moe_split), dtype, STATE, last_row_only)


def rank_weights(
    folder: Path, tp_size: int, moe_split: str = "experts", dtype: torch.dtype = torch.bfloat16
) -> list[dict[str, Tensor]]:
    """Weights of every rank by parameter name, as packing makes them from the checkpoint."""
    checkpoint, sharding = Checkpoint(folder), Sharding(tp_size, moe_split)
    tensors = packed_tensors(small_module(tp_size, moe_split, dtype, last_row_only=False))
    ranks = []
    for rank in range(tp_size):
        sources = weight_sources(small_config(), checkpoint.names, rank, sharding)
        ranks.append({x.name: read_weight(x, checkpoint, sources[x.name]) for x in tensors})
    return ranks


def rank_states(tp_size: int, dtype: torch.dtype = torch.bfloat16) -> list[dict[str, Tensor]]:
    """Random state of every rank, as if other tokens had come before."""
    module = small_module(tp_size, "experts", dtype, last_row_only=False)
    generator = torch.Generator().manual_seed(5)
    return [
        {
            name: torch.randn(buffer.shape, generator=generator).to(buffer.dtype)
            for name, buffer in module.named_buffers()
        }
        for _ in range(tp_size)
    ]


def write_weights(
    folder: Path,
    tensors: list[PackedTensor],
    checkpoint: CheckpointSource,
    ranks: Sequence[Mapping[str, WeightSource]],
    workers: int = 2,
) -> dict[str, FileEntry]:
    """Write the weight files of some ranks; gives what a journal says of them."""
    staging = Staging(folder, "key")
    WeightWriter(plan_weights(checkpoint, tensors, ranks), staging, workers).run()
    (folder / JOURNAL_NAME).unlink()
    return staging.finished


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change config.json of a checkpoint or engine folder in place."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint in place; they end up in one shard without an index."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= {name: value.clone() for name, value in load_file(shard).items()}
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def files_of(folder: Path) -> dict[str, bytes]:
    """Content of every file in a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
