"""The answers to one conversation: judged, under way, read. Others know in which form to send them.

Every route that answers conversations goes through here, so that all honour the same fields, count
the same metrics and end the same way.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Self

from inkrt.runtime.answer.reader import AnswerPiece
from inkrt.runtime.async_llm import Answers
from inkrt.runtime.output import Delta
from inkrt.runtime.tokenizer import Tokenizer
from inkrt.server.chat_request import ChatPlan, plan_chat
from inkrt.server.params import num_choices, params_of_choices
from inkrt.server.protocol import ChatRequest
from inkrt.server.service import Service
from inkrt.server.structured import by_own_names


class ChatAnswers:
    """One or several answers to a conversation; made by `start`, and `end` must follow.

    Args:
        service: that runs them.
        plan: of the request.
        tokenizer: of the model.
        answers: under way.

    Attributes:
        plan: of the request.
        prompt: token ids.
        readers: one for each answer.
    """

    def __init__(
        self, service: Service, plan: ChatPlan, tokenizer: Tokenizer, answers: Answers
    ) -> None:
        self.plan = plan
        self.prompt = answers.requests[0].prompt
        self.readers = [plan.reader(tokenizer, self.prompt) for _ in answers.requests]
        self._service = service
        self._answers = answers
        self._is_counted = [False] * len(self.readers)

    @classmethod
    async def start(cls, service: Service, body: ChatRequest) -> Self:
        """Judge a request and let it run.

        Raises:
            ApiError: it names another model, or asks for what is not supported.
            InkError: a value is invalid, or the engine does not take it.
        """
        service.check_model(body.model)
        service.require_open()
        number = num_choices(body, 1, service.settings.max_choices)
        llm, tokenizer = service.llm.llm, service.tokenizer
        with by_own_names(body):
            plan = await asyncio.to_thread(plan_chat, body, llm, tokenizer)
            params = params_of_choices(plan.engine_params(), number)
            requests = await service.llm.prepare(plan.prompt, params)
        return cls(service, plan, tokenizer, service.submit(requests))

    def end(self) -> None:
        """Give up what still runs; may be called again."""
        for index, reader in enumerate(self.readers):
            if not self._is_counted[index]:
                self._count(index, "abort", reader.num_tokens)
        self._service.end(self._answers)

    async def pieces(self) -> AsyncIterator[tuple[int, AnswerPiece] | None]:
        """What comes: number of the answer and more of it; None when nothing has come for long.

        Raises:
            TimeoutError: they took longer than the server allows.
            InkError: one failed.
        """
        async for item in self._service.deltas(self._answers):
            yield None if item is None else (item[0], self._read(*item))

    def usage(self) -> dict[str, Any]:
        """What was read and generated; see `Service.usage`."""
        return self._service.usage(
            self._answers,
            sum(reader.num_tokens for reader in self.readers),
            sum(reader.num_reasoning_tokens for reader in self.readers),
        )

    def _read(self, index: int, delta: Delta) -> AnswerPiece:
        reader = self.readers[index]
        piece = reader.push(delta)
        if reader.end is not None:
            self._answers.cancel(index)  # it may have ended before its generation
            self._count(index, reader.end, reader.num_tokens)
        return piece

    def _count(self, index: int, reason: str, num_tokens: int) -> None:
        self._is_counted[index] = True
        request = self._answers.requests[index]
        self._service.count_answer(request, "chat", reason, num_tokens)
