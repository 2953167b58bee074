"""The soak itself: an engine that is right passes, one that errs once is found, and one that hangs.

The engine is the one without a model.
"""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake import FakeExecutor, write_engine

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "perf"))

from inkling2_soak import MIB, Difference, Memory, Soak, leaks, make_requests, run  # noqa: E402

from inkrt.runtime.engine import Engine  # noqa: E402


@pytest.fixture
def soak(tmp_path: Path) -> Iterator[Soak]:
    config = write_engine(tmp_path / "engine")
    with Engine(tmp_path / "engine", config, FakeExecutor(config)) as engine:
        requests = make_requests(engine, 25, longest=64, most=12, seed=3)
        yield Soak(engine, requests, random.Random(4))


def test_an_engine_that_is_right_passes(soak: Soak) -> None:
    assert {len(request.tokens) for request in soak.requests} >= {1, 8, 16, 17, 64}
    before, after, _ = run(soak, 0.5, limit=30)
    assert len(soak.given) == 25
    assert soak.num_tokens > 300
    for kind in ("alone", "in_turns", "in_forks", "given_up", "in_widths", "by none", "by ngram"):
        assert soak.actions[kind] > 3, soak.actions
    assert soak.engine.states.num_free_slots == soak.engine.config.state.num_slots
    assert leaks(before, after) == []
    assert before.free == []


@pytest.mark.parametrize("kind", ["alone", "in_turns", "in_forks", "given_up", "in_widths"])
def test_an_engine_that_errs_for_a_while_is_found_in_every_manner(
    soak: Soak, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    run(soak, 0, limit=30)
    soak.generator = random.Random(9)
    executor = soak.engine.executor
    assert isinstance(executor, FakeExecutor)
    draw, calls = executor.draw, iter(range(10**6))
    wrong = range(40, 90)  # some of which nobody looks at: of rows inside a prompt, say

    def err(*args: object) -> int:
        token = draw(*args)  # type: ignore[arg-type]
        return (token + 1) % 300 if next(calls) in wrong else token

    monkeypatch.setattr(executor, "draw", err)

    def act() -> None:
        for _ in range(60):
            getattr(soak, kind)()

    with pytest.raises(Difference, match=r"(?s)request \d+ .* before"):
        act()


def test_leaks_are_told_beyond_what_is_usual() -> None:
    before = Memory(500 * MIB, [1000 * MIB, 1000 * MIB])
    assert leaks(before, Memory(590 * MIB, [990 * MIB, 1000 * MIB])) == []
    assert leaks(before, Memory(700 * MIB, [1000 * MIB, 960 * MIB])) == [
        "resident memory grew by 200 MiB",
        "the GPU of rank 1 has 40 MiB less free",
    ]


def test_a_hang_ends_the_process_with_tracebacks() -> None:
    script = (
        "import sys, time; sys.path.insert(0, 'perf')\n"
        "from types import SimpleNamespace\n"
        "from inkling2_soak import run\n"
        "run(SimpleNamespace(act=lambda: time.sleep(60)), 1, 0.3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=50,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Timeout (0:00:00.3" in done.stderr
    assert 'inkling2_soak.py", line' in done.stderr
