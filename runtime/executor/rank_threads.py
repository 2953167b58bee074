"""Threads that keep several devices busy at once.

A graph of some hundred kernels takes the host some 80 us to launch, in which the driver holds no
lock of Python. From one thread the last rank would start so much later for every rank before it.

A rank may be stuck in a call of the driver, if its GPU has stalled. Nobody waits for it longer than
`PATIENCE_S`: it is lost then, as its thread cannot be ended, and whatever is asked for later fails.
"""

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from inkrt.errors import DeviceError

# How much longer than rank 0 another may take, in seconds. Kernels wait for each other some three
# (`plugins/all_reduce/lamport.cuh`), and the longest steps take less than one.
PATIENCE_S = 10.0
T = TypeVar("T")


class _Worker:
    """A thread that runs functions of one rank in the order in which they are given."""

    def __init__(self, number: int) -> None:
        self.failure: BaseException | None = None
        self.is_lost = False
        self._number = number
        self._todo: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._done: SimpleQueue[Any] = SimpleQueue()
        # A daemon: a process that never closes its engine must end all the same.
        self._thread = Thread(target=self._work, name=f"inkrt rank {number}", daemon=True)
        self._thread.start()

    def post(self, function: Callable[[], Any]) -> None:
        """Run a function later; what it raises first is kept."""
        self._todo.put(lambda: self._guard(function))

    def start(self, function: Callable[[], T]) -> None:
        """Run a function, whose result `wait` gives."""
        self._todo.put(lambda: self._done.put(self._guard(function)))

    def wait(self, patience: float | None) -> Any:
        """The result of what `start` was given; None if it raises, or if the rank is lost."""
        try:
            return self._done.get(timeout=patience)
        except Empty:
            self.is_lost = True
            self.failure = self.failure or DeviceError(
                f"rank {self._number} has not answered for {patience:g} s: its GPU has stalled; "
                f"look at nvidia-smi, end this process and open the engine again"
            )
            return None

    def end(self) -> None:
        self._todo.put(None)
        if not self.is_lost:
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

    def run(self, function: Callable[[int], T], *, is_patient: bool = False) -> list[T]:
        """Results of `function(rank)` on all ranks, side by side.

        Args:
            function: takes the rank.
            is_patient: whether a rank may take as long as it wants, and not just PATIENCE_S longer
                than rank 0.

        Raises:
            BaseException: the first that any call has raised since the last `run` or `join`, by
                rank, but those of other ranks before that of rank 0, which may only follow.
            DeviceError: a rank is lost.
        """
        self._require_all()
        for rank, worker in enumerate(self._workers, start=1):
            worker.start(lambda rank=rank: function(rank))  # type: ignore[misc]
        failure: BaseException | None = None
        results: list[Any] = []
        try:
            results.append(function(0))
        except BaseException as error:
            failure = error
        patience = None if is_patient else PATIENCE_S
        results += [worker.wait(patience) for worker in self._workers]
        self._raise_failure()
        if failure is not None:
            raise failure
        return results

    def post(self, function: Callable[[int], Any]) -> None:
        """Run `function(rank)` on all ranks; waits for that of rank 0 only.

        What it raises on others, the next `run` or `join` does.

        Raises:
            DeviceError: a rank is lost.
        """
        self._require_all()
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
        """End all threads, once they have done what they were given. May be called again.

        Those of lost ranks end with the process.
        """
        while self._workers:
            self._workers.pop().end()

    def _require_all(self) -> None:
        """Raise if a rank is lost, whose failure stays."""
        for worker in self._workers:
            if worker.is_lost and worker.failure is not None:
                raise worker.failure

    def _raise_failure(self) -> None:
        failures = [worker.failure for worker in self._workers]
        for worker in self._workers:
            if not worker.is_lost:
                worker.failure = None
        for failure in failures:
            if failure is not None:
                raise failure
