"""Fields that say what an answer must be made of, as a grammar."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inkrt.errors import RequestError
from inkrt.runtime.grammar import Grammar, GrammarPlace
from inkrt.server.errors import ApiError
from inkrt.server.protocol import ChatRequest, GenerationRequest

_KINDS = ("json", "regex", "grammar", "choice")


def grammar_of(
    body: GenerationRequest, place: GrammarPlace, tools: Sequence[Mapping[str, Any]] | None = None
) -> Grammar | None:
    """The grammar that a request asks for; None if it asks for none.

    Args:
        body: of the request.
        place: of the answer's text.
        tools: declarations, one of which must be called; None if none must.

    Raises:
        ApiError: a field is not as it must be, or several ask for one.
        RequestError: the grammar cannot be written; see `by_own_names`.
    """
    made: list[Grammar | None] = []
    if body.structured_outputs is not None:
        made.append(_structured(body.structured_outputs, place))
    if isinstance(body, ChatRequest) and body.response_format is not None:
        made.append(_response_format(body.response_format, place))
    if tools is not None:
        made.append(Grammar.of_schema(_calls(tools), "call"))
    found = [grammar for grammar in made if grammar is not None]
    if len(found) > 1:
        raise ApiError(
            400,
            "only one of response_format, structured_outputs and a required tool_choice can say "
            "what the answer is made of",
            param="structured_outputs" if body.structured_outputs else "response_format",
        )
    return found[0] if found else None


@contextlib.contextmanager
def by_own_names(body: GenerationRequest) -> Iterator[None]:
    """Errors about a grammar name the field that asks for it."""
    try:
        yield
    except RequestError as error:
        if error.param != "grammar":
            raise
        name = "tools"
        if body.structured_outputs is not None:
            name = "structured_outputs"
        elif isinstance(body, ChatRequest) and body.response_format is not None:
            name = "response_format"
        raise RequestError(str(error).replace("grammar", name, 1), param=name) from None


def _response_format(given: Mapping[str, Any], place: GrammarPlace) -> Grammar | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.of_schema({"type": "object"}, place)
    if kind != "json_schema":
        raise _error("response_format.type", "must be text, json_object or json_schema")
    held = given.get("json_schema")
    schema = held.get("schema") if isinstance(held, Mapping) else None
    if not isinstance(schema, Mapping):
        raise _error("response_format.json_schema.schema", "must be a JSON schema")
    return Grammar.of_schema(schema, place)


def _structured(given: Mapping[str, Any], place: GrammarPlace) -> Grammar:
    asked = {key: value for key, value in given.items() if value is not None}
    if len(asked) != 1 or not asked.keys() <= set(_KINDS):
        raise _error("structured_outputs", f"must have one of {', '.join(_KINDS)}")
    ((kind, value),) = asked.items()
    name = f"structured_outputs.{kind}"
    if kind == "json":
        if not isinstance(value, Mapping):
            raise _error(name, "must be a JSON schema")
        return Grammar.of_schema(value, place)
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise _error(name, "must be a list of texts")
        return Grammar.of_choice(value, place)
    if not isinstance(value, str):
        raise _error(name, "must be a text")
    return Grammar.of_regex(value, place) if kind == "regex" else Grammar.of_lark(value, place)


def _calls(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A schema of the JSON of one call, in the order of the Inkling family's format."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "args": tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", "args"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return {"anyOf": calls}


def _error(name: str, what: str) -> ApiError:
    return ApiError(400, f"{name} {what}", param=name)
