"""Items of a response: reasoning, messages, calls of functions; and the events that tell of them.

Events are without `sequence_number`, which whoever sends them counts.
"""

import itertools
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from inkrt.runtime.answer.parts import Part

Event: TypeAlias = dict[str, Any]
Kind = Literal["reasoning", "message", "function_call"]
_PREFIX: dict[Kind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
# What the events about its text are called.
_TEXT: dict[Kind, str] = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


class OutputItems:
    """The items of one answer, in the order in which the model made them."""

    def __init__(self) -> None:
        self._items: list[_Item] = []

    def push(self, parts: Sequence[Part]) -> list[Event]:
        """Take more of the answer; return what is to be told of it.

        What a step adds to one item is one event.
        """
        events: list[Event] = []
        for (kind, _), group in itertools.groupby(parts, _kind_and_call):
            run = list(group)
            call = run[0].call
            is_new = not self._items or self._items[-1].kind != kind
            if is_new or (call is not None and call.name is not None):
                events += self._close("completed")
                name = call.name if call is not None else None
                self._items.append(_Item(kind, len(self._items), name))
                events += self._items[-1].opened()
            if text := _text(run):
                events.append(self._items[-1].push(text))
        return events

    def finish(self, *, is_cut: bool) -> list[Event]:
        """The answer has ended; return what is to be told of that.

        Args:
            is_cut: whether it was a limit of length, not the model.
        """
        return self._close("incomplete" if is_cut else "completed")

    def bodies(self) -> list[dict[str, Any]]:
        """All items as far as they have come."""
        return [item.body() for item in self._items]

    def _close(self, status: Literal["completed", "incomplete"]) -> list[Event]:
        """End the last item, if there is one."""
        if not self._items:
            return []
        self._items[-1].status = status
        return self._items[-1].closed()


@dataclass(slots=True)
class _Item:
    """One item.

    Attributes:
        kind: of it.
        number: in the answer.
        name: of the function, if it is a call.
        text: what was thought or said, or the JSON text of the arguments.
    """

    kind: Kind
    number: int
    name: str | None
    text: str = ""
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    _id: str = field(default_factory=lambda: secrets.token_hex(12))

    def body(self) -> dict[str, Any]:
        """The item."""
        made = {"id": self._item_id, "type": self.kind, "status": self.status}
        if self.kind == "function_call":
            call = {"call_id": f"call_{self._id}", "name": self.name, "arguments": self.text}
            return {**made, **call}
        content = [self._part()] if self.text else []
        if self.kind == "reasoning":
            return {**made, "summary": [], "content": content}
        return {**made, "role": "assistant", "content": content}

    def opened(self) -> list[Event]:
        """The events of its beginning."""
        added = self._event("response.output_item.added", item=self.body())
        if self.kind == "function_call":
            return [added]
        return [added, self._part_event("response.content_part.added")]

    def push(self, text: str) -> Event:
        """Take more text; the event that tells it."""
        self.text += text
        return self._text_event("delta", text)

    def closed(self) -> list[Event]:
        """The events of its end."""
        done = self._event("response.output_item.done", item=self.body())
        if self.kind == "function_call":
            return [self._text_event("done", self.text), done]
        part_done = self._part_event("response.content_part.done")
        return [self._text_event("done", self.text), part_done, done]

    @property
    def _item_id(self) -> str:
        return f"{_PREFIX[self.kind]}_{self._id}"

    def _part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def _part_event(self, name: str) -> Event:
        place = {"item_id": self._item_id, "content_index": 0}
        return self._event(name, **place, part=self._part())

    def _text_event(self, what: Literal["delta", "done"], text: str) -> Event:
        fields: Event = {"item_id": self._item_id}
        if self.kind != "function_call":
            fields["content_index"] = 0
        if self.kind == "message":
            fields["logprobs"] = []
        whole = "arguments" if self.kind == "function_call" else "text"
        fields["delta" if what == "delta" else whole] = text
        return self._event(f"{_TEXT[self.kind]}.{what}", **fields)

    def _event(self, name: str, **fields: Any) -> Event:
        return {"type": name, "output_index": self.number, **fields}


def _kind_and_call(part: Part) -> tuple[Kind, int]:
    if part.call is not None:
        return "function_call", part.call.index
    return ("reasoning" if part.reasoning else "message"), -1


def _text(parts: Iterable[Part]) -> str:
    """What parts of one item add to its text."""
    return "".join(
        part.reasoning or part.content if part.call is None else part.call.arguments
        for part in parts
    )
