"""The weights of a build: what they depend on, streaming them, and what is told about them."""

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import inkrt
from inkrt import builder, engines, plugins
from inkrt.builder.checkpoint import CheckpointSource
from inkrt.builder.choose_drafter import unpacked_tensors
from inkrt.builder.pack import PackedTensor
from inkrt.builder.towers import tower_sources
from inkrt.builder.weights import (
    Meter,
    WeightPlan,
    WeightWriter,
    default_workers,
    plan_weights,
)
from inkrt.builder.writer import Staging
from inkrt.engines.interface import Sharding, WeightSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from inkrt.builder.build import Prepared


def pack_weights(
    staging: Staging,
    checkpoint: CheckpointSource,
    prepared: "Prepared",
    progress: "Callable[[str], None]",
    workers: int = 0,
    meter: Meter | None = None,
) -> None:
    """Write the weight files of all ranks that are not finished.

    Args:
        staging: where to.
        checkpoint: of the model.
        prepared: the build.
        progress: told about speed, and about tensors that are left out.
        workers: threads; 0 for one per processor.
        meter: see `WeightWriter`.

    Raises:
        InkError: a tensor is unfit.
        OSError: reading or writing failed.
    """
    sources = rank_sources(checkpoint, prepared)
    plan = plan_of(checkpoint, prepared, sources)
    kept, started = staging.finished_bytes, time.monotonic()
    writer = WeightWriter(plan, staging, workers or default_workers())
    if meter is not None:
        writer.meter = meter
    writer.run()
    took, count = time.monotonic() - started, plan.num_bytes - kept
    seconds = writer.seconds
    if count:
        progress(
            f"packed {count:,} bytes of {len(plan.ranks)} ranks in {took:.1f} s, "
            f"{count / max(took, 1e-9) / 1e9:.2f} GB/s; threads packed for {seconds.packing:.1f} "
            f"s, wrote for {seconds.writing:.1f} s, hashed for {seconds.hashing:.1f} s"
        )
    for line in writer.quantization():
        progress(f"{line} (of what was packed now)" if kept else line)
    _tell_left_out(checkpoint, prepared, sources, progress)


def rank_sources(
    checkpoint: CheckpointSource, prepared: "Prepared"
) -> list[dict[str, WeightSource]]:
    """Sources of every rank's parameters."""
    options, drafter = prepared.options, prepared.drafter
    ranks = []
    for rank in range(options.tp_size):
        sources = prepared.definition.weight_sources(
            prepared.model, checkpoint.names, rank, Sharding(options.tp_size, options.moe_split)
        )
        sources |= tower_sources(prepared.towers, checkpoint.names)
        ranks.append(sources | (drafter.sources_of(rank, options.tp_size) if drafter else {}))
    return ranks


def plan_of(
    checkpoint: CheckpointSource, prepared: "Prepared", sources: list[dict[str, WeightSource]]
) -> WeightPlan:
    """The plan of a build's weights."""
    reader = prepared.drafter.checkpoint if prepared.drafter else checkpoint
    return plan_weights(reader, prepared.tensors, sources)


def build_key(prepared: "Prepared", checkpoint: CheckpointSource, code: bytes) -> str:
    """Hex sha256 of all that weight files depend on.

    Beside what an engine says of itself these are the times at which files of the checkpoint were
    written, and the code that packs.

    Args:
        prepared: the build.
        checkpoint: of the model.
        code: of the engine.
    """
    reader = prepared.drafter.checkpoint if prepared.drafter else checkpoint
    values = [
        inkrt.__version__,
        torch.__version__,
        _code_digest(),
        hashlib.sha256(code).hexdigest(),
        reader.fingerprint,
        reader.file_states(),
        dataclasses.asdict(prepared.options),
        [_layout(tensor) for tensor in prepared.tensors],
    ]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _layout(tensor: PackedTensor) -> list[object]:
    packing = tensor.packing.name if tensor.packing else None
    sources = [_layout(source) for source in tensor.sources]
    return [tensor.name, tensor.shape, str(tensor.dtype), packing, sources]


def _code_digest() -> str:
    """Of all Python files that can have a part in packing."""
    digest = hashlib.sha256()
    for package in (builder, engines, plugins):
        (folder,) = package.__path__
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _tell_left_out(
    checkpoint: CheckpointSource,
    prepared: "Prepared",
    sources: list[dict[str, WeightSource]],
    progress: "Callable[[str], None]",
) -> None:
    drafter = prepared.drafter
    reader = drafter.checkpoint if drafter else checkpoint
    used = {part.name for rank in sources for source in rank.values() for part in source.all_parts}
    others = reader.names - used
    ignored = unpacked_tensors(checkpoint, drafter) & others
    ignored |= {name for name in others if prepared.definition.ignored(name)}
    if ignored:
        progress(f"left out {len(ignored)} tensors of parts that this version does not build")
    for name in sorted(others - ignored):
        progress(f"unknown tensor left out: {name}")
