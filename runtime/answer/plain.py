"""Answers of models whose format is not known: all of it is text."""

from inkrt.runtime.answer.parts import Part
from inkrt.runtime.tokenizer import IncrementalDecoder, Tokenizer


class PlainParser:
    """An `AnswerParser` that finds text alone.

    Args:
        tokenizer: of the model.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self.num_reasoning_tokens = self.num_calls = self.num_closed_calls = 0
        self.is_content = True
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)

    def push(self, token: int) -> list[Part]:
        """See `AnswerParser`."""
        return content(self._decoder.push(token))

    def finish(self, *, is_cut: bool) -> list[Part]:  # noqa: ARG002
        """See `AnswerParser`."""
        return content(self._decoder.flush())


def content(text: str) -> list[Part]:
    """The text as a piece of an answer, if there is any."""
    return [Part(content=text)] if text else []
