"""Whole engines of tiny checkpoints, built once per worker."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
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
    """Engines of these checkpoints; further arguments are build options."""

    @cache
    def make(dtype: str, num_layers: int = 14, **options: int) -> Path:
        engine = tmp_path_factory.mktemp("engine") / "engine"
        chosen = BuildOptions(**{"max_seq_len": 250, **options})
        build_engine(make_checkpoint(dtype, num_layers), engine, chosen)
        return engine

    return make
