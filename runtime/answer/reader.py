"""Reads an answer from deltas: parses it, watches for stop strings, and says why it ended.

Stop strings are looked for in what the model says, not in its reasoning or tool calls, so the
generation must not look for them itself. The tokens behind one are no part of the answer, even if
a step had already given them.
"""

from dataclasses import dataclass
from typing import Literal

from inkrt.runtime.answer.parts import AnswerParser, Part
from inkrt.runtime.output import Delta, TokenLogprob
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.stop import StopMatcher

AnswerEnd = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What a delta adds to an answer.

    Attributes:
        parts: in order.
        token_ids: tokens of the answer, with the one that ended it.
        logprobs: of those tokens that are text, if the request asked for them.
        num_accepted: how many of the tokens, the first ones, are accepted drafts.
        num_accepted_parts: how many of the parts, the first ones, came out with these.
    """

    parts: tuple[Part, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    num_accepted: int
    num_accepted_parts: int


class AnswerReader:
    """One answer.

    Args:
        parser: of the model's format.
        params: what the caller asked for; the generation runs with the same but stop strings.
        single_call: whether the answer ends with its first tool call.

    Attributes:
        end: why the answer ended; None before. It may end before its generation does: cancel that.
        stop_reason: the stop string or the id among `stop_token_ids` that ended it, if one did.
        num_tokens: tokens of the answer so far.
    """

    def __init__(
        self, parser: AnswerParser, params: SamplingParams, *, single_call: bool = False
    ) -> None:
        self.end: AnswerEnd | None = None
        self.stop_reason: int | str | None = None
        self.num_tokens = 0
        self._parser = parser
        self._params = params
        self._single_call = single_call
        self._matcher = StopMatcher(params.stop, include_match=params.include_stop_str_in_output)

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning so far."""
        return self._parser.num_reasoning_tokens

    def push(self, delta: Delta) -> AnswerPiece:
        """Take what a step gave; nothing more counts once the answer has ended."""
        parts: list[Part] = []
        logprobs: list[TokenLogprob] = []
        num_before = self.num_tokens
        last = len(delta.token_ids) - 1
        num_accepted_parts = 0
        for place, token in enumerate(delta.token_ids):
            if self.end is not None:
                break
            self.num_tokens += 1
            is_end = place == last and delta.finish_reason == "stop"
            if not is_end or self._params.include_stop_str_in_output:
                parts += self._match(self._parser.push(token))
                if self._parser.is_content and delta.logprobs:
                    logprobs.append(delta.logprobs[place])
            if self._single_call and self._parser.num_closed_calls:
                self.end = "tool_calls"
            if place < delta.num_accepted:
                num_accepted_parts = len(parts)
        if self.end is None and delta.finish_reason is not None:
            parts += self._finish(delta)
        num_taken = self.num_tokens - num_before
        return AnswerPiece(
            tuple(parts),
            delta.token_ids[:num_taken],
            tuple(logprobs),
            min(delta.num_accepted, num_taken),
            num_accepted_parts,
        )

    def _finish(self, delta: Delta) -> list[Part]:
        """The generation has ended, and with it the answer."""
        parts = self._match(self._parser.finish(is_cut=delta.finish_reason == "length"))
        if self.end is not None:  # by a stop string in what was held back
            return parts
        if text := self._matcher.flush():
            parts.append(Part(content=text))
        assert delta.finish_reason is not None
        self.stop_reason = delta.stop_reason
        self.end = delta.finish_reason
        if self.end == "stop" and self._parser.num_calls:
            self.end = "tool_calls"
        return parts

    def _match(self, parts: list[Part]) -> list[Part]:
        """The parts up to a stop string."""
        kept = []
        for part in parts:
            if part.content and self.num_tokens > self._params.min_tokens:
                if text := self._matcher.push(part.content):
                    kept.append(Part(content=text))
                if self._matcher.matched is not None:
                    self.end, self.stop_reason = "stop", self._matcher.matched
                    return kept
            else:
                if part.call is not None and (held := self._matcher.flush()):
                    kept.append(Part(content=held))
                kept.append(part)
        return kept
