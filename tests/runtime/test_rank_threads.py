"""Functions on every rank, side by side: order, results, failures."""

import threading
import time

import pytest

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
