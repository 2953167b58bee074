"""Reads `NAME<arg_key>K</arg_key><arg_value>V</arg_value>...` as it comes. Source: chat-format B3.

Pairs become the JSON text of an object. A value that can only be a string is passed on while it is
still open; any other when it is closed and its type is known.
"""

import json
from collections.abc import Mapping
from typing import Any

from inkrt.runtime.answer.coerce import coerce, schema_types
from inkrt.runtime.answer.parts import CallDelta

_KEY, _END_KEY = "<arg_key>", "</arg_key>"
_VALUE, _END_VALUE = "<arg_value>", "</arg_value>"
# What ends each stage, and the stage behind it.
_NEXT = {
    "name": (_KEY, "key"),
    "key": (_END_KEY, "gap"),
    "gap": (_VALUE, "value"),
    "value": (_END_VALUE, "between"),
    "between": (_KEY, "key"),
}


class MarkupScanner:
    """One tool call.

    Args:
        index: number of the call in the answer.
        tools: schemas of parameters by the names of functions; a call of another is dropped. None
            if none are known: every name is taken, and all values are strings.

    Attributes:
        is_begun: whether the first piece has come.
        is_broken: whether it calls what is not among the tools.
    """

    def __init__(self, index: int, tools: Mapping[str, Mapping[str, Any]] | None) -> None:
        self.is_begun = False
        self.is_broken = False
        self._index = index
        self._tools = tools
        self._stage = "name"
        self._text = ""  # of the stage
        self._name: str | None = None
        self._properties: Mapping[str, Any] = {}
        self._key = ""
        self._num_pairs = 0
        self._streams_value = False
        self._ready = ""

    def push(self, text: str) -> CallDelta | None:
        """Take more text; return what can be passed on."""
        self._text += text
        while not self.is_broken:
            tag, following = _NEXT[self._stage]
            before, found, after = self._text.partition(tag)
            if not found:
                break
            self._text = before
            self._end_stage()
            self._stage, self._text = following, after
        if self._stage == "value" and self._streams_value:
            cut = len(self._text) - _num_possible(self._text, _END_VALUE)
            self._ready += _escaped(self._text[:cut])
            self._text = self._text[cut:]
        return self._give()

    def finish(self) -> CallDelta | None:
        """End of the text: an open value is closed as it is."""
        if self._stage in ("name", "value"):
            self._end_stage()
        if not self.is_broken:
            self._ready += "}" if self._num_pairs else "{}"
        return self._give()

    def _end_stage(self) -> None:
        """The text of the stage is complete."""
        if self._stage == "name":
            self._name = self._text.strip()
            if not self._name or (self._tools is not None and self._name not in self._tools):
                self.is_broken = True
            elif self._tools is not None:
                properties = self._tools[self._name].get("properties")
                self._properties = properties if isinstance(properties, Mapping) else {}
        elif self._stage == "key":
            self._key = self._text.strip()
        elif self._stage == "gap":
            self._begin_pair()
        elif self._stage == "value" and self._streams_value:
            self._ready += f'{_escaped(self._text)}"'
        elif self._stage == "value":
            value = coerce(self._text, self._properties.get(self._key))
            self._ready += json.dumps(value, ensure_ascii=False)

    def _begin_pair(self) -> None:
        self._ready += ", " if self._num_pairs else "{"
        self._ready += f'"{_escaped(self._key)}": '
        self._num_pairs += 1
        self._streams_value = schema_types(self._properties.get(self._key)) == {"string"}
        if self._streams_value:
            self._ready += '"'

    def _give(self) -> CallDelta | None:
        if self.is_broken or self._name is None or not self._ready:
            return None
        name = None if self.is_begun else self._name
        self.is_begun = True
        ready, self._ready = self._ready, ""
        return CallDelta(self._index, name, ready)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _num_possible(text: str, tag: str) -> int:
    """Length of the longest end of `text` with which the tag begins."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if tag.startswith(text[-n:])), 0)
