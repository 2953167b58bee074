"""Functions on every rank, side by side: order, results, failures."""

import threading
import time
from collections.abc import Iterator

import pytest

from inkrt.errors import DeviceError
from inkrt.runtime.executor import rank_threads
from inkrt.runtime.executor.rank_threads import RankThreads


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_rank_has_a_thread_and_the_first_the_callers(num_ranks: int) -> None:
    threads = RankThreads(num_ranks)
    own = threading.get_ident()
    for _ in range(3):
        seen = threads.run(lambda rank: (rank, threading.get_ident()))
        assert [rank for rank, _ in seen] == list(range(num_ranks))
        assert seen[0][1] == own
        assert len({thread for _, thread in seen}) == num_ranks
    threads.close()
    threads.close()


def test_all_run_at_once() -> None:
    """Each waits for all: in turns, none would end."""
    threads, barrier = RankThreads(4), threading.Barrier(4, timeout=10)
    assert len(threads.run(lambda _: barrier.wait())) == 4
    threads.post(lambda _: barrier.wait())
    threads.join()
    threads.close()


def test_each_rank_keeps_the_order_and_nobody_is_waited_for() -> None:
    threads, calls = RankThreads(3), {rank: [] for rank in range(3)}  # type: ignore[var-annotated]
    gate = threading.Event()
    threads.post(lambda rank: rank == 0 or gate.wait(10))
    for number in range(20):
        threads.post(lambda rank, number=number: calls[rank].append(number))  # type: ignore[misc]
    assert calls == {0: list(range(20)), 1: [], 2: []}
    gate.set()
    threads.join()
    assert calls == {rank: list(range(20)) for rank in range(3)}
    threads.close()


def test_failures_are_raised_by_who_asks_next_and_once() -> None:
    threads = RankThreads(3)

    def fail(rank: int) -> None:
        time.sleep(0.01 * (3 - rank))
        if rank:
            raise ValueError(rank)

    threads.post(fail)
    with pytest.raises(ValueError, match="1"):
        threads.join()
    threads.join()
    with pytest.raises(ValueError, match="1"):
        threads.run(fail)
    assert threads.run(lambda rank: rank) == [0, 1, 2]
    threads.close()


def test_what_fails_elsewhere_comes_before_what_follows_from_it() -> None:
    threads = RankThreads(2)
    with pytest.raises(KeyError, match="1"):
        threads.run(lambda rank: {}[rank])
    alone = RankThreads(1)
    with pytest.raises(KeyError, match="0"):
        alone.run(lambda rank: {}[rank])
    threads.close()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Who waits for it does so until the test ends; nobody is waited for longer than 0.2 s."""
    monkeypatch.setattr(rank_threads, "PATIENCE_S", 0.2)
    event = threading.Event()
    yield event
    event.set()


def test_a_rank_that_does_not_answer_is_lost(stuck: threading.Event) -> None:
    threads, calls = RankThreads(3), []
    started = time.monotonic()
    with pytest.raises(
        DeviceError, match=r"rank 2 has not answered for 0.2 s: its GPU has stalled"
    ):
        threads.run(lambda rank: stuck.wait(30) if rank == 2 else None)
    assert 0.2 <= time.monotonic() - started < 5
    started = time.monotonic()
    for ask in (threads.run, threads.post):
        for _ in range(2):  # again and again, and nothing runs on the others
            with pytest.raises(DeviceError, match="rank 2 has not answered"):
                ask(calls.append)
    with pytest.raises(DeviceError, match="rank 2 has not answered"):
        threads.join()
    threads.close()
    assert time.monotonic() - started < 0.2
    assert calls == []


def test_what_a_lost_rank_was_given_before_is_lost_too(stuck: threading.Event) -> None:
    threads = RankThreads(2)
    threads.post(lambda rank: rank and stuck.wait(30))
    with pytest.raises(DeviceError, match="rank 1 has not answered"):
        threads.join()
    threads.close()


def test_patience_begins_when_rank_0_is_done_and_may_be_endless(stuck: threading.Event) -> None:
    threads = RankThreads(2)
    assert threads.run(lambda rank: time.sleep(0.3 - 0.05 * rank) or rank) == [0, 1]
    assert threads.run(lambda rank: stuck.wait(0.4 * rank) or rank, is_patient=True) == [0, 1]
    threads.close()
