"""POST /v1/completions: texts or token ids continued, without a chat template."""

import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from inkrt.runtime.async_llm import Answers
from inkrt.runtime.llm import Prompt
from inkrt.runtime.output import Delta, TokenLogprob
from inkrt.runtime.request import Request as EngineRequest
from inkrt.server.errors import ApiError, api_error
from inkrt.server.event_stream import DONE, PING, EventStream, event, unless_gone
from inkrt.server.fields import check_extra
from inkrt.server.logprobs import completion_logprobs
from inkrt.server.params import num_choices, params_of_choices, sampling_params
from inkrt.server.protocol import CompletionRequest
from inkrt.server.service import Service
from inkrt.server.structured import by_own_names, grammar_of

router = APIRouter()
_DEFAULT_MAX_TOKENS = 16  # OpenAI's for this route


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts."""
    service: Service = request.app.state.service
    headers = check_extra(body.model_extra, request.state.request_id)
    service.check_model(body.model)
    service.require_open()
    prompts = _prompts(body)
    number = num_choices(body, len(prompts), service.settings.max_choices)
    if body.max_tokens is None:
        least = body.min_tokens or 0
        body = body.model_copy(update={"max_tokens": max(_DEFAULT_MAX_TOKENS, least)})
    params = sampling_params(body, service.llm.llm.default_params)
    with by_own_names(body):
        if (grammar := grammar_of(body, "all")) is not None:
            params = dataclasses.replace(params, grammar=grammar)
        each = params_of_choices(params, number)
        prepared = [await service.llm.prepare(prompt, each) for prompt in prompts]
    requests = [one for of_prompt in prepared for one in of_prompt]
    completion = _Completion(service, body, service.submit(requests), number)
    if body.stream:
        return EventStream(completion.events(), completion.end, headers)
    try:
        made = await unless_gone(request, completion.complete())
    finally:
        completion.end()
    return JSONResponse(made, headers=headers)


def _prompts(body: CompletionRequest) -> list[Prompt]:
    if isinstance(body.prompt, str):
        return [body.prompt]
    if not body.prompt:
        raise ApiError(400, "prompt is an empty list", param="prompt")
    if isinstance(body.prompt[0], int):
        return [body.prompt]
    return list(body.prompt)


@dataclass(slots=True)
class _Choice:
    """One continuation, as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: Delta | None = None
    is_counted: bool = False


class _Completion:
    """The continuations that one request asks for."""

    def __init__(
        self, service: Service, body: CompletionRequest, answers: Answers, number: int
    ) -> None:
        self._service = service
        self._body = body
        self._answers = answers
        self._number = number
        self._choices = [_Choice() for _ in answers.requests]
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or service.name,
            "system_fingerprint": service.fingerprint,
        }

    def end(self) -> None:
        """Give up what still runs."""
        for choice, request in zip(self._choices, self._answers.requests, strict=True):
            if not choice.is_counted:
                choice.is_counted = True
                self._count(request, "abort", choice)
        self._service.end(self._answers)

    async def complete(self) -> dict[str, Any]:
        """All continuations when they are complete."""
        async for item in self._service.deltas(self._answers):
            if item is not None:
                self._read(*item)
        choices = []
        for index, choice in enumerate(self._choices):
            assert choice.last is not None
            made = self._choice(index, choice.text, choice.logprobs, 0, choice.token_ids)
            made["finish_reason"] = choice.last.finish_reason
            made["stop_reason"] = choice.last.stop_reason
            if self._body.return_token_ids:
                made["prompt_token_ids"] = self._answers.requests[index].prompt
            choices.append(made)
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The continuations as they come."""
        try:
            async for item in self._service.deltas(self._answers):
                if item is None:
                    yield PING
                    continue
                index, delta = item
                start = len(self._choices[index].text)
                self._read(index, delta)
                is_last = delta.finish_reason is not None
                if delta.text or is_last or delta.logprobs or self._body.return_token_ids:
                    made = self._choice(index, delta.text, delta.logprobs, start, delta.token_ids)
                    made["finish_reason"] = delta.finish_reason
                    made["stop_reason"] = delta.stop_reason
                    yield event({**self._head, "choices": [made]})
            options = self._body.stream_options
            if options is not None and options.include_usage:
                yield event({**self._head, "choices": [], "usage": self._usage()})
        except Exception as error:
            told = api_error(error)
            self._service.log_failure(error, told)
            yield event(told.envelope())
            return
        yield DONE

    def _read(self, index: int, delta: Delta) -> None:
        choice = self._choices[index]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs
        choice.last = delta
        if delta.finish_reason is not None:
            choice.is_counted = True
            self._count(self._answers.requests[index], delta.finish_reason, choice)

    def _count(self, request: EngineRequest, reason: str, choice: _Choice) -> None:
        self._service.count_answer(request, "text_completion", reason, len(choice.token_ids))

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprob],
        start: int,
        token_ids: Sequence[int],
    ) -> dict[str, Any]:
        shown: Mapping[str, Any] | None = None
        if self._body.logprobs is not None:
            shown = completion_logprobs(logprobs, self._service.tokenizer, start)
        made: dict[str, Any] = {"index": index, "text": text, "logprobs": shown}
        return {**made, "token_ids": list(token_ids)} if self._body.return_token_ids else made

    def _usage(self) -> dict[str, Any]:
        return self._service.usage(
            self._answers, sum(len(choice.token_ids) for choice in self._choices), 0
        )
