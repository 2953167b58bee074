"""Messages of the API as the runtime's chat templates take them.

Images and recordings come within the request, in base64. Addresses are refused: the server reads no
files and opens no connections for its clients.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from inkrt.server.errors import ApiError

# Fields of answers that clients send back as they got them, of no use to a model.
_OF_ANSWERS = ("annotations", "audio", "function_call", "refusal", "token_ids")
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
_PART_KEYS = {"text": "text", "image_url": "image_url", "input_audio": "input_audio"}


def runtime_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages; their form is checked further by the chat template.

    Raises:
        ApiError: a message has what is not supported; names it.
    """
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in message.items():
        if key in _OF_ANSWERS:
            if value:
                raise _error(f"{place}.{key}", "is not supported; leave it out")
        elif key not in _KEYS:
            shown = ", ".join(_KEYS)
            raise _error(place, f"has the key {key[:50]!r}; supported are {shown}")
        elif key == "content" and isinstance(value, list):
            made[key] = [_part(part, f"{place}.content[{i}]") for i, part in enumerate(value)]
        elif key == "tool_calls" and not value:
            continue
        elif key == "reasoning":
            if value is not None and message.get("reasoning_content") is None:
                made["reasoning_content"] = value
        elif value is not None or key == "content":
            made[key] = value
    return made


def _part(part: object, place: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in _PART_KEYS:
        shown = ", ".join(_PART_KEYS)
        raise _error(f"{place}.type", f"must be one of {shown}")
    value = part.get(_PART_KEYS[kind])
    if kind == "text":
        return {"type": "text", "text": value}
    if not isinstance(value, Mapping):
        raise _error(f"{place}.{kind}", "must be an object")
    if kind == "image_url":
        return {"type": "image", "image": _image(value, f"{place}.image_url")}
    return {"type": "audio", "audio": _decode(value.get("data"), f"{place}.input_audio.data")}


def _image(value: Mapping[str, Any], place: str) -> bytes:
    if value.get("detail") not in (None, "auto"):
        raise _error(f"{place}.detail", "must be auto: the model's own size is taken")
    url = value.get("url")
    if not isinstance(url, str):
        raise _error(f"{place}.url", "must be a string")
    head, comma, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise _error(
            f"{place}.url",
            "must be data:image/...;base64,...; this server opens no other addresses",
        )
    return _decode(data, f"{place}.url")


def _decode(data: object, place: str) -> bytes:
    if not isinstance(data, str):
        raise _error(place, "must be base64 text")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise _error(place, "must be base64") from None


def _error(place: str, what: str) -> ApiError:
    return ApiError(400, f"{place} {what}", param=place)
