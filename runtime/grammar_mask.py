"""Which tokens of a row a grammar allows, in the middle of a block of drafts too.

A grammar may hold for a part of an answer only. Where the model's format has blocks, the answer is
one block of reasoning, if the model begins with one, then one block that the grammar makes, then
the end. The matcher advances by tokens that were generated; drafts are tried and taken back.
Source: chat-format A2 and B2.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import RequestError
from inkrt.runtime.answer import glm, inkling
from inkrt.runtime.answer.format import answer_format
from inkrt.runtime.grammar import Grammar
from inkrt.runtime.tokenizer import Tokenizer

_OFF = np.float32(-np.inf)
_Block = Literal["header", "reasoning", "between", "grammar", "behind", "done"]


class GrammarMask:
    """The grammar of one request.

    Args:
        grammar: what is allowed.
        tokenizer: of the model.
        vocab_size: V.
        end_ids: tokens that end a generation.
        num_prompt: tokens of the timeline that are prompt.

    Raises:
        RequestError: the grammar cannot be used, or the model's format has no place for it.
    """

    def __init__(
        self,
        grammar: Grammar,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        end_ids: Sequence[int],
        num_prompt: int,
    ) -> None:
        self._vocab_size = vocab_size
        self._num_seen = num_prompt
        self._kind = "plain" if grammar.place == "all" else answer_format(tokenizer)
        self._ids: Mapping[str, int] = tokenizer.special_ids
        self._opener = inkling.CALL if grammar.place == "call" else inkling.TEXT
        if grammar.place == "call" and self._kind != "inkling":
            raise RequestError(
                "tool_choice can only be auto or none: this model's format of calls has no grammar",
                param="tool_choice",
            )
        self._ends = [self._ids[inkling.END]] if self._kind == "inkling" else [*end_ids]
        known = tokenizer.grammar_tokenizer(vocab_size, tuple(self._ends))
        self._matcher = grammar.matcher(known)
        self._ordinary = np.ones(vocab_size, np.bool_)
        self._ordinary[[i for i in self._ids.values() if i < vocab_size]] = False
        self._block: _Block | None = None  # until the prompt is seen
        self._has_thought = False

    def apply(
        self, rows: NDArray[np.float32], timeline: Sequence[int], drafts: Sequence[int]
    ) -> None:
        """Take out of rows [n, V] what may not follow; arguments as of `LogitsProcessor.process`.

        Rows behind a draft that may not stand there are left as they are: they mean nothing.

        Raises:
            RequestError: the grammar has become too large.
        """
        if self._block is None:
            self._block = self._first_block(timeline[: self._num_seen])
        for token in timeline[self._num_seen :]:
            was_allowed, _ = self._take(token)
            assert was_allowed, (token, self._block)
        self._num_seen = len(timeline)
        kept, num_matched = (self._block, self._has_thought), 0
        for i, row in enumerate(rows):
            row[~self._allowed()] = _OFF
            if i == len(rows) - 1:
                break
            is_allowed, is_matched = self._take(drafts[i])
            num_matched += is_matched
            if not is_allowed:
                break
        self._block, self._has_thought = kept
        if num_matched:
            self._matcher.rollback(num_matched)

    def _first_block(self, prompt: Sequence[int]) -> _Block:
        if self._kind == "inkling":
            block = inkling.first_block(prompt, self._ids)
            if block == "content" and self._opener == inkling.TEXT:
                return "grammar"
            return "reasoning" if block == "reasoning" else "header"
        if self._kind == "glm" and glm.first_block(prompt, self._ids) == "reasoning":
            return "reasoning"
        return "grammar"

    def _allowed(self) -> NDArray[np.bool_]:
        """Flags [V] of the tokens that may come next."""
        match self._block:
            case "grammar":
                return self._matched()
            case "reasoning":
                allowed = self._ordinary.copy()
                allowed[self._id(inkling.END if self._kind == "inkling" else glm.END_THINK)] = True
                return allowed
            case "header":
                names = [self._opener] if self._has_thought else [self._opener, inkling.THINKING]
            case "between":
                names = [inkling.MODEL]
            case _:
                names = [inkling.END_SAMPLING]
        allowed = np.zeros(self._vocab_size, np.bool_)
        allowed[[self._id(name) for name in names]] = True
        return allowed

    def _matched(self) -> NDArray[np.bool_]:
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise RequestError(
                "grammar has become too large for this text; make it simpler", param="grammar"
            )
        return np.unpackbits(packed, bitorder="little")[: self._vocab_size].astype(np.bool_)

    def _take(self, token: int) -> tuple[bool, bool]:
        """Go on by a token: whether it may stand there, and whether the matcher has taken it."""
        if self._block == "grammar":
            if token in self._ends:  # the matcher does not take them
                is_complete = self._matcher.is_accepting()
                if is_complete:
                    self._block = "behind" if self._kind == "inkling" else "done"
                return is_complete, False
            is_matched = self._matcher.validate_tokens([token]) == 1
            return is_matched, is_matched and self._matcher.consume_token(token)
        if self._block == "done" or token >= self._vocab_size or not self._allowed()[token]:
            return False, False
        if self._block == "reasoning" and self._ordinary[token]:
            return True, False
        self._block = self._next_block(token)
        return True, False

    def _next_block(self, token: int) -> _Block:
        """The block behind a marker that was allowed."""
        if self._block == "reasoning":
            return "between" if self._kind == "inkling" else "grammar"
        if self._block == "between":
            return "header"
        if self._block == "header" and token == self._ids[inkling.THINKING]:
            self._has_thought = True
            return "reasoning"
        return "grammar" if self._block == "header" else "done"

    def _id(self, name: str) -> int:
        return self._ids[name]
