"""Threads that keep several devices busy at once.

A graph of some hundred kernels takes the host some 80 us to launch, in which the driver holds no
lock of Python. From one thread the last rank would start so much later for every rank before it.
"""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


class _Worker:
    """A thread that runs functions of one rank in the order in which they are given."""

    def __init__(self, number: int) -> None:
        self.failure: BaseException | None = None
        self._todo: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._done: SimpleQueue[Any] = SimpleQueue()
        # A daemon: a process that never closes its engine must end all the same.
        self._thread = Thread(target=self._work, name=f"inkrt rank {number}", daemon=True)
        self._thread.start()

    def post(self, function: Callable[[], Any]) -> None:
        """Run a function later; what it raises first is kept."""
        self._todo.put(lambda: self._guard(function))

    def start(self, function: Callable[[], T]) -> Callable[[], T | None]:
        """Run a function; gives what waits for its result, None if it raises."""
        self._todo.put(lambda: self._done.put(self._guard(function)))
        return self._done.get

    def end(self) -> None:
        self._todo.put(None)
        self._thread.join()

    def _guard(self, function: Callable[[], T]) -> T | None:
        try:
            return function()
        except BaseException as error:  # raised in the thread that asks
            self.failure = self.failure or error
            return None

    def _work(self) -> None:
        while (function := self._todo.get()) is not None:
            function()


class RankThreads:
    """Runs functions on every rank: 0 in the calling thread, each other in a thread of its own.

    Args:
        num_ranks: 1 makes no thread.
    """

    def __init__(self, num_ranks: int) -> None:
        self._workers: list[_Worker] = [_Worker(rank) for rank in range(1, num_ranks)]

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Results of `function(rank)` on all ranks, side by side.

        Raises:
            BaseException: the first that any call has raised since the last `run` or `join`, by
                rank, but those of other ranks before that of rank 0, which may only follow.
        """
        started = [
            worker.start(lambda rank=rank: function(rank))  # type: ignore[misc]
            for rank, worker in enumerate(self._workers, start=1)
        ]
        failure: BaseException | None = None
        results: list[Any] = []
        try:
            results.append(function(0))
        except BaseException as error:
            failure = error
        results += [wait() for wait in started]
        self._raise_failure()
        if failure is not None:
            raise failure
        return results

    def post(self, function: Callable[[int], Any]) -> None:
        """Run `function(rank)` on all ranks; waits for that of rank 0 only.

        What it raises on others, the next `run` or `join` does.
        """
        for rank, worker in enumerate(self._workers, start=1):
            worker.post(lambda rank=rank: function(rank))  # type: ignore[misc]
        function(0)

    def join(self) -> None:
        """Wait until everything posted has run.

        Raises:
            BaseException: see `run`.
        """
        if self._workers:
            self.run(lambda _: None)

    def close(self) -> None:
        """End all threads, once they have done what they were given. May be called again."""
        while self._workers:
            self._workers.pop().end()

    def _raise_failure(self) -> None:
        failures = [worker.failure for worker in self._workers]
        for worker in self._workers:
            worker.failure = None
        for failure in failures:
            if failure is not None:
                raise failure
