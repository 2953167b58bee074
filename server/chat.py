"""POST /v1/chat/completions: one or several answers to a conversation, at once or as they come."""

import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from inkrt.runtime.answer.parts import CallDelta
from inkrt.runtime.answer.reader import AnswerPiece, AnswerReader
from inkrt.runtime.output import TokenLogprob
from inkrt.server.chat_answers import ChatAnswers
from inkrt.server.errors import api_error
from inkrt.server.event_stream import DONE, PING, EventStream, event, unless_gone
from inkrt.server.fields import check_extra
from inkrt.server.logprobs import chat_logprobs
from inkrt.server.protocol import ChatRequest
from inkrt.server.service import Service

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    headers = check_extra(body.model_extra, request.state.request_id)
    answers = await ChatAnswers.start(service, body)
    chat = _Chat(service, body, answers)
    if body.stream:
        return EventStream(chat.events(), answers.end, headers)
    try:
        made = await unless_gone(request, chat.complete())
    finally:
        answers.end()
    return JSONResponse(made, headers=headers)


@dataclass(slots=True)
class _Choice:
    """One answer, as far as it has come."""

    reader: AnswerReader
    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def take(self, piece: AnswerPiece) -> None:
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        for part in piece.parts:
            self.reasoning += part.reasoning
            self.content += part.content
            if part.call is not None and part.call.name is not None:
                self.calls.append(_call(part.call))
            elif part.call is not None:
                self.calls[part.call.index]["function"]["arguments"] += part.call.arguments


class _Chat:
    """The answers to one request, as this route sends them."""

    def __init__(self, service: Service, body: ChatRequest, answers: ChatAnswers) -> None:
        self._service = service
        self._body = body
        self._answers = answers
        self._shows_reasoning = body.include_reasoning is not False
        self._wants_logprobs = bool(body.logprobs)
        self._wants_ids = bool(body.return_token_ids)
        options = body.stream_options
        self._wants_accepted = options is not None and bool(options.include_accepted)
        self._tells_tokens = self._wants_ids or self._wants_accepted
        self._choices = [_Choice(reader) for reader in answers.readers]
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model or service.name,
            "system_fingerprint": service.fingerprint,
        }

    async def complete(self) -> dict[str, Any]:
        """All answers when they are complete."""
        async for item in self._answers.pieces():
            if item is not None:
                self._choices[item[0]].take(item[1])
        body = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._complete(i, choice) for i, choice in enumerate(self._choices)],
            "usage": self._answers.usage(),
        }
        return {**body, "prompt_token_ids": self._answers.prompt} if self._wants_ids else body

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answers as they come."""
        try:
            for index in range(len(self._choices)):
                yield self._chunk(index, {"role": "assistant", "content": ""}, is_first=True)
            async for item in self._answers.pieces():
                if item is None:
                    yield PING
                    continue
                index, piece = item
                choice = self._choices[index]
                if body := self._delta(piece):
                    yield self._chunk(index, body, piece=piece)
                elif piece.token_ids and (self._tells_tokens or piece.logprobs):
                    yield self._chunk(index, {}, piece=piece)
                if choice.reader.end is not None:
                    yield self._chunk(index, {}, choice=choice)
            options = self._body.stream_options
            if options is not None and options.include_usage:
                yield self._event([], usage=self._answers.usage())
        except Exception as error:
            told = api_error(error)
            self._service.log_failure(error, told)
            yield event(told.envelope())
            return
        yield DONE

    def _complete(self, index: int, choice: _Choice) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.content or (None if choice.calls else ""),
            "refusal": None,
        }
        if choice.reasoning and self._shows_reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = choice.calls
        made = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.reader.end,
            "stop_reason": choice.reader.stop_reason,
        }
        return {**made, "token_ids": choice.token_ids} if self._wants_ids else made

    def _delta(self, piece: AnswerPiece) -> dict[str, Any]:
        """What a piece adds to a message; empty if nothing."""
        reasoning = "".join(part.reasoning for part in piece.parts)
        content = "".join(part.content for part in piece.parts)
        body: dict[str, Any] = {}
        if reasoning and self._shows_reasoning:
            body["reasoning_content"] = reasoning
        if content:
            body["content"] = content
        calls = _merged(part.call for part in piece.parts if part.call is not None)
        return {**body, "tool_calls": calls} if calls else body

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        piece: AnswerPiece | None = None,
        choice: _Choice | None = None,
        is_first: bool = False,
    ) -> bytes:
        """An event about one answer; with `choice`, the one that says why it ended."""
        made: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None if piece is None else self._logprobs(piece.logprobs),
            "finish_reason": None if choice is None else choice.reader.end,
        }
        if choice is not None:
            made["stop_reason"] = choice.reader.stop_reason
        if piece is not None and self._wants_ids:
            made["token_ids"] = piece.token_ids
        if piece is not None and self._wants_accepted:
            made["accepted"] = _accepted(piece)
        if is_first and self._wants_ids:
            return self._event([made], prompt_token_ids=self._answers.prompt)
        return self._event([made])

    def _event(self, choices: Sequence[Mapping[str, Any]], **further: object) -> bytes:
        return event(
            {**self._head, "object": "chat.completion.chunk", "choices": choices, **further}
        )

    def _logprobs(self, items: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(items, self._service.tokenizer) if self._wants_logprobs else None


def _accepted(piece: AnswerPiece) -> dict[str, int]:
    """Accepted drafts of a piece: tokens, and characters of its text, the first ones."""
    parts = piece.parts[: piece.num_accepted_parts]
    return {
        "tokens": piece.num_accepted,
        "reasoning_content": sum(len(part.reasoning) for part in parts),
        "content": sum(len(part.content) for part in parts),
    }


def _call(call: CallDelta) -> dict[str, Any]:
    """The first piece of a call, as clients see it."""
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _merged(calls: Iterable[CallDelta]) -> list[dict[str, Any]]:
    """Pieces of calls, one for each call."""
    made: dict[int, dict[str, Any]] = {}
    for call in calls:
        if call.index in made:
            made[call.index]["function"]["arguments"] += call.arguments
        elif call.name is not None:
            made[call.index] = {"index": call.index, **_call(call)}
        else:
            made[call.index] = {
                "index": call.index,
                "function": {"arguments": call.arguments},
            }
    return list(made.values())
