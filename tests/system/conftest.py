"""Whole engines of tiny checkpoints, built once per worker."""

import dataclasses
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.engines.nano import export
from inkrt.engines.nano.drafter import HEADS, Drafter, Head, drafter_config
from inkrt.engines.nano.drafter_export import embed_in_checkpoint
from inkrt.engines.nano.model import Nano
from inkrt.engines.tiny.checkpoint import write_checkpoint

torch.set_num_threads(1)

MakeCheckpoint = Callable[..., Path]
MakeEngine = Callable[..., Path]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Tiny Inkling-2 checkpoints by dtype and number of layers (the first ones of 14)."""

    @cache
    def make(dtype: str, num_layers: int = 14) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint") / dtype
        write_checkpoint(folder, seed=1, dtype=dtype)
        config = json.loads((folder / "config.json").read_text())
        text = config["text_config"]
        text["num_hidden_layers"] = num_layers
        text["layer_types"] = text["layer_types"][:num_layers]
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture(scope="session")
def make_engine(
    make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> MakeEngine:
    """Engines of these checkpoints, for text; further arguments are build options."""

    @cache
    def make(dtype: str, num_layers: int = 14, **options: int | str) -> Path:
        engine = tmp_path_factory.mktemp("engine") / "engine"
        chosen = BuildOptions(**{"max_seq_len": 250, "towers": "none", **options})  # type: ignore[arg-type]
        build_engine(make_checkpoint(dtype, num_layers), engine, chosen)
        return engine

    return make


@pytest.fixture(scope="session")
def make_speculating_engine(tmp_path_factory: pytest.TempPathFactory) -> MakeEngine:
    """Engines of a small random model with an untrained drafter, by the drafter's head.

    They have 136 positions, three sessions and steps of up to 8 tokens; further arguments are build
    options.
    """
    from test_drafting import SMALL

    torch.manual_seed(3)
    target = Nano(SMALL).eval().requires_grad_(False)
    config = dataclasses.replace(drafter_config(target), block_size=7, head_dim=16)
    drafter = Drafter(config, HEADS).eval().requires_grad_(False)
    for name, parameter in drafter.named_parameters():
        if "heads." in name or "markov" in name:
            parameter.copy_(torch.randn(parameter.shape) * 0.4)

    @cache
    def make(head: Head, **further: int) -> Path:
        base = tmp_path_factory.mktemp(head)
        export.write_checkpoint(target, base / "checkpoint", base)
        embed_in_checkpoint(base / "checkpoint", drafter, head)
        options = BuildOptions(max_seq_len=136, max_batch_size=3, dtype="float32", **further)  # type: ignore[arg-type]
        build_engine(base / "checkpoint", base / "engine", options)
        return base / "engine"

    return make


@pytest.fixture(scope="session")
def nano_checkpoint() -> Path:
    """The trained `inkling2-nano` with its drafter, which is part of the repository."""
    bundled = Path(export.__file__).parent / "checkpoint"
    folder = Path(os.environ.get("INKRT_NANO_CHECKPOINT", bundled))
    if not folder.is_dir():
        pytest.skip(f"no trained checkpoint in {folder}; name one in INKRT_NANO_CHECKPOINT")
    return folder


@pytest.fixture(scope="session")
def nano_engine(nano_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its engine for the CPU, of 2009 positions and three sessions; tests only read it."""
    folder = tmp_path_factory.mktemp("nano") / "engine"
    build_engine(nano_checkpoint, folder, BuildOptions(max_seq_len=2009, max_batch_size=3))
    return folder
