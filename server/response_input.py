"""Items of a request for a response as the messages of a chat.

Reasoning, a message and calls that follow each other are one answer of the model, as chat templates
know it. What is said of a message in an error is said of the item that it came from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from inkrt.server.errors import ApiError, unsupported
from inkrt.server.fields import STATELESS

_KEYS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content",),
}
_OF_ANSWERS = ("type", "id", "status")  # what items of answers have, of no use to a model
_NOT_HONOURED = ("encrypted_content", "phase", "summary")
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")


@dataclass(slots=True)
class Conversation:
    """The messages of a request.

    Attributes:
        messages: of a chat.
        places: names of parts of them, and what a client calls these parts.
        ignored: what no message can hold, by the client's names.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    _thought: tuple[str, str] | None = None  # text and place of what belongs to the next answer
    _can_call: bool = False  # whether a call belongs to the last message

    @classmethod
    def read(cls, given: str | Sequence[Mapping[str, Any]], instructions: str | None) -> Self:
        """The conversation that the fields `input` and `instructions` hold.

        Raises:
            ApiError: an item is not as it must be; names it.
        """
        made = cls()
        if instructions is not None:
            made._say({"role": "system", "content": instructions}, "instructions", "")
        if isinstance(given, str):
            made._say({"role": "user", "content": given}, "input", "")
        else:
            for i, item in enumerate(given):
                made._add(item, f"input[{i}]")
        made._drop_thought()
        return made

    def _add(self, item: Mapping[str, Any], place: str) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "item_reference":
            raise unsupported(place, STATELESS)
        if not isinstance(kind, str) or kind not in _KEYS:
            raise _error(f"{place}.type", f"must be one of {', '.join(_KEYS)}")
        for key, value in item.items():
            if key in _NOT_HONOURED:
                if value:
                    self.ignored.append(f"{place}.{key}")
            elif value is not None and key not in _KEYS[kind] and key not in _OF_ANSWERS:
                shown = ", ".join((*_KEYS[kind], *_OF_ANSWERS))
                raise _error(place, f"has the key {key[:50]!r}; supported are {shown}")
        if kind == "reasoning":
            self._drop_thought()
            if text := _thought(item.get("content"), f"{place}.content"):
                self._thought = text, place
        elif kind == "function_call":
            self._add_call(item, place)
        elif kind == "function_call_output":
            output = self._content(item.get("output"), f"{place}.output")
            message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            self.places[f"messages[{len(self.messages)}].tool_call_id"] = f"{place}.call_id"
            self._say(message, place, ".output")
        elif item.get("role") not in _ROLES:
            raise _error(f"{place}.role", f"must be one of {', '.join(_ROLES)}")
        else:
            content = self._content(item.get("content"), f"{place}.content")
            self._say({"role": item["role"], "content": content}, place, ".content")

    def _say(self, message: dict[str, Any], place: str, content: str) -> None:
        """Add a message, whose content the item calls by another name."""
        is_answer = message["role"] == "assistant"
        here = f"messages[{len(self.messages)}]"
        if not is_answer:
            self._drop_thought()
        elif self._thought is not None:
            message["reasoning_content"], thought_place = self._thought
            self.places[f"{here}.reasoning_content"] = f"{thought_place}.content"
            self._thought = None
        self.places |= {here: place, f"{here}.content": f"{place}{content}"}
        self.messages.append(message)
        self._can_call = is_answer

    def _add_call(self, item: Mapping[str, Any], place: str) -> None:
        if self._thought is not None or not self._can_call:
            self._say({"role": "assistant", "content": None}, place, "")
        calls = self.messages[-1].setdefault("tool_calls", [])
        here = f"messages[{len(self.messages) - 1}].tool_calls"
        self.places |= {
            f"{here}[{len(calls)}]": place,
            f"{here}[{len(calls)}].id": f"{place}.call_id",
            f"{here}[{len(calls)}].function": place,
        }
        self.places.setdefault(here, place)
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        calls.append({"id": item.get("call_id"), "type": "function", "function": function})

    def _content(self, given: object, place: str) -> object:
        """Text, or parts; what is neither is left to the checks of messages."""
        if not isinstance(given, list):
            return given
        here = f"messages[{len(self.messages)}].content"
        return [self._part(part, f"{place}[{i}]", f"{here}[{i}]") for i, part in enumerate(given)]

    def _part(self, part: object, place: str, here: str) -> dict[str, Any]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or not isinstance(kind, str):
            raise _error(place, "must be an object with a type")
        if kind in _TEXT_PARTS:
            return {"type": "text", "text": part.get("text")}
        if kind == "input_audio":
            return {"type": "input_audio", "input_audio": part.get("input_audio")}
        if kind != "input_image":
            raise _error(f"{place}.type", "must be one of input_text, input_image, input_audio")
        if part.get("file_id") is not None:
            raise unsupported(f"{place}.file_id", "send the image as a data: URL in image_url")
        self.places |= {
            f"{here}.image_url.url": f"{place}.image_url",
            f"{here}.image_url.detail": f"{place}.detail",
        }
        image = {"url": part.get("image_url"), "detail": part.get("detail")}
        return {"type": "image_url", "image_url": image}

    def _drop_thought(self) -> None:
        """Reasoning that no answer follows has no place in a chat."""
        if self._thought is not None:
            self.ignored.append(self._thought[1])
            self._thought = None


def _thought(content: object, place: str) -> str:
    """The text of reasoning."""
    parts = [] if content is None else content
    texts = []
    for part in parts if isinstance(parts, list) else [parts]:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise _error(place, "must be a list of parts with text")
        texts.append(text)
    return "".join(texts)


def _error(place: str, what: str) -> ApiError:
    return ApiError(400, f"{place} {what}", param=place)
