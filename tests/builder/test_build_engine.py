"""Building a folder: the same bytes always, all of them or nothing, what was asked for."""

import contextlib
import dataclasses
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from small_model import OPTIONS, edit_tensors, files_of, write_small
from torch import Tensor

from inkrt.builder import build
from inkrt.builder.build import Prepared, build_engine
from inkrt.builder.options import BuildOptions
from inkrt.builder.writer import staged_folder
from inkrt.errors import BuildError, CapacityError, CheckpointError, InkError
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import read_config, read_plans
from inkrt.runtime.executor import Sampling, StepInput
from inkrt.runtime.executor.cpu import CpuExecutor


@pytest.fixture
def quick(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds with OPTIONS that do not trace again."""
    monkeypatch.setattr(build, "prepare", lambda *_: prepared)


def refusal(error: type[InkError], checkpoint: Path, target: Path, options: BuildOptions) -> str:
    with pytest.raises(error) as caught:
        build_engine(checkpoint, target, options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_builds_are_byte_identical(checkpoint: Path, engine: Path, tmp_path: Path) -> None:
    """From another folder, in another folder, in another process."""
    shutil.copytree(checkpoint, tmp_path / "copy")
    code = (
        "from pathlib import Path\n"
        "from small_model import OPTIONS\n"
        "from inkrt.builder.build import build_engine\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "build_engine(folder / 'copy', folder / 'engine', OPTIONS)\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=Path(__file__).parent, env=environment, check=True)
    assert files_of(tmp_path / "engine") == files_of(engine)


def test_a_build_leaves_another_ones_files_alone(tmp_path: Path) -> None:
    """Of two builds of one target at the same time, the first to end wins."""
    target = tmp_path / "engine[1]"
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(staged_folder(target, 0))
        (slow.folder / "x").write_text("slow")
        with staged_folder(target, 0) as fast:
            (fast.folder / "x").write_text("fast")
        assert (slow.folder / "x").read_text() == "slow"
        with pytest.raises(BuildError) as caught:
            stack.close()
    assert str(caught.value).startswith(f"writing {target} failed and was undone (")
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    assert (target / "x").read_text() == "fast"


@pytest.mark.parametrize("kind", ["folder", "file", "link to nowhere"])
def test_the_target_must_not_exist(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "engine"
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.touch()
    else:
        target.symlink_to(tmp_path / "nowhere")
    # It is the first thing that is looked at: tracing a large model takes a while.
    assert refusal(BuildError, tmp_path / "no checkpoint", target, OPTIONS) == (
        f"{target} exists; remove it or choose another output folder"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_the_parent_must_exist(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "a" / "engine"
    expected = f"{tmp_path / 'a'} is not a folder; create it first"
    assert refusal(BuildError, checkpoint, target, OPTIONS) == expected
    (tmp_path / "a").touch()
    assert refusal(BuildError, checkpoint, target, OPTIONS) == expected


def test_a_small_disk_is_told_before_anything_is_written(
    checkpoint: Path,
    tmp_path: Path,
    quick: None,
    prepared: Prepared,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_behind = tmp_path / ".engine.tmp-0123abcd"
    left_behind.mkdir()

    def usage(folder: Path) -> SimpleNamespace:
        assert folder == tmp_path
        assert not left_behind.exists(), "its bytes count as used"
        return SimpleNamespace(free=123456)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    needed = prepared.weight_bytes + 64 * 2**20
    assert refusal(CapacityError, checkpoint, tmp_path / "engine", OPTIONS) == (
        f"{tmp_path} has 123,456 bytes free, the engine needs {needed:,}; free some space or "
        "choose another output folder"
    )
    assert list(tmp_path.iterdir()) == []


def test_other_errors_of_writing_are_told(
    checkpoint: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    target = tmp_path / "engine"
    assert refusal(BuildError, checkpoint, target, OPTIONS) == (
        f"writing {target} failed and was undone ([Errno 5] Input/output error)"
    )
    assert list(tmp_path.iterdir()) == []


def test_unknown_tensors_are_told_and_left_out(tmp_path: Path, quick: None, engine: Path) -> None:
    folder = write_small(tmp_path / "checkpoint")

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.mtp.layers.0.attn.wq_du.weight"] = torch.zeros(3)
        tensors["model.llm.layers.3.mlp_norm.weight"] = torch.zeros(3, dtype=torch.int64)

    edit_tensors(folder, add)
    lines: list[str] = []
    build_engine(folder, tmp_path / "engine", OPTIONS, lines.append)
    assert [line for line in lines if "left out" in line] == [
        "left out 44 tensors of parts that this version does not build",
        "unknown tensor left out: model.llm.layers.3.mlp_norm.weight",
        "unknown tensor left out: model.mtp.layers.0.attn.wq_du.weight",
    ]
    name = "rank0-00001-of-00001.safetensors"
    assert (tmp_path / "engine" / name).read_bytes() == (engine / name).read_bytes()


def test_dummy_weights_need_a_config_only(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shutil.copy(checkpoint / "config.json", folder)
    options = dataclasses.replace(OPTIONS, weights="dummy", tp_size=2)
    config = build_engine(folder, tmp_path / "engine", options)
    assert set(config.files) == {"rank0.engine", "rank1.engine"}
    with Engine.open(tmp_path / "engine", verify=True) as opened, opened.session() as session:
        output = session.prefill(list(range(20)), Sampling())
        for _ in range(3):
            output = session.step([int(output.tokens[-1])], Sampling())
            assert np.isfinite(output.logits).all()
            assert output.logits.std() > 0.01
    with pytest.raises(CheckpointError) as caught:
        build_engine(folder, tmp_path / "real", OPTIONS)
    assert str(caught.value) == (
        f"checkpoint {folder} has no *.safetensors file; download its shards"
    )


def test_a_dry_run_tells_what_the_build_writes(
    checkpoint: Path, engine: Path, prepared: Prepared
) -> None:
    config = read_config(engine)
    assert prepared.memory == config.memory
    assert prepared.state == config.state
    assert prepared.plans == read_plans(engine, 0)
    with safe_open(engine / "rank0-00001-of-00001.safetensors", framework="pt") as file:
        values = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 (no mapping)
    assert config.memory.weights == sum(value.nbytes for value in values)
    assert prepared.weight_bytes == config.memory.weights
    executor = CpuExecutor(engine, config)
    kinds: dict[str, int] = {"paged": 0, "ring": 0}
    for spec in config.state.buffers:
        kinds[spec.kind] += executor.state(spec.name).nbytes
    assert config.memory.paged_state == kinds["paged"]
    assert config.memory.ring_state == kinds["ring"]
    assert config.memory.arena == max(plan.arena_bytes for plan in prepared.plans.values())
    # One full layer: keys and values of 4 heads of 8 BF16 numbers, for 4 pages of 64 tokens.
    assert config.memory.paged_bytes_per_token == 2 * 4 * 8 * 2
    assert config.memory.paged_state == 4 * 64 * config.memory.paged_bytes_per_token


def test_a_step_at_the_end_of_a_session(engine: Path) -> None:
    """A prefill step may stand out over the last position."""
    executor = CpuExecutor(engine, read_config(engine))
    step_input = StepInput([5, 6, 7], 197, 0, [0, 1, 2, 3], Sampling())
    assert np.isfinite(executor.run("prefill16", step_input).logits).all()
