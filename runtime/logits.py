"""What a request does to its logits before temperature and filters, without torch.

    allowed ids:  l_t = -inf                                  for all tokens but these
    logit bias:   l_t = l_t + bias_t
    penalties:    l_t = l_t / r if l_t > 0 else l_t * r       r repetition; t in prompt or output
                  l_t = l_t - f * count_t                     f frequency; count_t in the output
                  l_t = l_t - p                               p presence; t in the output
    bad words:    l_t = -inf        t ends a bad word whose other tokens end the output
    min_tokens:   l_t = -inf        t ends the generation, and less than min_tokens came before
    grammar:      l_t = -inf        t cannot come next

in this order, in float32; `runtime/sampling.py` goes on from there. Each row of a step has the
context of its own: a row behind drafts counts them as output. Nothing of the drafts is kept, so
there is nothing to undo where they are wrong. Source: dspark.md sections 6.2, 6.9 and 6.10.
"""

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import RequestError
from inkrt.runtime.engine_file import EngineConfig
from inkrt.runtime.executor import Sampling
from inkrt.runtime.grammar_mask import GrammarMask
from inkrt.runtime.logprobs import LogprobReader
from inkrt.runtime.sampling import draw
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.tokenizer import Tokenizer

_OFF = np.float32(-np.inf)


