"""What generation gives back: deltas while it runs, outputs at the end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from inkrt.runtime.spec.stats import SpeculationStats

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model held a token, before the request's changes of logits and temperature.

    Attributes:
        token: the id that was generated.
        logprob: natural logarithm of its probability.
        top: the likeliest ids and theirs, the likeliest first; as many as the request asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request; their sum is the time from asking to the last token.

    Attributes:
        queue_s: waiting for the engine.
        prefill_s: from then to the first token.
        decode_s: from the first to the last token.
        num_cached_tokens: tokens of the prompt that were not read, as their state was there.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds to the output.

    Attributes:
        text: new text. It lags behind the tokens while a character is unfinished or a stop string
            may be under way, and leaves out the token that ended generation.
        token_ids: new tokens, with the token that ended generation; empty while the prompt is read.
        finish_reason: None until the last delta; "stop": an end token or stop string; "length":
            `max_tokens` or the end of the context.
        stop_reason: the stop string or the id among `stop_token_ids` that ended generation; None
            for the model's own end tokens.
        num_accepted: how many of the tokens, the first ones, are accepted drafts.
        num_accepted_chars: how much of the text, its beginning, came out with them.
        logprobs: of each token, if the request asked for them; else empty.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_accepted: int = 0
    num_accepted_chars: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def of_round(cls, deltas: "Sequence[Delta]", num_accepted: int) -> "Delta":
        """What a round adds, from what each of its tokens, at least one, adds.

        Args:
            deltas: of one token each.
            num_accepted: tokens that are accepted drafts, the first ones.
        """
        return cls(
            _text(deltas),
            _token_ids(deltas),
            deltas[-1].finish_reason,
            deltas[-1].stop_reason,
            num_accepted,
            len(_text(deltas[:num_accepted])),
            _logprobs(deltas),
        )


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion: the deltas of a generation joined.

    Attributes:
        index: number of the completion; always 0.
        logprobs: of each token, if the request asked for them; else empty.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def join(cls, deltas: Sequence[Delta]) -> "CompletionOutput":
        """The completion that the deltas of one generation make up."""
        last = deltas[-1]
        return cls(
            0,
            _text(deltas),
            _token_ids(deltas),
            last.finish_reason,
            last.stop_reason,
            _logprobs(deltas),
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of one prompt.

    Attributes:
        request_id: unique in its LLM.
        prompt_token_ids: the prompt as the model saw it.
        outputs: one completion.
        finished: always true; callers of other engines look for it.
        speculation: what speculation did; without rounds where it was off.
        metrics: its times.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool = True
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0, 0.0, 0.0))


def _text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def _token_ids(deltas: Sequence[Delta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)


def _logprobs(deltas: Sequence[Delta]) -> tuple[TokenLogprob, ...]:
    return tuple(item for delta in deltas for item in delta.logprobs)
