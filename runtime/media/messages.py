"""Messages whose content is a list of parts: what of them goes through a chat template.

A part is {"type": "text", "text": ...}, {"type": "image", "image": source} or {"type": "audio",
"audio": source}; see `reader.MediaSource`. Templates see the types of images and recordings only.
"""

from collections.abc import Mapping, Sequence

from inkrt.errors import RequestError

PART_TYPES = ("text", "image", "audio")
# Of a request, by the type of a part.
FIELDS = {"image": "images", "audio": "audio"}


def check_parts(parts: Sequence[object], place: str, role: object) -> None:
    """Check the form of a message's parts.

    Raises:
        RequestError: names the part, what it has and what is allowed.
    """
    if not parts:
        raise _error(f"{place} is an empty list, it must be a string or have a part")
    for i, part in enumerate(parts):
        where = f"{place}[{i}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind not in PART_TYPES:
            got = repr(kind) if isinstance(part, Mapping) else f"of type {type(part).__name__}"
            raise _error(f"{where} is {got}, its type must be one of {', '.join(PART_TYPES)}")
        if set(part) != {"type", kind}:
            raise _error(
                f"{where} has the keys {', '.join(map(str, part))}; it must have type and {kind}"
            )
        if kind == "text" and not isinstance(part["text"], str):
            raise _error(f"{where}.text is of type {type(part['text']).__name__}, not a string")
        if kind != "text" and role != "user":
            raise _error(f"{where} is of type {kind}, which only messages of a user can have")


def media_of(messages: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """Images and recordings of checked messages by the fields of a request, in order."""
    found: dict[str, list[object]] = {field: [] for field in FIELDS.values()}
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            if part["type"] in FIELDS:
                found[FIELDS[part["type"]]].append(part[part["type"]])
    return {field: values for field, values in found.items() if values}


def for_template(content: Sequence[Mapping[str, object]]) -> list[dict[str, str]]:
    """Parts as templates see them, without what images and recordings hold."""
    return [
        {key: str(value) for key, value in part.items() if key in ("type", "text")}
        for part in content
    ]


def _error(message: str) -> RequestError:
    return RequestError(message, param="messages")
