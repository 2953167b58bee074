"""Whole engines of tiny checkpoints, built once a run; every worker has its own copies."""

import dataclasses
import fcntl
import json
import os
import shutil
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
# Calls the build with a new folder, unless a worker has done so under this name; gives a copy.
BuildOnce = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def build_once(tmp_path_factory: pytest.TempPathFactory) -> BuildOnce:
    """What workers build for each other. Copies, because tests write costs into engines."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def once(name: str, build: Callable[[Path], None]) -> Path:
        folder, whole = shared / f"once {name}", shared / f"once {name} is whole"
        with (shared / f"once {name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, also by the end of the worker
            if not whole.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                build(folder)
                whole.touch()
        return Path(shutil.copytree(folder, tmp_path_factory.mktemp("once") / "copy"))

    return once


def _name_of(*parts: object, **options: object) -> str:
    """A file name for arguments."""
    named = [f"{name}={value}" for name, value in sorted(options.items())]
    return " ".join(["-".join(map(str, parts)), *named])


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
def make_engine(make_checkpoint: MakeCheckpoint, build_once: BuildOnce) -> MakeEngine:
    """Engines of these checkpoints, for text; further arguments are build options."""

    @cache
    def make(dtype: str, num_layers: int = 14, **options: int | str) -> Path:
        chosen = BuildOptions(**{"max_seq_len": 250, "towers": "none", **options})  # type: ignore[arg-type]

        def build(folder: Path) -> None:
            build_engine(make_checkpoint(dtype, num_layers), folder / "engine", chosen)

        return build_once(_name_of("tiny", dtype, num_layers, **options), build) / "engine"

    return make


@pytest.fixture(scope="session")
def make_speculating_engine(build_once: BuildOnce) -> MakeEngine:
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
        def build(base: Path) -> None:
            export.write_checkpoint(target, base / "checkpoint", base)
            embed_in_checkpoint(base / "checkpoint", drafter, head)
            options = BuildOptions(max_seq_len=136, max_batch_size=3, dtype="float32", **further)  # type: ignore[arg-type]
            build_engine(base / "checkpoint", base / "engine", options)

        return build_once(_name_of("speculating", head, **further), build) / "engine"

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
def nano_engine(nano_checkpoint: Path, build_once: BuildOnce) -> Path:
    """Its engine for the CPU, of 2009 positions and three sessions; tests only read it."""
    options = BuildOptions(max_seq_len=2009, max_batch_size=3)

    def build(folder: Path) -> None:
        build_engine(nano_checkpoint, folder / "engine", options)

    return build_once("nano", build) / "engine"
