"""The CUDA executor over several ranks, which only write down what they are asked to do."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inkrt.errors import DeviceError
from inkrt.runtime.executor import Sampling, StepInput, cuda, rank_threads
from inkrt.runtime.executor.cuda import CudaExecutor
from inkrt.runtime.executor.cuda_rank import RING_SIZE
from inkrt.runtime.executor.decode_queue import DecodeQueue
from inkrt.runtime.executor.peers import RankSlice
from inkrt.runtime.executor.rank_threads import RankThreads
from inkrt.runtime.plan import Plan

PLAN = Plan("decode", 1, 1, (), (), 0, {}, {})


class FakeRank:
    """Keeps calls in order, and the thread that they come from.

    Its decode steps draw the number of the step.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.plans = {"decode": PLAN}
        self.ring = np.zeros(RING_SIZE, np.uint64)
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()
        self.position = 0
        self.failing: dict[str, Exception] = {}
        self.memory = SimpleNamespace(
            copy_entries=lambda *args: self.note("copy", *args), base=1,
            fill_state=lambda value: self.note("fill", value),
        )  # fmt: skip
        self.device = SimpleNamespace(name="H200")

    def note(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args))
        self.threads.add(threading.get_ident())
        if name in self.failing:
            raise self.failing[name]

    def enter(self) -> None:
        assert self.rank == 0, "the others are entered in their own threads"

    def encode_inputs(self, values: dict[str, Any]) -> Any:
        assert self.rank == 0, "once for all"
        return (values["tokens"], values["position"], values["page_table"])

    def send_inputs(self, block: Any) -> None:
        self.note("inputs", block)
        self.position = block[1][0]

    def launch(self, step: str) -> None:
        self.note("launch", step)

    def launch_loop(self) -> None:
        self.note("loop")
        self.position += 1
        self.ring[self.position % RING_SIZE] = self.position << 32 | self.position * 7

    def extend_pages(self, first: int, pages: list[int]) -> None:
        self.note("pages", first, pages)

    def receive(self, _plan: Plan, num_rows: dict[str, int]) -> dict[str, Any]:
        self.note("receive", num_rows)
        return {"tokens": np.array([5], np.int32), "logits": np.zeros((1, 3), np.float32)}

    def require_sound(self) -> None:
        self.note("sound")

    def is_busy(self) -> bool:
        return False

    def close(self) -> None:
        self.note("close")
        self.memory.base = 0


