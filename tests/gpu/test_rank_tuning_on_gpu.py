"""Tactics of an engine of two ranks, timed as a slice on one GPU and by both ranks on two."""

from pathlib import Path
from typing import Any

import pytest
from nano_engines import CHECKPOINT

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.builder.timing_cache import looped_back, read_timing_cache
from inkrt.commands.bench_ops import Bench, CacheWriter
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import read_code
from inkrt.runtime.executor import Sampling
from inkrt.runtime.executor.cuda import CudaExecutor

OPTIONS = BuildOptions(
    target="sm_90a", tp_size=2, max_seq_len=512, spec="none", max_verify_tokens=3, prefill_chunk=64
)
EXCHANGES = {"allreduce_conv_mix", "lm_head_sample", "all_reduce", "all_gather"}
H200 = "NVIDIA H200"


@pytest.fixture(scope="module")
def folder(gpu: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tuning")
    build_engine(CHECKPOINT, path / "engine", OPTIONS)
    return path


def tune(folder: Path, cache: Path, rank_slice: str | None) -> list[dict[str, Any]]:
    """Rows of all steps; also writes the cache."""
    writer = CacheWriter(cache, "abc")
    with Engine.open(folder / "engine", rank_slice=rank_slice) as engine:
        assert isinstance(engine.executor, CudaExecutor)
        bench = Bench(engine.executor, engine.config, 200, 30, writer)
        rows = [row for step in engine.config.steps for row in bench.step(step)]
    writer.write()
    assert all(0.3 < row["median_us"] < 1000 for row in rows)
    assert {row["op"] for row in rows} >= {"allreduce_conv_mix", "moe", "relative_attention"}
    return rows


def built(folder: Path, name: str, cache: Path) -> tuple[str, set[tuple[str, str]]]:
    """What an engine by these times says of its choices, and what they are."""
    lines: list[str] = []
    build_engine(CHECKPOINT, folder / name, OPTIONS, lines.append, timing_cache=cache)
    (line,) = [line for line in lines if line.startswith("tactics: ")]
    plans = read_code(folder / name, 0).plans.values()
    return line, {(launch.op, launch.tactic) for plan in plans for launch in plan.launches}


@pytest.mark.gpu
def test_a_slice_is_tuned(folder: Path) -> None:
    rows = tune(folder, folder / "slice.json", "1/2")
    apart = {row["op"] for row in rows if row["device"] == looped_back(H200)}
    assert apart == EXCHANGES & {row["op"] for row in rows}
    line, chosen = built(folder, "by_slice", folder / "slice.json")
    assert "unknown" not in line
    assert "by times of collectives looped back" in line
    assert chosen <= {(row["op"], row["tactic"]) for row in rows if row["is_fastest"]}


@pytest.mark.multigpu
def test_two_ranks_are_tuned_in_lock_step(folder: Path) -> None:
    from cuda.bindings import driver

    _, count = driver.cuDeviceGetCount()
    if count < 2:
        pytest.skip(f"needs two GPUs, there is {count}")
    rows = tune(folder, folder / "two.json", None)
    assert {row["device"] for row in rows} == {H200}
    line, chosen = built(folder, "by_two", folder / "two.json")
    assert "unknown" not in line
    assert "looped back" not in line
    assert chosen <= {(row["op"], row["tactic"]) for row in rows if row["is_fastest"]}
    assert read_timing_cache(folder / "two.json").devices == [H200]
    with Engine.open(folder / "by_two") as engine, engine.session() as session:
        assert session.step([1, 2, 3], Sampling()).tokens.shape == (3,)
