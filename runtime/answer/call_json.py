"""Reads `{"name": "f", "args": {...}}` as it comes, character by character.

The arguments are passed on as they are written, to the character; the name is decoded. Source: the
message format of the Inkling family, chat-format A2 and A6.
"""

import json

from inkrt.runtime.answer.parts import CallDelta

_NAME = "name"
_ARGUMENTS = ("args", "arguments", "parameters")


class CallScanner:
    """One tool call.

    Its first piece comes when the name is known and the arguments have begun or the text has ended,
    so that a call with arguments that are no object never begins. What is no such text gives
    nothing.

    Args:
        index: number of the call in the answer.

    Attributes:
        is_begun: whether the first piece has come.
        is_broken: whether it is no call that can be passed on.
    """

    def __init__(self, index: int) -> None:
        self.is_begun = False
        self.is_broken = False
        self._index = index
        self._name: str | None = None
        self._depth = 0  # of braces and brackets around the next character
        self._in_string = self._is_escaped = False
        self._token = ""  # the top-level string or literal that is being read
        self._key: str | None = None  # of the top-level value that comes next or is being read
        self._in_arguments = self._has_arguments = False
        self._is_value = False  # whether a value comes next at the top level, not a key
        self._ready = ""  # of the arguments, not passed on yet

    def push(self, text: str) -> CallDelta | None:
        """Take more text; return what can be passed on."""
        for character in text:
            if self.is_broken:
                break
            self._take(character)
        if self.is_broken and not self.is_begun:
            return None
        return self._give()

    def finish(self) -> CallDelta | None:
        """End of the text; a whole call without arguments has the empty object for them."""
        if self.is_begun or self.is_broken:
            return None
        if self._name is None or self._depth > 0:
            self.is_broken = True
            return None
        if not self._has_arguments:
            self._has_arguments = True
            self._ready = "{}"
        return self._give()

    def _give(self) -> CallDelta | None:
        if self._name is None or not self._has_arguments or not self._ready:
            return None
        name = None if self.is_begun else self._name
        self.is_begun = True
        ready, self._ready = self._ready, ""
        return CallDelta(self._index, name, ready)

    def _take(self, character: str) -> None:
        if self._in_arguments:
            self._ready += character
        if self._in_string:
            self._take_in_string(character)
        elif character == '"':
            self._in_string = True
            self._token = character
            if self._depth == 1 and self._is_value and self._key in _ARGUMENTS:
                self.is_broken = True  # a string, where an object must be
        elif character in "{[":
            self._open(character)
        elif character in "}]":
            self._close()
        elif self._depth == 1:
            self._take_at_top(character)
        elif self._depth == 0 and not character.isspace():
            self.is_broken = True

    def _take_in_string(self, character: str) -> None:
        if self._depth == 1:
            self._token += character
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = False
            if self._depth == 1:
                self._end_string()

    def _end_string(self) -> None:
        """A top-level string has ended: a key, or the value of one."""
        try:
            text = json.loads(self._token, strict=False)
        except ValueError:
            self.is_broken = True
            return
        if not self._is_value:
            self._key = text
        elif self._key == _NAME and self._name is None:
            self._name = text

    def _open(self, character: str) -> None:
        if self._depth == 0 and (character != "{" or self._key is not None):
            self.is_broken = True
        if self._depth == 1 and self._is_value and self._key in _ARGUMENTS:
            if character != "{" or self._has_arguments:
                self.is_broken = True
                return
            self._in_arguments = self._has_arguments = True
            self._ready = character
        self._depth += 1

    def _close(self) -> None:
        self._depth -= 1
        if self._depth == 1:
            self._in_arguments = False
        elif self._depth < 0:
            self.is_broken = True

    def _take_at_top(self, character: str) -> None:
        if character == ":":
            self._is_value = True
        elif character == ",":
            self._is_value = False
        elif not character.isspace() and self._is_value and self._key in _ARGUMENTS:
            self.is_broken = True  # a number, true, null
