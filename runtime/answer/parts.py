"""What a piece of an answer holds, and what all parsers of answers share."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call.

    Attributes:
        index: number of the call in the answer.
        name: of the function, in the first piece of a call; None in the others.
        arguments: more of the JSON text of its arguments.
    """

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer: one of its attributes is set.

    Attributes:
        reasoning: more of what the model thinks.
        content: more of what it says.
        call: more of a tool call.
    """

    reasoning: str = ""
    content: str = ""
    call: CallDelta | None = None


class AnswerParser(Protocol):
    """Reads an answer token by token.

    Attributes:
        num_reasoning_tokens: tokens of reasoning so far, without markers.
        num_calls: tool calls that have begun.
        num_closed_calls: of these, those that have ended.
        is_content: whether the last token was one of the text that the model says.
    """

    num_reasoning_tokens: int
    num_calls: int
    num_closed_calls: int
    is_content: bool

    def push(self, token: int) -> list[Part]:
        """Take the next token; return what is certain now, in order."""
        ...

    def finish(self, *, is_cut: bool) -> list[Part]:
        """End of the tokens: return what was held back.

        Args:
            is_cut: whether it was a limit of length, not the model.
        """
        ...


class EndSpace:
    """Text whose white space at the end is held back until more text comes."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """Take more text; return all but white space at the end."""
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        return kept

    def drop(self) -> None:
        """Forget the white space."""
        self._held = ""


class FrontSpace:
    """Text that is held back while it is white space alone."""

    def __init__(self) -> None:
        self._held = ""
        self._has_text = False

    def push(self, text: str) -> str:
        """Take more text; return it with what was held back, once it is not all white space."""
        if self._has_text:
            return text
        self._held += text
        if not self._held.strip():
            return ""
        self._has_text = True
        return self.flush()

    def flush(self) -> str:
        """Return what was held back."""
        text, self._held = self._held, ""
        return text

    def drop(self) -> None:
        """Forget what was held back: a tool call follows."""
        self._held = ""
