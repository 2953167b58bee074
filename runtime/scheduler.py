"""One thread that owns an engine and serves requests step by step.

Requests wait in a bounded queue, first come, first served. As many as the engine has slots for run
at once and take turns, a step each: a piece of a prompt, a token, or a round of speculation. So a
long prompt holds nobody up for longer than one step. It knows nothing of event loops: what comes of
a request is handed to a function of its owner, on this thread.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inkrt.errors import CancelledRequestError, ClosedError, DeviceError, InkError, QueueFullError
from inkrt.runtime.llm import LLM
from inkrt.runtime.output import Delta
from inkrt.runtime.request import Request

Receiver = Callable[[Delta | BaseException], None]


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that the scheduler has taken.

    Attributes:
        request: what to run.
        receive: takes each delta with tokens, then nothing more behind one with a finish reason;
            or an error, and nothing more.
        is_cancelled: set by `Scheduler.cancel`.
    """

    request: Request
    receive: Receiver
    is_cancelled: bool = field(default=False)


class Scheduler:
    """Runs the requests of one LLM, which nobody else may step meanwhile.

    Args:
        llm: what runs them.
        max_waiting: most requests that wait for a slot, at least 1.
    """

    def __init__(self, llm: LLM, *, max_waiting: int) -> None:
        self._llm = llm
        self._max_waiting = max_waiting
        self._condition = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._running: deque[Ticket] = deque()
        self._is_closing = False
        self._failure: BaseException | None = None
        self._pid = os.getpid()
        self._step_began_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="inkrt-engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that take turns."""
        return len(self._running)

    @property
    def is_alive(self) -> bool:
        """Whether it can still run requests."""
        return self._thread.is_alive() and self._failure is None

    @property
    def step_age_s(self) -> float:
        """How long the running step has been running; 0 between steps."""
        began = self._step_began_s
        return 0.0 if began is None else time.perf_counter() - began

    def submit(self, requests: Sequence[tuple[Request, Receiver]]) -> list[Ticket]:
        """Take requests, all or none.

        Raises:
            QueueFullError: they would be more than may wait.
            ClosedError: it is closing, or the engine has failed.
            DeviceError: this process was forked from the one that opened the engine.
        """
        if os.getpid() != self._pid:
            raise DeviceError(
                "the engine was opened before this process was forked, which it does not survive; "
                "start processes by spawn and open it in the one that uses it"
            )
        tickets = [Ticket(request, receive) for request, receive in requests]
        with self._condition:
            self._require_open()
            if len(self._waiting) + len(tickets) > self._max_waiting:
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait for the engine and {len(tickets)} more "
                    f"would exceed the {self._max_waiting} that may; ask again later"
                )
            self._waiting.extend(tickets)
            self._condition.notify()
        return tickets

    def cancel(self, ticket: Ticket) -> None:
        """End a request after its running step; of one that has ended, nothing happens.

        Its receiver gets a CancelledRequestError.
        """
        with self._condition:
            ticket.is_cancelled = True
            self._condition.notify()

    def close(self) -> None:
        """Cancel all requests and end the thread; may be called again."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _require_open(self) -> None:
        if self._failure is not None:
            raise ClosedError("the engine has failed; open it again")
        if self._is_closing:
            raise ClosedError("the engine is closed; open it again")

    def _run(self) -> None:
        error: BaseException = ClosedError("the engine was closed before the request had ended")
        try:
            while self._await_work():
                self._drop_cancelled()
                self._admit()
                if self._running:
                    self._step()
        except BaseException as failure:
            self._failure = error = failure
        with self._condition:
            left = [*self._running, *self._waiting]
            self._running.clear()
            self._waiting.clear()
            self._is_closing = True
        for ticket in left:
            self._end(ticket, error)

    def _await_work(self) -> bool:
        """Wait until something is to do; false if it is to end the thread."""
        with self._condition:
            while not (self._is_closing or self._waiting or self._running):
                self._condition.wait()
            return not self._is_closing

    def _drop_cancelled(self) -> None:
        with self._condition:
            dropped = [t for t in (*self._running, *self._waiting) if t.is_cancelled]
            for ticket in dropped:
                (self._running if ticket in self._running else self._waiting).remove(ticket)
        for ticket in dropped:
            self._end(ticket, CancelledRequestError("the request was cancelled"))

    def _admit(self) -> None:
        """Give slots to requests in the order of their coming."""
        while self._waiting:
            ticket = self._waiting[0]
            error: BaseException | None = None
            has_started = False
            try:
                has_started = self._llm.try_start(ticket.request, must=not self._running)
            except DeviceError:
                raise
            except Exception as failure:
                error = failure
            if error is None and not has_started:
                return
            with self._condition:
                self._waiting.popleft()
                if error is None:
                    self._running.append(ticket)
            if error is not None:
                self._end(ticket, error)

    def _step(self) -> None:
        """Run a step of the request whose turn it is."""
        ticket = self._running[0]
        self._step_began_s = time.perf_counter()
        try:
            delta = self._llm.advance(ticket.request)
        except DeviceError:
            raise  # of all requests
        except Exception as error:
            self._remove(ticket)
            self._end(ticket, error)
            return
        finally:
            self._step_began_s = None
        if delta.finish_reason is None:
            self._running.rotate(-1)
            if delta.token_ids:
                ticket.receive(delta)
            return
        self._remove(ticket)
        self._llm.end(ticket.request)  # first, so that who gets the delta finds the slot free
        ticket.receive(delta)

    def _remove(self, ticket: Ticket) -> None:
        with self._condition:
            self._running.remove(ticket)

    def _end(self, ticket: Ticket, error: BaseException) -> None:
        """End a request before its time."""
        try:
            self._llm.end(ticket.request)
        except InkError:
            # The engine has failed; the request gets the error that said so.
            assert self._failure is not None
        ticket.receive(error)
