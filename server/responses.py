"""POST /v1/responses: an answer as items, at once or as they come. Nothing is stored.

A request is the chat that `response_request` makes of it; what comes of it is told in this API's
form. See https://platform.openai.com/docs/api-reference/responses-streaming for its events.
"""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from inkrt.server.chat_answers import ChatAnswers
from inkrt.server.errors import ApiError, api_error
from inkrt.server.event_stream import PING, EventStream, event, unless_gone
from inkrt.server.fields import REFUSED_BY_RESPONSES, check_extra
from inkrt.server.protocol import ResponseRequest
from inkrt.server.response_items import OutputItems
from inkrt.server.response_request import chat_form
from inkrt.server.service import Service

router = APIRouter()


@router.post("/v1/responses")
async def responses(body: ResponseRequest, request: Request) -> Response:
    """Answer a conversation with items."""
    service: Service = request.app.state.service
    form, given = chat_form(body), _given_back(body)
    headers = check_extra(
        form.extra,
        request.state.request_id,
        refused=REFUSED_BY_RESPONSES,
        ignored=form.ignored,
    )
    with form.own_names():
        answers = await ChatAnswers.start(service, form.body)
    response = _Response(service, body.model or service.name, given, answers)
    if body.stream:
        return EventStream(response.events(), answers.end, headers)
    try:
        made = await unless_gone(request, response.complete())
    finally:
        answers.end()
    return JSONResponse(made, headers=headers)


def _given_back(body: ResponseRequest) -> dict[str, Any]:
    """What of a request stands in its response.

    Raises:
        ApiError: JSON in UTF-8 cannot hold it, though Python's can.
    """
    text_format = None if body.text is None else body.text.format
    given = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort},
        "text": {"format": text_format or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
    }
    for name, value in given.items():
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, RecursionError):  # among the first those of UTF-8
            raise ApiError(
                400,
                f"{name} cannot be sent back: it holds half a character, NaN or infinity, or is "
                "too deep",
                param=name,
            ) from None
    return given


class _Response:
    """The answer to one request, as this route sends it."""

    def __init__(
        self, service: Service, model: str, given: Mapping[str, Any], answers: ChatAnswers
    ) -> None:
        self._service = service
        self._answers = answers
        self._items = OutputItems()
        self._num_events = 0
        self._head = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "previous_response_id": None,
            "store": False,
            "temperature": answers.plan.params.temperature,
            "top_p": answers.plan.params.top_p,
            "truncation": "disabled",
            **given,
        }

    async def complete(self) -> dict[str, Any]:
        """The response when it is complete."""
        async for item in self._answers.pieces():
            if item is not None:
                self._items.push(item[1].parts)
        self._items.finish(is_cut=self._is_cut)
        return self._body(self._end)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as it comes."""
        yield self._event({"type": "response.created", "response": self._body("in_progress")})
        yield self._event({"type": "response.in_progress", "response": self._body("in_progress")})
        try:
            async for item in self._answers.pieces():
                if item is None:
                    yield PING
                    continue
                for told in self._items.push(item[1].parts):
                    yield self._event(told)
            for told in self._items.finish(is_cut=self._is_cut):
                yield self._event(told)
            yield self._event({"type": f"response.{self._end}", "response": self._body(self._end)})
        except Exception as error:
            told_error = api_error(error)
            self._service.log_failure(error, told_error)
            failed = self._body("failed", told_error)
            yield self._event({"type": "response.failed", "response": failed})

    @property
    def _is_cut(self) -> bool:
        return self._answers.readers[0].end == "length"

    @property
    def _end(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._is_cut else "completed"

    def _event(self, body: dict[str, Any]) -> bytes:
        number = self._num_events
        self._num_events += 1
        return event({**body, "sequence_number": number}, body["type"])

    def _body(
        self,
        status: Literal["in_progress", "completed", "incomplete", "failed"],
        error: ApiError | None = None,
    ) -> dict[str, Any]:
        """The response as far as it has come."""
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            # The API has a list of codes, of which this is the one for servers.
            "error": error and {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "output": self._items.bodies(),
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._answers.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
