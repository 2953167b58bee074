"""What of tools goes through a chat template: declarations, calls in earlier answers, results.

A declaration is {"type": "function", "function": {"name": ..., "description": ..., "parameters":
...}}; a call {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}, whose
arguments are JSON text of an object or that object. Templates write both as JSON or in a markup of
theirs, so their strings cannot be kept apart as texts of messages are: they must not contain
special tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from inkrt.errors import RequestError
from inkrt.runtime.tokenizer import Tokenizer


def check_calls(calls: object, place: str) -> None:
    """Check the form of a message's tool calls.

    Raises:
        RequestError: names the call, what it has and what is allowed.
    """
    if not isinstance(calls, list | tuple):
        raise _error(place, calls, "a list of calls", "messages")
    for i, call in enumerate(calls):
        where = f"{place}[{i}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise _error(where, call, 'an object with "function"', "messages")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise _error(f"{where}.function.name", function.get("name"), "a name", "messages")
        _arguments(function.get("arguments"), f"{where}.function.arguments")
        if not isinstance(call.get("id", ""), str):
            raise _error(f"{where}.id", call["id"], "a string", "messages")


def check_tools(tools: object) -> None:
    """Check the form of declarations.

    Raises:
        RequestError: names the tool, what it has and what is allowed.
    """
    if not isinstance(tools, list | tuple):
        raise _error("tools", tools, "a list of functions", "tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, Mapping) else tool
            raise _error(f"tools[{i}].type", kind, '"function"', "tools")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise _error(f"tools[{i}].function", function, 'an object with "name"', "tools")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise _error(f"tools[{i}].function.name", function.get("name"), "a name", "tools")
        if not isinstance(function.get("parameters") or {}, Mapping):
            got = function["parameters"]
            raise _error(f"tools[{i}].function.parameters", got, "a JSON schema", "tools")


def plain_calls(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked calls as templates see them: arguments are objects."""
    plain = []
    for call in calls:
        function = call["function"]
        arguments = _arguments(function.get("arguments"), "arguments")
        made: dict[str, Any] = {
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        }
        plain.append({"id": call["id"], **made} if "id" in call else made)
    return plain


def refuse_special(value: object, tokenizer: Tokenizer, place: str, param: str) -> None:
    """Check that no string in a JSON value contains the text of a special token.

    Raises:
        RequestError: one does.
    """
    for text in _strings(value):
        if any(isinstance(part, int) for part in tokenizer.split_special(text)):
            raise RequestError(
                f"{place} contains a special token, in {text[:100]!r}; leave it out", param=param
            )


def _strings(value: object) -> Iterator[str]:
    pending = [value]  # a schema may be nested deeper than Python calls may be
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            pending += item


def _arguments(value: object, place: str) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise _error(place, value, "JSON text of an object", "messages") from None
    if not isinstance(value, Mapping):
        raise _error(place, value, "an object, or JSON text of one", "messages")
    return dict(value)


def _error(place: str, value: object, allowed: str, param: str) -> RequestError:
    got = repr(value[:100]) if isinstance(value, str) else f"of type {type(value).__name__}"
    return RequestError(f"{place} is {got}, it must be {allowed}", param=param)
