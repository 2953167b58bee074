"""A body of /v1/responses as the request for a chat that it comes to, and names for its errors."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from inkrt.errors import RequestError
from inkrt.server.errors import ApiError, api_error, unsupported
from inkrt.server.protocol import ChatRequest, ResponseRequest, SamplingFields
from inkrt.server.response_input import Conversation

# What a chat calls it, and what it is called here.
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}
_TOOL_KEYS = ("name", "description", "parameters", "strict")
_FORMAT_KEYS = ("name", "description", "schema", "strict")
_ENCRYPTED = "reasoning.encrypted_content"


@dataclass(frozen=True, slots=True)
class ChatForm:
    """A request for a response as one for a chat.

    Attributes:
        body: of the chat.
        ignored: names of what cannot be honoured and changes no answer's meaning.
        extra: fields beyond those that are known, with those of `text` and `reasoning`.
        names: what the chat calls it, and what the client calls it.
    """

    body: ChatRequest
    ignored: list[str]
    extra: dict[str, Any]
    names: Mapping[str, str]

    @contextlib.contextmanager
    def own_names(self) -> Iterator[None]:
        """Errors about the chat name what the client has sent.

        Raises:
            ApiError: instead of a RequestError, too.
        """
        try:
            yield
        except (ApiError, RequestError) as error:
            told = api_error(error)
            raise ApiError(
                told.status,
                _renamed(told.message, self.names),
                kind=told.kind,
                code=told.code,
                param=None if told.param is None else _renamed(told.param, self.names),
                retry_after_s=told.retry_after_s,
            ) from error


def chat_form(body: ResponseRequest) -> ChatForm:
    """Translate a request.

    Raises:
        ApiError: something is not as it must be, or is not supported.
    """
    conversation = Conversation.read(body.input, body.instructions)
    tools, ignored = _tools(body.tools)
    names = {**_NAMES, **conversation.places}
    names |= {f"tools[{i}].function": f"tools[{i}]" for i in range(len(tools or ()))}
    text_format = None if body.text is None else body.text.format
    if text_format is not None and text_format.get("type") == "json_schema":
        held = {key: text_format[key] for key in _FORMAT_KEYS if key in text_format}
        text_format = {"type": "json_schema", "json_schema": held}
    tool_choice = _tool_choice(body.tool_choice)
    must_call = isinstance(tool_choice, dict) or tool_choice == "required"
    if must_call and text_format not in (None, {"type": "text"}):
        raise ApiError(400, "text.format has no use if a tool must be called", param="text.format")
    chat = ChatRequest(
        **{name: getattr(body, name) for name in SamplingFields.model_fields},
        messages=conversation.messages,
        max_completion_tokens=body.max_output_tokens,
        tools=tools,
        tool_choice=tool_choice if tools or tool_choice != "auto" else None,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=text_format,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    ignored += conversation.ignored
    for value in body.include or ():
        if value != _ENCRYPTED:
            raise unsupported("include", f"only {_ENCRYPTED} is known, which reasoning is not here")
        ignored.append(f"include.{value}")
    return ChatForm(chat, ignored, _extra(body), names)


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """The text with the client's name at its beginning."""
    found = [
        name for name in names if text.startswith(name) and not re.match(r"\w", text[len(name) :])
    ]
    if not found:
        return text
    longest = max(found, key=len)
    return names[longest] + text[len(longest) :]


def _extra(body: ResponseRequest) -> dict[str, Any]:
    """Fields beyond the models, those of inner objects by their whole names."""
    extra = dict(body.model_extra or {})
    if isinstance(options := extra.get("stream_options"), dict):
        del extra["stream_options"]
        extra |= {f"stream_options.{name}": value for name, value in options.items()}
    for name, inner in (("text", body.text), ("reasoning", body.reasoning)):
        if inner is not None:
            extra |= {f"{name}.{key}": value for key, value in (inner.model_extra or {}).items()}
    return extra


def _tools(given: list[dict[str, Any]] | None) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """Declarations as a chat has them, and names of what is left out of them."""
    if given is None:
        return None, []
    tools, ignored = [], []
    for i, tool in enumerate(given):
        if tool.get("type") != "function":
            raise unsupported(f"tools[{i}].type", "it must be function; no tools are built in")
        function = {}
        for key, value in tool.items():
            if key in _TOOL_KEYS and value is not None:
                function[key] = value
            elif key != "type" and value is not None:
                ignored.append(f"tools[{i}].{key}")
        tools.append({"type": "function", "function": function})
    return tools, ignored


def _tool_choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function":
        raise unsupported("tool_choice.type", "it must be function")
    return {"type": "function", "function": {"name": given.get("name")}}