class LogitsProcessor:
    """Changes the logits of one request; made by `make`.

    Args:
        params: of the request.
        num_prompt: tokens of the timeline that are prompt; the others are output.
        vocab_size: V; ids of `params` and `bad_words` are below.
        end_ids: tokens that end the generation.
        bad_words: sequences of token ids that must not be generated.
        grammar: of the request; None if it has none.

    Attributes:
        logprobs: keeps what the request wants to know of its tokens; None if it does not.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        num_prompt: int,
        vocab_size: int,
        end_ids: Iterable[int] = (),
        bad_words: Iterable[Sequence[int]] = (),
        grammar: GrammarMask | None = None,
    ) -> None:
        self._grammar = grammar
        self._num_prompt = num_prompt
        self._vocab_size = vocab_size
        self._forbidden: NDArray[np.bool_] | None = None
        if params.allowed_token_ids is not None:
            self._forbidden = np.ones(vocab_size, np.bool_)
            self._forbidden[list(params.allowed_token_ids)] = False
        self._biased = np.array(list(params.logit_bias), np.int64)
        self._biases = np.array(list(params.logit_bias.values()), np.float32)
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._min_tokens = params.min_tokens
        # No token has an id behind the vocabulary, so these can never be drawn.
        self._ends = [token for token in end_ids if token < vocab_size]
        # What may not follow the tokens before the last of each bad word.
        self._last: dict[tuple[int, ...], list[int]] = {}
        for word in bad_words:
            self._last.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._sizes = sorted({len(beginning) for beginning in self._last})
        # Counts of the first `_num_counted` tokens of the timeline.
        self._has_penalty = self._repetition != 1 or self._frequency != 0 or self._presence != 0
        self._in_prompt = np.zeros(vocab_size if self._has_penalty else 0, np.bool_)
        self._counts = np.zeros(vocab_size if self._has_penalty else 0, np.int32)
        self._num_counted = 0
        self.logprobs = None if params.logprobs is None else LogprobReader(params.logprobs)

    @classmethod
    def make(
        cls,
        params: SamplingParams,
        num_prompt: int,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
    ) -> Self | None:
        """The processor of a request that `check_processing` has let pass; None if it needs none.

        Raises:
            RequestError: the tokenizer has no tokens for a bad word, or the grammar cannot be used.
        """
        if not needs_processing(params):
            return None
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends.update(config.model.eos_token_ids)
        return cls(
            params,
            num_prompt=num_prompt,
            vocab_size=config.model.vocab_size,
            end_ids=sorted(ends),
            bad_words=_encode_bad_words(params.bad_words, tokenizer),
            grammar=grammar_mask(params, num_prompt, config, tokenizer),
        )

    def process(
        self, logits: NDArray[np.float32], timeline: Sequence[int], drafts: Sequence[int] = ()
    ) -> NDArray[np.float32]:
        """The logits that rows are drawn from.

        A row of which nothing is left is all -inf; `require_choice` tells so of the rows that are
        really drawn from. That of a row behind a wrong draft means nothing.

        Args:
            logits: [n, V], n <= len(drafts) + 1; row i is what a step gave after it had read
                `timeline` and the first i of `drafts`. It is not changed.
            timeline: prompt and output so far, with the token that the step of row 0 read last. It
                only grows from call to call.
            drafts: tokens behind it that the same step read; they may turn out wrong.

        Returns:
            [n, V], a copy.
        """
        assert logits.shape[1:] == (self._vocab_size,), logits.shape
        assert len(logits) <= len(drafts) + 1, (logits.shape, len(drafts))
        if self.logprobs is not None:
            self.logprobs.read(logits, len(timeline))
        rows = np.array(logits, np.float32)
        if self._forbidden is not None:
            rows[:, self._forbidden] = _OFF
        rows[:, self._biased] += self._biases
        if self._has_penalty:
            self._penalize(rows, timeline, drafts)
        for i, row in enumerate(rows):
            self._ban_words(row, timeline, drafts[:i])
            if len(timeline) + i - self._num_prompt < self._min_tokens:
                row[self._ends] = _OFF
        if self._grammar is not None:
            self._grammar.apply(rows, timeline, drafts)
        return rows

    def _penalize(
        self, rows: NDArray[np.float32], timeline: Sequence[int], drafts: Sequence[int]
    ) -> None:
        self._count(timeline)
        counts = self._counts.copy() if len(rows) > 1 else self._counts
        for i, row in enumerate(rows):
            if i > 0 and drafts[i - 1] < self._vocab_size:
                counts[drafts[i - 1]] += 1
            seen = np.flatnonzero(self._in_prompt | (counts > 0))
            values = row[seen]
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
            values -= self._frequency * counts[seen].astype(np.float32)
            values -= self._presence * (counts[seen] > 0).astype(np.float32)
            row[seen] = values

    def _count(self, timeline: Sequence[int]) -> None:
        assert len(timeline) >= self._num_counted, (len(timeline), self._num_counted)
        for place in range(self._num_counted, len(timeline)):
            token = timeline[place]
            if place >= self._num_prompt:
                self._counts[token] += 1
            elif token < self._vocab_size:  # prompts may hold tokens that have no logit
                self._in_prompt[token] = True
        self._num_counted = len(timeline)

    def _ban_words(
        self, row: NDArray[np.float32], timeline: Sequence[int], drafts: Sequence[int]
    ) -> None:
        if not self._sizes:
            return
        start = max(self._num_prompt, len(timeline) - self._sizes[-1])
        output = (*timeline[start:], *drafts)
        for size in self._sizes:
            if size <= len(output):
                row[self._last.get(output[len(output) - size :], [])] = _OFF


def needs_processing(params: SamplingParams) -> bool:
    """Whether a request changes its logits before temperature and filters, or asks for them."""
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
        or params.min_tokens > 0
        or params.allowed_token_ids is not None
        or bool(params.logit_bias)
        or bool(params.bad_words)
        or params.logprobs is not None
        or params.grammar is not None
    )


def grammar_mask(
    params: SamplingParams, num_prompt: int, config: EngineConfig, tokenizer: Tokenizer | None
) -> GrammarMask | None:
    """The grammar of a request, at its beginning; None if it has none.

    Raises:
        RequestError: it cannot be used.
    """
    if params.grammar is None:
        return None
    if tokenizer is None:
        raise RequestError(
            "grammar needs text, but the engine has no tokenizer.json", param="grammar"
        )
    return GrammarMask(
        params.grammar,
        tokenizer,
        vocab_size=config.model.vocab_size,
        end_ids=config.model.eos_token_ids,
        num_prompt=num_prompt,
    )


def check_processing(params: SamplingParams, vocab_size: int, *, has_tokenizer: bool) -> None:
    """Check what only the engine can tell of a request's logits processing.

    Raises:
        RequestError: an id without a logit, or a bad word as text without a tokenizer.
    """
    named: list[tuple[str, Iterable[int]]] = [
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    ]
    for word in params.bad_words:
        if not isinstance(word, str):
            named.append(("bad_words", word))
        elif not has_tokenizer:
            raise RequestError(
                "bad words as text need a tokenizer, but the engine has no tokenizer.json; give "
                "lists of token ids",
                param="bad_words",
            )
    for name, ids in named:
        for token in ids:
            if token >= vocab_size:
                shown = str(token) if token < 2**64 else "2**64 or more"
                raise RequestError(
                    f"{name} has token id {shown}, this model generates ids 0..{vocab_size - 1}",
                    param=name,
                )


def require_choice(row: NDArray[np.float32]) -> None:
    """Check that some token can be drawn from a processed row [V].

    Raises:
        RequestError: all tokens are banned.
    """
    if not _has_choice(row):
        raise RequestError(
            "no token may come next: allowed_token_ids, bad_words, min_tokens, stop_token_ids and "
            "grammar ban all that the model can generate; ban less",
            param="bad_words",
        )


def draw_rows(
    logits: NDArray[np.float32],
    processor: LogitsProcessor,
    sampling: Sampling,
    timeline: Sequence[int],
    drafts: Sequence[int] = (),
) -> list[int]:
    """Draw the tokens that plain decoding would draw, as far as the drafts are right.

    Args:
        logits: [len(drafts) + 1, V], of one step; rows as in `LogitsProcessor.process`.
        processor: of the request.
        sampling: of the request; noise is that of each token's position.
        timeline: prompt and output, with the token that the step read first.
        drafts: tokens that it read behind that one.

    Returns:
        The right drafts, and behind them the token of the first row whose draft is wrong or that
        has none. Where right drafts leave no token that may follow, nothing stands behind them:
        they may have ended the generation, else the next row 0 is that row again and raises.

    Raises:
        RequestError: no token may follow the timeline.
    """
    assert len(logits) == len(drafts) + 1, (logits.shape, len(drafts))
    drawn: list[int] = []
    for i, row in enumerate(processor.process(logits, timeline, drafts)):
        if i > 0 and not _has_choice(row):
            break
        require_choice(row)
        drawn.append(int(draw(row, sampling, len(timeline) + i)))
        if i < len(drafts) and drawn[i] != drafts[i]:
            break
    return drawn


def _has_choice(row: NDArray[np.float32]) -> bool:
    return bool(row.max() != _OFF)  # a NaN is drawn, as by a step


def _encode_bad_words(
    words: Iterable[str | Sequence[int]], tokenizer: Tokenizer | None
) -> list[tuple[int, ...]]:
    """Token sequences of bad words; a text has those with and without a space before it."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        assert tokenizer is not None, "check_processing has let it pass"
        bare = word.lstrip() or word
        sequences = [tuple(tokenizer.encode(text)) for text in (bare, f" {bare}")]
        if not any(sequences):
            raise RequestError(
                f"the tokenizer has no tokens for the bad word {word!r}; give its token ids",
                param="bad_words",
            )
        found.update((tokens, None) for tokens in sequences if tokens)
    return list(found)
