"""One served engine: its names, what runs on it, how it ends. Knows no routes."""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from opentelemetry.trace import TracerProvider

from inkrt.runtime.answer.format import answer_format
from inkrt.runtime.async_llm import Answers, AsyncLLM
from inkrt.runtime.output import Delta
from inkrt.runtime.request import Request
from inkrt.runtime.tokenizer import Tokenizer
from inkrt.server.errors import ApiError, draining
from inkrt.server.metrics import Metrics
from inkrt.server.settings import ServerSettings
from inkrt.server.traces import Operation, Traces

_log = logging.getLogger("inkrt.server")


class Service:
    """An engine and the answers that are under way.

    Args:
        llm: the engine; whoever opened it closes it.
        settings: of the server.
        provider: takes spans; see `Traces`.

    Attributes:
        name: of the model in answers.
        fingerprint: of the engine's files.
        metrics: what happens.
        is_draining: whether new requests are refused.
    """

    def __init__(
        self, llm: AsyncLLM, settings: ServerSettings, provider: TracerProvider | None = None
    ) -> None:
        engine = llm.llm.engine
        self.llm = llm
        self.settings = settings
        self.names = settings.served_names or (engine.folder.resolve().name,)
        self.name = self.names[0]
        self.created = int(time.time())
        hashes = sorted((name, entry.sha256) for name, entry in engine.config.files.items())
        self.fingerprint = f"fp_{hashlib.sha256(repr(hashes).encode()).hexdigest()[:12]}"
        self.metrics = Metrics(llm, self.name)
        self._traces = Traces(self.name, provider)
        self.is_draining = False
        self._running: set[Answers] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's.

        Raises:
            ApiError: the engine has none.
        """
        tokenizer = self.llm.llm.engine.tokenizer
        if tokenizer is None:
            raise ApiError(400, "this engine has no tokenizer; it takes token ids only")
        return tokenizer

    @property
    def answer_format(self) -> str:
        """Of the model's answers."""
        return answer_format(self.tokenizer)

    def check_model(self, name: str | None) -> None:
        """Check that a request means this model; one that names none does.

        Raises:
            ApiError: it names another.
        """
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"the model {name[:100]!r} is not served here; GET /v1/models lists what is",
                code="model_not_found",
                param="model",
            )

    def require_open(self) -> None:
        """Check that new requests are taken.

        Raises:
            ApiError: the server is shutting down.
        """
        if self.is_draining:
            raise draining()

    def submit(self, requests: Sequence[Request]) -> Answers:
        """Let requests run; `end` must follow.

        Raises:
            InkError: see `AsyncLLM.submit`.
            ApiError: the server is shutting down.
        """
        self.require_open()
        answers = self.llm.submit(requests)
        self._running.add(answers)
        self._idle.clear()
        return answers

    def end(self, answers: Answers) -> None:
        """Cancel what still runs of some answers; may be called again."""
        answers.close()
        self._running.discard(answers)
        if not self._running:
            self._idle.set()

    async def deltas(self, answers: Answers) -> AsyncIterator[tuple[int, Delta] | None]:
        """The deltas of some answers; None whenever nothing has come for so long as to say so.

        Raises:
            TimeoutError: they took longer than the server allows.
            InkError: one failed.
        """
        limit_s = self.settings.request_timeout_s
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while True:
            wait_s = self.settings.ping_s
            if deadline is not None:
                wait_s = min(wait_s, max(deadline - time.monotonic(), 0.0))
            try:
                async with asyncio.timeout(wait_s):
                    item = await anext(answers)
            except StopAsyncIteration:
                return
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                yield None
                continue
            self.metrics.count_delta(answers.requests[item[0]], item[1])
            yield item

    def count_answer(
        self, request: Request, operation: Operation, reason: str, num_tokens: int
    ) -> None:
        """An answer is complete, or was given up for the reason "abort".

        Args:
            request: of it.
            operation: what was asked for.
            reason: stop, length, tool_calls or abort.
            num_tokens: of the answer.
        """
        self.metrics.count_answer(request, reason, num_tokens)
        self._traces.record(request, operation, reason, num_tokens)

    def log_failure(self, error: BaseException, told: ApiError) -> None:
        """Log what clients are not told: errors of ours with their trace, a failed engine."""
        if told.status == 500:
            _log.error("a request failed: %s", error, exc_info=error)
        elif told.code == "engine_dead":
            _log.error("the engine takes no requests: %s", error)

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests; wait for those that run, then cancel what is left.

        What is cancelled gets an error event, or an error for an answer.
        """
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        for answers in tuple(self._running):
            answers.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):  # to send those errors
                await self._idle.wait()

    def usage(self, answers: Answers, num_tokens: int, num_reasoning: int) -> dict[str, Any]:
        """What was read and generated. A prompt counts once, however many answers it has.

        Args:
            answers: the requests.
            num_tokens: of all answers.
            num_reasoning: of these, reasoning.
        """
        prompts = {tuple(request.prompt): request for request in answers.requests}
        num_prompt = sum(map(len, prompts))
        stats = [r.generation.stats for r in answers.requests if r.generation is not None]
        accepted = sum(item.accepted for item in stats)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(request.num_cached for request in prompts.values())
            },
            "completion_tokens_details": {
                "reasoning_tokens": num_reasoning,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(item.drafted for item in stats) - accepted,
            },
        }
