"""Text of an argument to the JSON value that its schema asks for. Source: chat-format B3."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

# By priority: the first that the text can be is taken.
_ORDER = ("null", "integer", "number", "boolean", "object", "array", "string")
_ALIASES = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("float", "double"), "number"),
    "bool": "boolean",
    "dict": "object",
    **dict.fromkeys(("arr", "list", "sequence"), "array"),
}
_MOST_DEPTH = 32  # of anyOf in anyOf
_MISSING = object()


def schema_types(schema: object, depth: int = 0) -> set[str]:
    """The JSON types that a schema allows, by name; "string" alone if it says nothing."""
    found: set[str] = set()
    if isinstance(schema, Mapping) and depth < _MOST_DEPTH:
        kinds = schema.get("type")
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if isinstance(kind, str):
                found.add(_canonical(kind))
        if isinstance(schema.get("enum"), list):
            found.update(_type_of(value) for value in schema["enum"])
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(key), list):
                for item in schema[key]:
                    found |= schema_types(item, depth + 1)
    return found or {"string"}


def coerce(text: str, schema: object) -> Any:
    """The value that the text stands for; the text itself where nothing else fits."""
    types = schema_types(schema)
    for kind in _ORDER:
        if kind in types and (value := _as(text, kind)) is not _MISSING:
            return value
    value = _json(text)
    return text if value is _MISSING else value


def _canonical(kind: str) -> str:
    kind = kind.lower()
    if kind in _ORDER:
        return kind
    if kind.startswith("int"):
        return "integer"
    return _ALIASES.get(kind, "string")


def _type_of(value: object) -> str:
    for kind, types in (
        ("boolean", bool),
        ("integer", int),
        ("number", float),
        ("object", dict),
        ("array", list),
        ("null", type(None)),
    ):
        if isinstance(value, types):
            return kind
    return "string"


def _as(text: str, kind: str) -> Any:
    word = text.strip().lower()
    if kind == "null":
        return None if word == "null" else _MISSING
    if kind == "integer":
        return int(word) if re.fullmatch(r"[+-]?\d{1,4000}", word, re.ASCII) else _MISSING
    if kind == "number":
        return _number(word)
    if kind == "boolean":
        return {"true": True, "1": True, "false": False, "0": False}.get(word, _MISSING)
    if kind == "string":
        return text
    value = _json(text)
    return value if isinstance(value, dict if kind == "object" else list) else _MISSING


def _number(word: str) -> Any:
    try:
        value = float(word)
    except ValueError:
        return _MISSING
    if not math.isfinite(value):
        return _MISSING
    return int(value) if value.is_integer() else value


def _json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return _MISSING
