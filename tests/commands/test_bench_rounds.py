"""ink-bench engine --rounds: rows of rounds, and what stands beside them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from test_bench import CONFIG
from typer.testing import CliRunner

from inkrt.commands import bench, bench_rounds
from inkrt.commands.bench_rounds import measure_rounds, read_profile
from inkrt.errors import EngineMismatchError, UsageError
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import DraftSpec, StepSpec
from inkrt.runtime.executor import StepInput
from inkrt.runtime.executor.cuda import CudaExecutor
from inkrt.runtime.executor.round_queue import RoundInput, RoundRecord
from inkrt.runtime.executor.round_state import RoundStatus
from inkrt.runtime.spec.config import SpeculativeConfig

STEPS = tuple(
    StepSpec(name, count, rows)
    for name, count, rows in (("decode", 1, 1), ("verify2", 2, 2), ("verify4", 4, 4), ("p", 64, 1))
)
WITH_DRAFTER = replace(CONFIG, steps=STEPS, draft=DraftSpec("dspark", 3, "rnn", True))


class RoundTimer:
    """Rounds take turns: two drafts of which one is right, none drafted, and three all right."""

    KINDS = ((2, 3, 1, 500.0), (0, 0, 0, 150.0), (3, 3, 3, 600.0))
    US = {"decode": 100.0, "verify2": 180.0, "verify4": 300.0, "draft": 90.0}  # noqa: RUF012

    def __init__(self, executor: "FakeRounds") -> None:
        self.executor = executor

    def step(self, step: str, step_input: StepInput, num_runs: int) -> list[float]:
        self.executor.timed.append((step, len(step_input.tokens), step_input.position))
        return [self.US[step] + noise for noise in (*[0.0] * (num_runs - 1), 50.0)]

    def rounds(self, given: RoundInput, num_runs: int) -> tuple[list[float], list[RoundRecord]]:
        self.executor.given.append(given)
        times, records, position = [], [], given.step.position
        for number in range(num_runs):
            drafted, proposed, accepted, us = self.KINDS[number % 3]
            position += accepted + 1
            tokens = [1] * (accepted + 1)
            records.append(RoundRecord(RoundStatus.OK, tokens, drafted, proposed, position))
            times.append(us if number >= bench_rounds.WARM_UP_ROUNDS else 9e9)
        return times, records


class FakeRounds:
    device_name = "NVIDIA H200"

    def __init__(self, rounds: object = "rounds") -> None:
        self.ranks = [SimpleNamespace(rounds=rounds)]
        self.given: list[RoundInput] = []
        self.timed: list[tuple[str, int, int]] = []

    def fill_state(self, _value: int) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_rounds, "Timer", RoundTimer)


def measure(executor: Any, contexts: list[int], profile: str | None = None, **chosen: Any) -> Any:
    config = WITH_DRAFTER
    speculation = SpeculativeConfig(**chosen).resolve(Path("none"), config)
    return measure_rounds(executor, config, speculation, contexts, 9, profile)


def test_rows_of_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    executor = FakeRounds()
    (row,) = measure(executor, [50, 480], "0.75,0.5")
    (given,) = executor.given
    assert (given.step.position, given.step.tokens, given.num_left) == (50, [17], 2**30)
    assert given.settings.rule == "forced"
    assert given.settings.forced == (0.75, 0.5, 0.5)
    assert given.writable_end == CONFIG.max_seq_len
    # Nine rounds behind eight others: three of each kind.
    assert row["tokens_per_round"] == pytest.approx(7 / 3)
    assert row["tokens_per_s"] == pytest.approx(1e6 * 7 / 1250)
    assert (row["median_us"], row["draft_us"]) == (500.0, 90.0)
    by_width = [
        (one["is_plain"], one["drafts"], one["rounds"], one["accepted"], one["outside_us"])
        for one in row["widths"]
    ]
    # Three tokens take the step of four.
    assert by_width == [(True, 0, 3, 0, 50.0), (False, 3, 3, 3, 300.0), (False, 2, 3, 1, 200.0)]
    assert executor.timed == [
        ("draft", 1, 50), ("decode", 1, 50), ("verify4", 4, 50), ("verify4", 3, 50)
    ]  # fmt: skip
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == (
        "context 50: 5600.0 tokens/s, 2.33 a round of 416.7 us; the draft step alone takes 90.0 us"
    )
    assert "rounds at 480 left out: they need 68 positions behind it" in err


def test_drafts_are_judged_without_a_profile() -> None:
    executor = FakeRounds()
    (row,) = measure(executor, [50], width="confidence", num_draft_tokens=2)
    (given,) = executor.given
    assert (given.settings.rule, given.settings.most, given.settings.forced) == ("coupled", 2, ())
    assert (row["policy"], row["accept_profile"]) == ("ConfidenceThreshold", [])


@pytest.mark.parametrize(
    ("text", "most", "profile"),
    [("1", 3, (1, 1, 1)), ("0.5,0.25,0", 3, (0.5, 0.25, 0)), ("0.5,0.25", 4, (0.5, *[0.25] * 3))],
)
def test_profiles(text: str, most: int, profile: tuple[float, ...]) -> None:
    assert read_profile(text, most) == profile


@pytest.mark.parametrize("text", ["", "x", "0.5,", "1.1", "-0.1", "nan", "0.1,0.2,0.3"])
def test_what_is_no_profile(text: str) -> None:
    with pytest.raises(UsageError, match="--accept-profile "):
        read_profile(text, 2)


def test_what_has_no_rounds() -> None:
    with pytest.raises(EngineMismatchError, match="need the engine's own drafter"):
        measure(FakeRounds(), [50], method="ngram")
    with pytest.raises(EngineMismatchError, match="need the engine's own drafter"):
        measure(FakeRounds(None), [50])


def test_at_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeRounds()
    # `_open` wants one of this class.
    opened = Engine(tmp_path, WITH_DRAFTER, type("Fake", (FakeRounds, CudaExecutor), {
        "__init__": FakeRounds.__init__, "close": FakeRounds.close, "device_name": "NVIDIA H200",
        "fill_state": FakeRounds.fill_state,
    })())  # type: ignore[abstract]  # fmt: skip
    monkeypatch.setattr(Engine, "open", lambda *_, **_options: opened)
    out = tmp_path / "rows.json"
    arguments = ["engine", str(tmp_path), "--rounds", "--accept-profile", "0.8", "--contexts", "50"]
    arguments += ["--runs", "9", "--width", "fixed", "--json", str(out)]
    result = CliRunner().invoke(bench.make_app(), arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["device"] == executor.device_name
    assert [row["context"] for row in report["rows"]] == [50]
    assert report["rows"][0]["accept_profile"] == [0.8] * 3
