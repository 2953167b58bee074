"""Answers of the Inkling family: blocks of reasoning, text and tool calls between marker tokens.

    <|content_thinking|> ... <|end_message|> <|message_model|> <|content_text|> ... <|end_message|>
    <|message_model|> NAME <|content_invoke_tool_json|> {"name":NAME,"args":{...}} <|end_message|>
    <|content_model_end_sampling|>

Blocks come in any order and number. Markers are token ids: the same text from ordinary tokens is
text. Source: chat-format A6, the table of states and the rules below it.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from inkrt.runtime.answer.call_json import CallScanner
from inkrt.runtime.answer.parts import EndSpace, FrontSpace, Part
from inkrt.runtime.tokenizer import IncrementalDecoder, Tokenizer

MODEL, TEXT, THINKING = "<|message_model|>", "<|content_text|>", "<|content_thinking|>"
CALL, END = "<|content_invoke_tool_json|>", "<|end_message|>"
END_SAMPLING = "<|content_model_end_sampling|>"
MARKERS = (MODEL, TEXT, THINKING, CALL, END, END_SAMPLING)
# Shown as text: calls in a language of their own, and errors of tools.
OTHER_TEXT = ("<|content_invoke_tool_text|>", "<|content_tool_error|>")
# Those of prompts: an answer that has one is damaged, and nobody is to see it.
OTHERS = (
    "<|message_user|>",
    "<|message_system|>",
    "<|message_tool|>",
    "<|content_image|>",
    "<|content_xml|>",
    "<|content_audio_input|>",
    "<|audio_end|>",
)

_State = Literal["header", "content", "reasoning", "call"]
_NAME = re.compile(r"[\w.:-]{1,64}")
_log = logging.getLogger("inkrt")


class InklingParser:
    """An `AnswerParser` for the Inkling family.

    Reasoning loses white space at its end, and text before a tool call that is white space alone is
    dropped. A call that is not `{"name": ..., "args": {...}}` gives nothing, with a warning.

    Args:
        tokenizer: of the model.
        prompt: token ids; its end says in which block the answer begins.
        keeps_calls: whether tool calls are passed on; else they are dropped.
        skip_special_tokens: leave special tokens that are no markers out of the text too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        keeps_calls: bool = True,
        skip_special_tokens: bool = True,
    ) -> None:
        self.num_reasoning_tokens = self.num_calls = self.num_closed_calls = 0
        self.is_content = False
        self._tokenizer = tokenizer
        self._keeps_calls = keeps_calls
        self._skip_special_tokens = skip_special_tokens
        names = (*MARKERS, *OTHER_TEXT, *OTHERS)
        ids = tokenizer.special_ids
        self._markers = {ids[name]: name for name in names if name in ids}
        self._state: _State = first_block(prompt, ids)
        self._decoder = self._new_decoder()
        self._header = ""
        self._reasoning, self._content = EndSpace(), FrontSpace()
        self._scanner: CallScanner | None = None

    def push(self, token: int) -> list[Part]:
        """See `AnswerParser`."""
        self.is_content = False
        marker = self._markers.get(token)
        if marker is None:
            self.is_content = self._state == "content"
            self.num_reasoning_tokens += self._state == "reasoning"
            return self._take(self._decoder.push(token))
        if self._state == "reasoning" and marker == THINKING:
            return []
        parts = self._take(self._decoder.flush())
        self._decoder = self._new_decoder()
        parts += self._leave(marker)
        self._enter(marker)
        return parts

    def finish(self, *, is_cut: bool) -> list[Part]:
        """See `AnswerParser`."""
        parts = self._take(self._decoder.flush())
        if is_cut and self._keeps_calls and _NAME.fullmatch(self._header):
            self._header = ""  # the name of a tool whose call did not come
        parts += self._leave(END_SAMPLING)
        parts += _content(self._content.flush())
        self._state = "content"
        return parts

    def _leave(self, marker: str) -> list[Part]:
        """What the end of a block gives."""
        if self._state == "reasoning":
            self._reasoning.drop()
        if self._state == "header":
            header, self._header = self._header, ""
            if marker in (END, END_SAMPLING):  # it was no author's name but the answer
                return _content(self._content.push(header))
        if self._state == "call":
            return self._end_call()
        return []

    def _enter(self, marker: str) -> None:
        if marker == MODEL:
            self._state = "header"
        elif marker == THINKING:
            self._state = "reasoning"
        elif marker == CALL:
            self._state = "call"
            self._content.drop()
            self._scanner = CallScanner(self.num_calls)
        else:
            self._state = "content"

    def _take(self, text: str) -> list[Part]:
        if not text:
            return []
        if self._state == "header":
            self._header += text
            return []
        if self._state == "content":
            return _content(self._content.push(text))
        if self._state == "reasoning":
            kept = self._reasoning.push(text)
            return [Part(reasoning=kept)] if kept else []
        return self._take_call(text)

    def _take_call(self, text: str) -> list[Part]:
        assert self._scanner is not None
        was_begun = self._scanner.is_begun
        delta = self._scanner.push(text)
        if delta is None or not self._keeps_calls:
            return []
        self.num_calls += not was_begun
        return [Part(call=delta)]

    def _end_call(self) -> list[Part]:
        assert self._scanner is not None
        was_begun = self._scanner.is_begun
        delta = self._scanner.finish()
        if not self._keeps_calls:
            _log.warning("the model called a tool, which the request did not allow; dropped")
            return []
        if not self._scanner.is_begun:
            _log.warning("the model's tool call is not of its format; dropped")
            return []
        self.num_calls += not was_begun
        self.num_closed_calls = self.num_calls
        return [] if delta is None else [Part(call=delta)]

    def _new_decoder(self) -> IncrementalDecoder:
        return IncrementalDecoder(self._tokenizer, skip_special_tokens=self._skip_special_tokens)


def speaks_inkling(tokenizer: Tokenizer) -> bool:
    """Whether a vocabulary has the markers of this format."""
    return all(name in tokenizer.special_ids for name in MARKERS)


def first_block(prompt: Sequence[int], ids: Mapping[str, int]) -> _State:
    """The block in which an answer to a prompt begins.

    Args:
        prompt: token ids.
        ids: of special tokens.
    """
    states: dict[str, _State] = {THINKING: "reasoning", TEXT: "content"}
    names = {ids[name]: name for name in (*MARKERS, *OTHER_TEXT, *OTHERS) if name in ids}
    last = next((names[token] for token in reversed(prompt) if token in names), MODEL)
    return states.get(last, "header")


def _content(text: str) -> list[Part]:
    return [Part(content=text)] if text else []
