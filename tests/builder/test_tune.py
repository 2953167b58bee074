"""Tactics of a finished engine's launches, and builds by the times of them."""

from pathlib import Path

import pytest
from gpu_build import build_small, fake_compiler
from msgspec.structs import replace

from inkrt.builder.build import prepare
from inkrt.builder.checkpoint import open_checkpoint
from inkrt.builder.options import BuildOptions
from inkrt.builder.timing_cache import Timing, TimingCache
from inkrt.builder.tune import Candidate, Tuner, call_args_of
from inkrt.errors import BuildError, ConfigError
from inkrt.runtime.engine_file import EngineCode, read_code
from inkrt.runtime.plan import LOOSE, Kernel, KernelParam, Launch, Plan, TensorParam

H200 = "NVIDIA H200"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has an engine that was built without times."""
    path = tmp_path_factory.mktemp("tune")
    with pytest.MonkeyPatch.context() as patch:
        fake_compiler(patch)
        build_small(path, "engine", empty_cache(path))
    return path


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(monkeypatch)


def empty_cache(folder: Path) -> Path:
    path = folder / "empty.json"
    path.write_bytes(TimingCache().encode())
    return path


def candidates(code: EngineCode) -> list[tuple[Plan, Launch, list[Candidate]]]:
    """Of every launch of every step."""
    tuner = Tuner("sm_90a")
    return [
        (plan, launch, tuner.candidates(plan, [launch]))
        for plan in code.plans.values()
        for launch in plan.launches
    ]


def preferring(code: EngineCode, number: int) -> TimingCache:
    """A cache by which the tactic `number` of every call is the fastest."""
    cache = TimingCache()
    for _, launch, found in candidates(code):
        for index, candidate in enumerate(found):
            us = 1.0 if index == number % len(found) else 2.0 + index
            timing = Timing(candidate.tactic, candidate.kernels, us, 60, 0, "c", "2026-01-01")
            cache.add(H200, launch.op, "", timing)
            # Several launches have one description here; their kernels tell them apart.
            cache.add(H200, launch.op, candidate.kernels, timing)
    return cache


def describe(plan: Plan, kernel: Kernel) -> tuple[object, ...]:
    """A kernel, with what it reads but where scratch is."""

    def param(item: KernelParam) -> object:
        if not isinstance(item, TensorParam):
            return item
        spec = plan.tensors[item.tensor]
        is_bytes = spec.dtype == "uint8" and len(spec.shape) == 1
        is_scratch = is_bytes and spec.space in ("arena", "scratch")
        return (spec.name.rpartition(".")[0], spec.shape) if is_scratch else item

    return (
        kernel.cubin, kernel.entry, kernel.grid, kernel.block, kernel.cluster, kernel.smem_bytes,
        kernel.pdl, kernel.cooperative, tuple(map(param, kernel.params)),
    )  # fmt: skip


def test_first_candidate_is_what_the_engine_runs(folder: Path) -> None:
    code = read_code(folder / "engine", 0)
    several = 0
    for plan, launch, found in candidates(code):
        names = [candidate.tactic for candidate in found]
        assert len(set(names)) == len(names)
        assert names[0] == launch.tactic
        first = found[0].plan
        (again,) = first.launches
        assert (again.op, again.args, again.outputs) == (launch.op, launch.args, launch.outputs)
        assert [describe(first, kernel) for kernel in again.kernels] == [
            describe(plan, kernel) for kernel in launch.kernels
        ]
        several += len(names) > 1
    assert several > 10  # q/k/v, attention and heads


def test_scratch_of_candidates_is_their_own_and_filled(folder: Path) -> None:
    code = read_code(folder / "engine", 0)
    plan = code.plans["decode"]
    (_, *others) = [launch for launch in plan.launches if launch.op == "norm_qkv_rope"]
    launches = [x for x in others if call_args_of(plan, x) == call_args_of(plan, others[0])]
    assert len(launches) > 1
    for candidate in Tuner("sm_90a").candidates(plan, launches):
        found = candidate.plan
        loose = [spec for spec in found.tensors if spec.storage == LOOSE]
        assert found.tensors[: len(plan.tensors)] == plan.tensors
        assert len(loose) == len(found.tensors) - len(plan.tensors)
        assert len(loose) == 2 * len(launches)  # exchange and error
        ends = [spec.offset + spec.shape[0] for spec in loose]
        assert all(end <= spec.offset for end, spec in zip(ends, loose[1:], strict=False))
        assert ends[-1] == found.scratch_bytes
        assert [(fill.offset, fill.size, fill.value) for fill in found.fills] == [
            (spec.offset, spec.shape[0], 0) for spec in loose
        ]


def test_compiling_ahead_leaves_nothing_to_compile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = read_code(folder / "engine", 0).plans["verify2"]
    ahead, in_turn = Tuner("sm_90a"), Tuner("sm_90a")
    for launch in plan.launches:
        in_turn.candidates(plan, [launch])
    ahead.compile(plan, plan.launches)
    assert ahead.cubins == in_turn.cubins
    monkeypatch.setattr("inkrt.builder.compile.compile_cubin", None)
    assert ahead.candidates(plan, plan.launches[:1])


def test_another_layout_of_weights_is_refused(folder: Path) -> None:
    plan = read_code(folder / "engine", 0).plans["decode"]
    (launch, *_) = [item for item in plan.launches if item.op == "linear_nvfp4"]
    tensors = [replace(spec, name=f"other_{spec.name}") for spec in plan.tensors]
    with pytest.raises(BuildError) as caught:
        Tuner("sm_90a").candidates(replace(plan, tensors=tuple(tensors)), [launch])
    assert "packed as nvfp4_chunks_plain; build it again" in str(caught.value)


def test_arguments_are_those_of_the_build(folder: Path) -> None:
    """Kinds of values: tensors, lists, numbers, dtypes, nothing."""
    plan = read_code(folder / "engine", 0).plans["verify2"]
    head = call_args_of(plan, plan.launches[-1])
    assert (head["vocab_size"], head["cap"], str(head["logits_dtype"])) == (600, 0, "torch.float32")
    norm = call_args_of(plan, next(x for x in plan.launches if x.op == "norm_qkv_rope"))
    assert norm["delta"] is None
    assert getattr(norm["x"], "shape", None) == (2, 256)


@pytest.mark.parametrize("number", [-1, 1])
def test_builds_take_the_fastest_and_are_equal_byte_for_byte(
    folder: Path, tmp_path: Path, number: int
) -> None:
    code = read_code(folder / "engine", 0)
    cache = tmp_path / "times.json"
    cache.write_bytes(preferring(code, number).encode())
    lines: list[str] = []
    build_small(tmp_path, "one", cache, lines=lines)
    (line,) = [line for line in lines if line.startswith("tactics: ")]
    assert line.endswith(" by the timing cache"), line  # none unknown
    built = read_code(tmp_path / "one", 0)
    wanted = [found[number % len(found)].tactic for _, _, found in candidates(code)]
    assert [x.tactic for plan in built.plans.values() for x in plan.launches] == wanted
    assert wanted != [x.tactic for plan in code.plans.values() for x in plan.launches]
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_bytes(cache.read_bytes())
    build_small(tmp_path, "two", elsewhere)
    for name in ("config.json", "rank0.engine"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_log_says_what_is_unknown(folder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    build_small(tmp_path, "engine", empty_cache(folder), lines=lines)
    (line,) = [line for line in lines if line.startswith("tactics: ")]
    assert ", 0 by the timing cache, " in line
    assert line.endswith("(asked for NVIDIA H200; it has times of: none)")
    name = "rank0.engine"
    assert (tmp_path / "engine" / name).read_bytes() == (folder / "engine" / name).read_bytes()


def test_a_bad_file_ends_the_build_before_it_traces(folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "times.json"
    bad.write_text("{")
    lines: list[str] = []
    with pytest.raises(ConfigError, match="is damaged"):
        build_small(tmp_path, "engine", bad, lines=lines)
    assert not [line for line in lines if line.startswith("step ")]
    assert not (tmp_path / "engine").exists()


def test_the_cpu_has_no_use_for_times(folder: Path, tmp_path: Path) -> None:
    build_small(tmp_path, "engine", empty_cache(folder))
    options = BuildOptions(weights="dummy")
    with pytest.raises(ConfigError, match="a timing cache is for GPU targets"):
        prepare(open_checkpoint(tmp_path / "model"), options, timing_cache=empty_cache(folder))
