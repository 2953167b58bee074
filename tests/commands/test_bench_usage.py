"""ink-bench at the command line: what it refuses, leaves out, and keeps after an error."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from test_bench import CONFIG, PLAN, STEP, FakeExecutor, FakeTimer
from typer.testing import CliRunner, Result

from inkrt.builder.timing_cache import read_timing_cache
from inkrt.builder.tune import Candidate
from inkrt.commands import bench, bench_ops
from inkrt.commands.bench_ops import Bench
from inkrt.commands.bench_step import step_input_of
from inkrt.errors import ConfigError, DeviceError
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import DraftSpec, EngineConfig, StepSpec
from inkrt.runtime.executor import StepInput, cuda_timing
from inkrt.runtime.executor.cuda import CudaExecutor


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ops", "E", "--tune"], "add: --commit HASH"),
        (["ops", "E", "--commit", "x"], "are for --tune"),
        (["ops", "E", "--timing-cache", "x"], "are for --tune"),
        (["ops", "E"], "E is not an engine"),
        (["engine", "E", "--contexts", "0,-1"], "--contexts takes numbers from 0 with commas"),
        (["engine", "E"], "E is not an engine"),
        (["engine", "E", "--profile-runs", "3"], "is for --profile; add it or leave it out"),
        (["engine", "E", "--json", "no/x.json"], "cannot write no/x.json; name a file in a folder"),
        (["engine", "E", "--json", "."], "cannot write .; name a file in a folder"),
        (["engine", "E", "--rank-slice", "2/2"], "counted from 0 (say 0/4), got '2/2'"),
        (["engine", "E", "--rank-slice", "-1/2"], "a rank slice is R/N"),
        (["engine", "E", "--rank-slice", "0/2"], "E is not an engine"),
        (["engine", "E", "--rank-slice", "0/2", "--costs"], "of no use with --costs; leave it out"),
        (["engine", "E", "--rounds", "--profile"], "of no use with --rounds; leave it out"),
        (["engine", "E", "--rounds", "--costs"], "--costs and --rounds are two measurements"),
        (["engine", "E", "--accept-profile", "1"], "only --rounds has a use for it; add that or"),
        (["engine", "E", "--rounds"], "E is not an engine"),
        (["ops", "E", "--rank-slice", "0/2", "--tune"], "add: --commit HASH"),
        (["ops", "E", "--json", "no/x.json"], "cannot write no/x.json; name a file in a folder"),
    ],
)  # fmt: skip
def test_wrong_usage_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(bench.make_app(), arguments)
    of_options = (
        "add: --commit",
        "are for --tune",
        "is for --profile",
        "of no use",
        "--costs and",
        "only --rounds",
    )
    assert result.exit_code == (2 if message.startswith(of_options) else 1)
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [["engine", "E", "--runs", "0"], ["ops", "E", "--runs", "0"], ["ops", "E", "--context", "-1"]],
    ids=" ".join,
)
def test_numbers_out_of_range_are_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(bench.make_app(), arguments)
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments[2]}'" in result.stderr


def test_contexts_that_do_not_fit_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    fitting = list(bench._fitting(CONFIG, [STEP], [510, 511, 0]))
    assert fitting == [(STEP, 510), (STEP, 0)]
    told = capsys.readouterr().err
    assert told == "verify2 at 511 left out: the engine has 512 positions\n"


@pytest.mark.parametrize(
    ("arguments", "of_cuts"),
    [([], None), (["--profile"], 7), (["--profile", "--profile-runs", "3"], 3)],
)
def test_replays_of_steps_and_of_their_cuts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], of_cuts: int | None
) -> None:
    replays: list[tuple[int | None, int]] = []

    class Timer(FakeTimer):
        def __init__(self, _: object) -> None:
            super().__init__()

        def step(
            self, step: str, step_input: StepInput, num_runs: int, *, until: int | None = None
        ) -> list[float]:
            replays.append((until, num_runs))
            return super().step(step, step_input, num_runs, until=until)

    @contextlib.contextmanager
    def opened(_: Path, _slice: str | None) -> Iterator[tuple[FakeExecutor, EngineConfig]]:
        yield FakeExecutor(), CONFIG

    monkeypatch.setattr(bench, "_open", opened)
    monkeypatch.setattr(cuda_timing, "Timer", Timer)
    out = ["--json", str(tmp_path / "rows.json")]
    command = ["engine", "E", "--contexts", "100", "--runs", "7", *arguments, *out]
    result = CliRunner().invoke(bench.make_app(), command)
    assert result.exit_code == 0, result.output
    cuts = range(1, len(PLAN.launches)) if of_cuts else ()
    assert replays[1:] == [(None, 7), *((until, of_cuts) for until in cuts)]
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert ("launches" in row) == bool(of_cuts)
    if of_cuts:
        assert sum(kind["us"] for kind in row["launches"]) == pytest.approx(row["median_us"])


def test_unknown_steps_are_refused() -> None:
    assert bench._chosen(CONFIG, "") == bench._chosen(CONFIG, "verify") == [STEP]
    assert bench._chosen(CONFIG, "verify2") == [STEP]
    with pytest.raises(ConfigError, match="no step 'decode'; it has verify2"):
        bench._chosen(CONFIG, "verify2,decode")


def test_the_draft_step_is_timed_too() -> None:
    config = replace(CONFIG, draft=DraftSpec("dspark", 7, "rnn", has_confidence=True))
    drafts = StepSpec("draft", 1, 7)
    assert bench._chosen(config, "") == [STEP, drafts]
    assert bench._chosen(config, "draft") == [drafts]
    assert step_input_of(config, drafts, 40).is_coupled
    with pytest.raises(ConfigError, match="no step 'draft'; it has verify2"):
        bench._chosen(CONFIG, "draft")


def tune(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, context: int, error: type[BaseException]
) -> Result:
    """`ink-bench ops --tune` of an engine with two steps, the second of which raises."""
    config = replace(CONFIG, steps=(STEP, StepSpec("prefill500", 500, 1)))

    @contextlib.contextmanager
    def opened(_: Path, _slice: str | None) -> Iterator[tuple[FakeExecutor, EngineConfig]]:
        yield FakeExecutor(), config

    def step(self: Bench, step: StepSpec) -> Iterator[dict[str, object]]:
        if step != STEP:
            raise error
        assert self._writer is not None
        launch, candidate = PLAN.launches[2], Candidate("t4", "product-t4", PLAN)
        self._writer.add("NVIDIA H200", PLAN, launch, candidate, [4.0], context)
        yield {"step": step.name}

    monkeypatch.setattr(bench, "_open", opened)
    monkeypatch.setattr(Bench, "step", step)
    monkeypatch.setattr(bench_ops, "Timer", lambda _: FakeTimer())
    arguments = ["ops", "E", "--tune", "--commit", "c", "--context", str(context)]
    files = ["--timing-cache", str(tmp_path / "t.json"), "--json", str(tmp_path / "rows.json")]
    return CliRunner().invoke(bench.make_app(), [*arguments, *files])


@pytest.mark.parametrize("error", [DeviceError, KeyboardInterrupt])
def test_times_that_were_taken_before_an_error_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[BaseException]
) -> None:
    result = tune(monkeypatch, tmp_path, 5, error)
    assert result.exit_code == (1 if error is DeviceError else 130)
    cache = read_timing_cache(tmp_path / "t.json")
    assert cache.median_us("NVIDIA H200", "product", "product-t4") == 4.0
    assert not (tmp_path / "rows.json").exists()


def test_a_step_that_does_not_fit_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = tune(monkeypatch, tmp_path, 50, AssertionError)
    assert result.exit_code == 0, result.output
    assert "prefill500 at 50 left out: the engine has 512 positions" in result.stderr
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == [{"step": "verify2"}]


def test_figures_of_a_slice_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that is made for it has as many ranks."""
    made: list[tuple[Path, int]] = []

    def folder(path: Path, num_ranks: int) -> contextlib.AbstractContextManager[Path]:
        made.append((path, num_ranks))
        return contextlib.nullcontext(path)

    def open_slice(
        path: Path, rank_slice: str | None
    ) -> contextlib.AbstractContextManager[SimpleNamespace]:
        executor = object.__new__(CudaExecutor)
        executor.fill_state = lambda value: made.append((path, value))  # type: ignore[method-assign]
        executor.rank_slice = rank_slice  # type: ignore[assignment]
        return contextlib.nullcontext(SimpleNamespace(executor=executor, config=CONFIG))

    monkeypatch.setattr(bench_ops, "engine_folder", folder)
    monkeypatch.setattr(Engine, "open", open_slice)
    with bench._open(Path("E"), "1/4") as (executor, _):
        assert executor.rank_slice == "1/4"
    assert made == [(Path("E"), 4), (Path("E"), 0x3C)]
    told = capsys.readouterr().out
    assert told.startswith("rank slice 1/4, collectives looped back: times of one of 4 ranks")
    with bench._open(Path("E"), None):
        assert capsys.readouterr().out == ""
