"""AsyncLLM: text generation for programs with an event loop, or with several.

A thread of its own runs the engine (`scheduler.py`); nothing here blocks an event loop but opening
and closing. Requests may come from several loops in several threads; each gets its deltas in the
loop that it was made in.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from inkrt.errors import RequestError
from inkrt.runtime.llm import LLM, Prompt
from inkrt.runtime.output import Delta, RequestOutput
from inkrt.runtime.request import Request
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.scheduler import Scheduler, Ticket
from inkrt.runtime.spec.config import SpeculativeConfig
from inkrt.runtime.spec.stats import SpeculationStats

if TYPE_CHECKING:
    from inkrt.runtime.chat import Message

DEFAULT_MAX_WAITING = 64


@dataclass(frozen=True, slots=True)
class LoadStats:
    """What an engine is doing at a moment.

    Attributes:
        num_running: requests that take turns.
        num_waiting: requests that wait for a slot.
        num_slots: requests that can take turns.
        num_pages: of the state of all sessions.
        num_free_pages: of these, not in use.
        speculation: what speculation has done in all requests that have ended.
        step_age_s: how long the running step has been running; 0 between steps.
    """

    num_running: int
    num_waiting: int
    num_slots: int
    num_pages: int
    num_free_pages: int
    speculation: SpeculationStats
    step_age_s: float


class Answers:
    """The deltas of one or several requests as they come; made by `AsyncLLM.submit`.

    An asynchronous iterator of (number of the request, delta), which ends when all have ended. An
    error of one is raised and cancels the others. Close it, or use it in `async with`: what still
    runs is cancelled then.

    Attributes:
        requests: in order.
    """

    def __init__(self, scheduler: Scheduler, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Delta | BaseException]] = asyncio.Queue()
        self._open = set(range(len(requests)))
        self._tickets: list[Ticket] = scheduler.submit(
            [(request, self._receiver(number)) for number, request in enumerate(requests)]
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        """The next delta; may be given up and called again without losing one."""
        while self._open:
            number, item = await self._queue.get()
            if number not in self._open:
                continue  # cancelled by `cancel` meanwhile
            if isinstance(item, BaseException):
                self._open.discard(number)
                self.close()
                raise item
            if item.finish_reason is not None:
                self._open.discard(number)
            return number, item
        raise StopAsyncIteration

    def cancel(self, number: int) -> None:
        """End one request: nothing more comes of it."""
        if number in self._open:
            self._open.discard(number)
            self._scheduler.cancel(self._tickets[number])

    def abort(self) -> None:
        """End all requests; whoever waits for a delta gets a CancelledRequestError.

        May be called from any thread.
        """
        for ticket in self._tickets:
            self._scheduler.cancel(ticket)

    def close(self) -> None:
        """Cancel what still runs; may be called again."""
        for number in tuple(self._open):
            self.cancel(number)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _receiver(self, number: int) -> "_Receiver":
        return _Receiver(self._loop, self._queue, number)


@dataclass(frozen=True, slots=True)
class _Receiver:
    """Carries what comes of a request from the engine's thread to the caller's loop."""

    loop: asyncio.AbstractEventLoop
    queue: "asyncio.Queue[tuple[int, Delta | BaseException]]"
    number: int

    def __call__(self, item: Delta | BaseException) -> None:
        try:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, (self.number, item))
        except RuntimeError:
            # The loop is closed: nobody can be waiting. Its request ends by itself.
            assert self.loop.is_closed()


class AsyncLLM:
    """Generates text with an engine, from event loops.

    Opening takes the time that loading takes, and blocks: do it before the loop runs, or by
    `await asyncio.to_thread(AsyncLLM, folder)`.

    Args:
        folder: an engine folder, written by ink-build.
        verify: also compare the sha256 of every file.
        speculative: as for `LLM`.
        prefix_cache: as for `LLM`.
        max_waiting: requests that may wait for a slot; more are refused with QueueFullError.

    Attributes:
        llm: what runs; only its parts that step nothing may be used beside this object.

    Raises:
        InkError: see `LLM`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        verify: bool = False,
        speculative: SpeculativeConfig | None = None,
        prefix_cache: bool = False,
        max_waiting: int = DEFAULT_MAX_WAITING,
    ) -> None:
        if not isinstance(max_waiting, int) or max_waiting < 1:
            raise RequestError(
                f"max_waiting is {max_waiting!r}, it must be an integer of at least 1",
                param="max_waiting",
            )
        self.llm = LLM(folder, verify=verify, speculative=speculative, prefix_cache=prefix_cache)
        self._scheduler = Scheduler(self.llm, max_waiting=max_waiting)
        self._named: dict[str, Answers] = {}

    @property
    def is_alive(self) -> bool:
        """Whether requests can still be run: false once it is closed or its device has failed."""
        return self._scheduler.is_alive

    async def prepare(
        self, prompt: Prompt, params: Sequence[SamplingParams | None]
    ) -> list[Request]:
        """Check requests for one prompt, one for each of `params`; `submit` runs them.

        Raises:
            RequestError: the prompt is invalid, or the engine cannot do what is asked.
        """
        # Long texts take long to encode, images to read.
        return await asyncio.to_thread(self.llm.prepare, prompt, params)

    def submit(self, requests: Sequence[Request]) -> Answers:
        """Let requests run, all or none.

        Raises:
            QueueFullError: too many are waiting.
            ClosedError: the engine is closed or has failed.
        """
        return Answers(self._scheduler, requests)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> RequestOutput:
        """Complete one prompt; cancelling the task cancels the request.

        Args:
            prompt: as for `LLM.stream`.
            params: sampling and stopping; None for the model's own.
            request_id: a name for `cancel`.

        Raises:
            RequestError: the prompt or the name is invalid.
            QueueFullError: too many requests are waiting.
            CancelledRequestError: `cancel` was called.
            ClosedError: the engine is closed or has failed.
        """
        async with await self._submit_named(prompt, params, request_id) as answers:
            try:
                async for _ in answers:
                    pass
            finally:
                self._forget(request_id)
        return answers.requests[0].output()

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Complete one prompt, handing out what each step adds; deltas, not the text so far.

        Nothing happens before the first delta is asked for. Closing the generator cancels the
        request, as does cancelling the task that waits in it. Arguments and errors are those of
        `generate`; they come with the first delta.
        """
        async with await self._submit_named(prompt, params, request_id) as answers:
            try:
                async for _, delta in answers:
                    yield delta
            finally:
                self._forget(request_id)

    async def chat(
        self, messages: "Sequence[Message]", params: SamplingParams | None = None
    ) -> RequestOutput:
        """Answer one conversation; see `LLM.chat`, errors as of `generate`."""
        return await self.generate(await asyncio.to_thread(self.llm.chat_prompt, messages), params)

    async def chat_stream(
        self, messages: "Sequence[Message]", params: SamplingParams | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Answer one conversation as `stream` does."""
        prompt = await asyncio.to_thread(self.llm.chat_prompt, messages)
        stream = self.stream(prompt, params)
        try:
            async for delta in stream:
                yield delta
        finally:
            await stream.aclose()

    async def cancel(self, request_id: str) -> bool:
        """Cancel the request of that name; whoever waits for it gets a CancelledRequestError.

        Returns:
            Whether there was one.
        """
        answers = self._named.get(request_id)
        if answers is None:
            return False
        answers.abort()
        return True

    def stats(self) -> LoadStats:
        """What the engine is doing now."""
        states = self.llm.engine.states
        return LoadStats(
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            states.layout.num_slots,
            states.layout.num_pages,
            states.num_free_pages,
            self.llm.speculation.copy(),
            self._scheduler.step_age_s,
        )

    async def close(self) -> None:
        """Cancel all requests and release all memory; may be called again."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """As `close`, where no event loop runs."""
        self._scheduler.close()
        self.llm.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _submit_named(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None
    ) -> Answers:
        answers = self.submit(await self.prepare(prompt, [params]))
        if request_id is not None:
            if request_id in self._named:
                answers.close()
                raise RequestError(
                    f"request_id {request_id!r} is in use, it must be new", param="request_id"
                )
            self._named[request_id] = answers
        return answers

    def _forget(self, request_id: str | None) -> None:
        if request_id is not None:
            del self._named[request_id]