@pytest.fixture(params=[1, 2, 4])
def executor(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = object.__new__(CudaExecutor)
    made.rank_slice = None
    made.ranks = [FakeRank(rank) for rank in range(request.param)]  # type: ignore[misc]
    made._threads = RankThreads(request.param)
    made._queue = DecodeQueue(made)
    yield made
    made._threads.close()


def step_input(token: int, position: int, pages: list[int]) -> StepInput:
    return StepInput([token], position, 0, pages, Sampling())


def test_all_ranks_do_the_same_in_the_same_order(executor: Any) -> None:
    output = executor.run("decode", step_input(3, 0, [4]))
    assert output.tokens.tolist() == [5]
    token, position = 7 * 1, 1
    executor.decode(step_input(3, 0, [4]), 0)
    for _ in range(6):
        pages = [4] if position < 4 else [4, 9]
        token = executor.decode(step_input(token, position, pages), 3)
        position += 1
        assert token == 7 * position
    executor.copy_page(1, 2)
    executor.copy_slot(0, 1)
    executor.fill_state(60)
    executor._threads.join()
    first = [call for call in executor.ranks[0].calls if call[0] not in ("receive", "sound")]
    names = [call[0] for call in first]
    assert names[:3] == ["inputs", "launch", "inputs"]
    assert names.count("loop") >= 7
    assert ("pages", 1, [9]) in first
    assert first[-3:] == [("copy", "paged", 1, 2), ("copy", "ring", 0, 1), ("fill", 60)]
    for rank in executor.ranks[1:]:
        assert rank.calls == first
        assert len(rank.threads) == 1
        assert rank.threads.isdisjoint(executor.ranks[0].threads)
    assert executor.ranks[0].threads == {threading.get_ident()}


def test_why_another_rank_failed_comes_first(executor: Any) -> None:
    """Rank 0 gives up waiting since the last rank could not launch."""
    executor.ranks[0].failing["receive"] = DeviceError("a kernel gave up waiting")
    executor.ranks[-1].failing["launch"] = DeviceError("launch failed")
    with pytest.raises(DeviceError, match="launch failed"):
        executor.run("decode", step_input(3, 0, [4]))


def test_a_failure_is_that_of_rank_0_if_all_others_are_sound(executor: Any) -> None:
    executor.ranks[0].failing["receive"] = DeviceError("a kernel gave up waiting")
    with pytest.raises(DeviceError, match="gave up"):
        executor.run("decode", step_input(3, 0, [4]))


def test_a_token_that_no_rank_draws_names_the_failure(executor: Any) -> None:
    """All bits of the word say so; the GPU's own answer says why."""
    rank = executor.ranks[0]
    rank.launch_loop = lambda: rank.ring.__setitem__(1, 1 << 32 | 0xFFFFFFFF)
    rank.failing["sound"] = DeviceError("a kernel of rank 1 gave up")
    with pytest.raises(DeviceError, match="of rank 1 gave up"):
        executor.decode(step_input(3, 0, [4]), 0)


def test_a_rank_that_cannot_launch_while_steps_run_ahead(executor: Any) -> None:
    """Rank 0 draws nothing, as its kernel gave up waiting for the last rank."""
    first, last = executor.ranks[0], executor.ranks[-1]
    executor.decode(step_input(3, 0, [4]), 0)
    first.launch_loop = lambda: first.ring.__setitem__(2, 2 << 32 | 0xFFFFFFFF)
    first.failing["sound"] = DeviceError("a kernel gave up waiting")
    last.failing["loop" if last is not first else "sound"] = DeviceError("failed on the last rank")
    with pytest.raises(DeviceError, match="failed on the last rank"):
        executor.decode(step_input(7, 1, [4]), 0)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_stalled_rank_is_named_in_bounded_time(
    executor: Any, monkeypatch: pytest.MonkeyPatch, is_ahead: bool
) -> None:
    """Its thread never comes back from the driver; rank 0's kernel gives up waiting for it."""
    if len(executor.ranks) == 1:
        pytest.skip("there is no other rank")
    monkeypatch.setattr(rank_threads, "PATIENCE_S", 0.2)
    first, last, stuck = executor.ranks[0], executor.ranks[-1], threading.Event()
    first.failing["receive"] = first.failing["sound"] = DeviceError("a kernel gave up waiting")
    first.launch_loop = lambda: first.ring.__setitem__(1, 1 << 32 | 0xFFFFFFFF)
    last.send_inputs = lambda _block: stuck.wait(30)
    name = f"rank {len(executor.ranks) - 1} has not answered"
    try:
        started = time.monotonic()
        given = step_input(3, 0, [4])
        for _ in range(2):
            with pytest.raises(DeviceError, match=name):
                executor.decode(given, 0) if is_ahead else executor.run("decode", given)
        with pytest.raises(DeviceError, match=name):
            executor.close()
        assert time.monotonic() - started < 5
        assert ("close",) not in first.calls  # others may still write to its memory
    finally:
        stuck.set()


def test_a_gpu_that_never_draws_is_told(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "TOKEN_S", 0.2)
    first = executor.ranks[0]
    first.launch_loop, first.is_busy = lambda: None, lambda: True
    with pytest.raises(DeviceError, match=r"rank 0 has worked on the token for position 1 for 0.2"):
        executor.decode(step_input(3, 0, [4]), 0)


def test_a_first_rank_that_cannot_launch_is_told_at_once(executor: Any) -> None:
    executor.ranks[0].failing["launch"] = DeviceError("CUDA call failed on rank 0")
    with pytest.raises(DeviceError, match="failed on rank 0"):
        executor.run("decode", step_input(3, 0, [4]))


def test_closing_ends_all_threads_even_if_a_rank_fails(executor: Any) -> None:
    count = len(executor.ranks)
    before = threading.active_count()
    executor.ranks[-1].failing["close"] = DeviceError("lost")
    with pytest.raises(DeviceError, match="lost"):
        executor.close()
    assert [rank.calls for rank in executor.ranks] == [[("close",)]] * count
    assert threading.active_count() == before - (count - 1)


def test_names_say_what_runs(executor: Any) -> None:
    count = len(executor.ranks)
    assert executor.device_name == ("H200" if count == 1 else f"{count} x H200")
    executor.rank_slice = RankSlice(1, 4)
    assert executor.device_name == "H200, rank slice 1/4, collectives looped back"
