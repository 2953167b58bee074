"""Answers in the markup of GLM-4.7, which Flint speaks: `<think>` and `<tool_call>` tokens.

    reasoning </think> text <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>

The four markers are token ids; the tags within a call are text. Source: chat-format B2 and B3.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from inkrt.runtime.answer.call_markup import MarkupScanner
from inkrt.runtime.answer.parts import EndSpace, FrontSpace, Part
from inkrt.runtime.tokenizer import IncrementalDecoder, Tokenizer

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
MARKERS = (THINK, END_THINK, CALL, END_CALL)
# They begin a turn of a prompt.
TURNS = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

_State = Literal["content", "reasoning", "call"]
_log = logging.getLogger("inkrt")


class GlmParser:
    """An `AnswerParser` for the markup of GLM-4.7.

    Reasoning loses white space at its end, and text before a tool call that is white space alone is
    dropped. A call of what is not among the tools is dropped, with a warning.

    Args:
        tokenizer: of the model.
        prompt: token ids; the answer begins with reasoning if its last turn has an open `<think>`.
        tools: schemas of parameters by the names of functions; None if the request has no tools:
            calls are dropped then.
        skip_special_tokens: leave special tokens that are no markers out of the text too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        self.num_reasoning_tokens = self.num_calls = self.num_closed_calls = 0
        self.is_content = False
        self._tokenizer = tokenizer
        self._tools = tools
        self._skip_special_tokens = skip_special_tokens
        ids = tokenizer.special_ids
        self._markers = {ids[name]: name for name in MARKERS}
        self._state: _State = first_block(prompt, ids)
        self._decoder = self._new_decoder()
        self._reasoning, self._content = EndSpace(), FrontSpace()
        self._scanner: MarkupScanner | None = None

    def push(self, token: int) -> list[Part]:
        """See `AnswerParser`."""
        self.is_content = False
        marker = self._markers.get(token)
        if marker is None:
            self.is_content = self._state == "content"
            self.num_reasoning_tokens += self._state == "reasoning"
            return self._take(self._decoder.push(token))
        is_noise = marker == END_CALL if self._state != "call" else marker in (THINK, END_THINK)
        if is_noise or (self._state == "reasoning" and marker == THINK):
            return []
        parts = self._take(self._decoder.flush()) + self._leave()
        self._state = {THINK: "reasoning", CALL: "call"}.get(marker, "content")  # type: ignore[assignment]
        self._decoder = self._new_decoder()
        if marker == CALL:
            self._content.drop()
            self._scanner = MarkupScanner(self.num_calls, self._tools or {})
        return parts

    def finish(self, *, is_cut: bool) -> list[Part]:  # noqa: ARG002
        """See `AnswerParser`."""
        parts = self._take(self._decoder.flush()) + self._leave()
        self._state = "content"
        text = self._content.flush()
        return [*parts, Part(content=text)] if text else parts

    def _leave(self) -> list[Part]:
        """What the end of a block gives."""
        if self._state == "reasoning":
            self._reasoning.drop()
        if self._state != "call":
            return []
        assert self._scanner is not None
        was_begun = self._scanner.is_begun
        delta = self._scanner.finish()
        if not self._scanner.is_begun:
            _log.warning("the model called what is not among the request's tools; dropped")
            return []
        self.num_calls += not was_begun
        self.num_closed_calls = self.num_calls
        return [] if delta is None else [Part(call=delta)]

    def _take(self, text: str) -> list[Part]:
        if not text:
            return []
        if self._state == "call":
            assert self._scanner is not None
            was_begun = self._scanner.is_begun
            delta = self._scanner.push(text)
            if delta is None:
                return []
            self.num_calls += not was_begun
            return [Part(call=delta)]
        if self._state == "reasoning":
            kept = self._reasoning.push(text)
            return [Part(reasoning=kept)] if kept else []
        shown = self._content.push(text)
        return [Part(content=shown)] if shown else []

    def _new_decoder(self) -> IncrementalDecoder:
        # The tags within a call may be added tokens of their own.
        skip = self._skip_special_tokens and self._state != "call"
        return IncrementalDecoder(self._tokenizer, skip_special_tokens=skip)


def speaks_glm(tokenizer: Tokenizer) -> bool:
    """Whether a vocabulary has the markers of this format."""
    return all(name in tokenizer.special_ids for name in MARKERS)


def first_block(prompt: Sequence[int], ids: Mapping[str, int]) -> _State:
    """The block in which an answer to a prompt begins.

    Args:
        prompt: token ids.
        ids: of special tokens.
    """
    names = {ids[name]: name for name in (*MARKERS, *TURNS) if name in ids}
    last = next((names[token] for token in reversed(prompt) if token in names), "")
    return "reasoning" if last == THINK else "content"
