"""A session: one timeline of tokens and the state that belongs to it.

It chooses steps, keeps the timeline and the state in step with each other, and knows neither text
nor when to stop. Sessions of one engine share its executor: use them from one thread at a time.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import index
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import RequestError
from inkrt.runtime.engine_file import DRAFT_STEP, EngineConfig, StepSpec
from inkrt.runtime.executor import Executor, Sampling, StepInput, StepOutput
from inkrt.runtime.executor.round_queue import (
    MAX_ROUNDS_AHEAD,
    RoundInput,
    RoundRecord,
    RoundSettings,
)
from inkrt.runtime.media.rows import FeatureRows, check_features
from inkrt.runtime.state import SequenceState, StateManager

# Steps that decoding may run ahead of the one asked for: enough for the host to be late by a few
# steps, few enough that a session can still go back over a verify step of 8 (it has 13 to undo).
MAX_AHEAD = 4

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """A block of drafts, in order.

    Attributes:
        tokens: int32 [g].
        logits: float32 [g, vocabulary] that they were drawn from, before temperature and filters;
            without rows if the caller wanted none.
        confidences: float32 [g], of each draft to be accepted if those before it are; None if the
            drafter has none.
    """

    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]
    confidences: NDArray[np.float32] | None


def check_tokens(tokens: Iterable[int], config: EngineConfig) -> list[int]:
    """The tokens as a list of plain integers.

    Raises:
        RequestError: there is none, one is not an integer, or one is not an id of the model.
    """
    try:
        ids = [index(token) for token in tokens]
    except TypeError as error:
        raise RequestError(f"token ids must be integers: {error}", param="prompt") from None
    if not ids:
        raise RequestError("the prompt has no tokens; give at least one", param="prompt")
    limit = config.model.num_embeddings
    if min(ids) < 0 or max(ids) >= limit:
        place = next(i for i, token in enumerate(ids) if not 0 <= token < limit)
        raise RequestError(
            f"token {place} of the prompt has id {ids[place]}, ids of this model are "
            f"0..{limit - 1}; encode text with the engine's own tokenizer",
            param="prompt",
        )
    return ids


class Session:
    """One conversation on an engine; made by `Engine.session`.

    Args:
        executor: runs the steps.
        states: owner of the sequence.
        config: of the engine.
        sequence: the session's state; freed by `close`.
        tokens: what the state holds.
    """

    def __init__(
        self,
        executor: Executor,
        states: StateManager,
        config: EngineConfig,
        sequence: SequenceState,
        tokens: Sequence[int] = (),
    ) -> None:
        assert sequence.length == len(tokens), (sequence.length, len(tokens))
        self.config = config
        self._executor = executor
        self._states = states
        self._sequence = sequence
        self._tokens = list(tokens)
        self._steps = sorted(config.steps, key=lambda step: step.num_tokens)
        self._row_steps = [step for step in self._steps if step.num_rows == step.num_tokens]

    @property
    def tokens(self) -> list[int]:
        """A copy of the committed timeline."""
        return list(self._tokens)

    @property
    def length(self) -> int:
        """Committed tokens; the next token goes to this position."""
        return len(self._tokens)

    @property
    def widest_step(self) -> int:
        """Tokens that `prefill` can take in one step."""
        return self._steps[-1].num_tokens

    def prefill(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        chunk: int | None = None,
        wants_logits: bool = True,
        features: FeatureRows | None = None,
    ) -> StepOutput:
        """Append tokens, as few steps as possible.

        Pieces are as long as the widest step (or `chunk`) allows; each piece takes the narrowest
        step that holds it and takes feature rows, if it has some. If a step raises, the pieces
        before it stay appended.

        Args:
            tokens: at least one.
            sampling: for the token after the last.
            chunk: most tokens per step.
            wants_logits: whether the output has logits, which takes time.
            features: rows in place of the embeddings of some of the tokens, made by `place_rows`.

        Returns:
            One row: the last token's.

        Raises:
            RequestError: invalid tokens or chunk, or features that do not belong to them.
            CapacityError: the context or the pages are exhausted.
        """
        ids = check_tokens(tokens, self.config)
        if chunk is not None and chunk < 1:
            raise RequestError(f"chunk is {chunk}, it must be at least 1", param="chunk")
        self._require_open()
        if features is not None:
            check_features(features, len(ids), self.config)
        self._states.require_context(self._sequence, len(ids))
        size = min(chunk or self.widest_step, self.widest_step)
        for start in range(0, len(ids), size):
            piece = ids[start : start + size]
            rows = features.within(start, start + len(piece)) if features else None
            wide = (x for x in self._steps if x.num_tokens >= len(piece))
            step = next((x for x in wide if rows is None or x.num_rows < x.num_tokens), None)
            if step is None:  # verify steps take none
                what = f"no prefill step of {len(piece)} tokens takes features; rebuild with one"
                raise RequestError(what, param="features")
            is_last = start + size >= len(ids)
            output = self._run(
                step, piece, sampling, wants_logits=wants_logits and is_last, features=rows
            )
        return StepOutput(output.tokens[-1:], output.logits[-1:])

    def num_writable(self, num_tokens: int) -> int:
        """How many of the next `num_tokens` positions a step can write and give up again now."""
        self._require_open()
        return self._states.num_writable(self._sequence, num_tokens)

    def step(
        self, tokens: Sequence[int], sampling: Sampling, *, wants_logits: bool = True
    ) -> StepOutput:
        """Append tokens in one decode or verify step.

        Args:
            tokens: at least one.
            sampling: for every row.
            wants_logits: whether the output has logits, which takes time.

        Returns:
            One row per token: row i is what follows tokens[: i + 1].

        Raises:
            RequestError: invalid tokens, or more than the widest verify step takes.
            CapacityError: the context or the pages are exhausted.
        """
        ids = check_tokens(tokens, self.config)
        step = next((step for step in self._row_steps if step.num_tokens >= len(ids)), None)
        if step is None:
            widest = self._row_steps[-1].num_tokens if self._row_steps else 0
            raise RequestError(
                f"{len(ids)} tokens in one step, the widest decode or verify step of this engine "
                f"takes {widest}; use prefill",
                param="tokens",
            )
        return self._run(step, ids, sampling, wants_logits=wants_logits)

    def decode(self, token: int, sampling: Sampling, *, num_more: int = 0) -> int:
        """Append one token in a decode step and give the token drawn after it.

        Asked for the drawn tokens one after the other, as generation does, it keeps a GPU at work
        without waiting for the host: a few steps run ahead. They append nothing, but for `rollback`
        their positions count as written, so it reaches up to MAX_AHEAD positions less far.

        Args:
            token: to append.
            sampling: for the token to draw.
            num_more: further calls that are likely to come, each with the token that was drawn.

        Raises:
            RequestError: an invalid token.
            CapacityError: the context or the pages are exhausted.
        """
        (token,) = check_tokens([token], self.config)
        self._require_open()
        wanted = 1 + min(num_more, MAX_AHEAD)
        num_ahead = max(self._states.num_writable(self._sequence, wanted) - 1, 0)
        return self._append(
            [token], sampling, num_ahead, lambda given: self._executor.decode(given, num_ahead)
        )

    def takes_rounds(self, settings: RoundSettings) -> bool:
        """Whether `round` can run rounds like these, which the engine's own drafter drafts."""
        rounds = self._executor.rounds
        can_undo = settings.most <= self._states.layout.rollback_tokens
        return rounds is not None and can_undo and rounds.takes(settings)

    def round(
        self, token: int, sampling: Sampling, settings: RoundSettings, num_left: int
    ) -> RoundRecord:
        """Append a token and the drafts behind it that are accepted, in a round of the device.

        Called round by round, as generation does, it keeps a GPU at work without waiting for the
        host: the next round runs ahead. It appends nothing, but for `rollback` its positions count
        as written, so it reaches up to a round less far. (Interrupted while it waits, two rounds
        may have run that nobody has heard of; that may be too far to go on, but from 0.)

        Args:
            token: to append first.
            sampling: of the request.
            settings: of the request; `takes_rounds` is true of them.
            num_left: tokens that can be used, at least 1; the next call's is less by those given.

        Raises:
            RequestError: an invalid token.
            CapacityError: the context or the pages are exhausted.
        """
        (token,) = check_tokens([token], self.config)
        self._require_open()
        sequence, most = self._sequence, settings.most
        rounds = self._executor.rounds
        assert rounds is not None, "the device runs no rounds"
        can_undo = 1 + most <= self._states.layout.rollback_tokens
        num_ahead = MAX_ROUNDS_AHEAD if num_left > 1 and can_undo else 0
        wanted = (1 + num_ahead) * (1 + most)
        num_reserved = max(self._states.num_free(sequence, wanted), 1)
        is_coupled = settings.rule != "probabilistic"
        with self._reserved(num_reserved):
            pages = sequence.pages
            end = min(len(pages) * self.config.state.page_tokens, self.config.max_seq_len)
            step = StepInput([token], sequence.length, sequence.slot, pages, sampling, is_coupled)
            record = rounds.run(RoundInput(step, settings, num_left, end), num_ahead)
        num_written = max(len(record.tokens) + num_ahead * (1 + most), 1 + record.drafted)
        self._states.commit(sequence, len(record.tokens), num_written=num_written)
        self._tokens += [token, *record.tokens[:-1]]
        return record

    def draft(
        self, token: int, sampling: Sampling, *, coupled: bool, wants_logits: bool
    ) -> DraftOutput:
        """Draft what may follow a token that is about to be appended; appends nothing.

        Args:
            token: the next of the session.
            sampling: of the request.
            coupled: whether drafts are drawn with the noise of the session's own draws at their
                positions; else with noise that is independent of it and of that of other rounds.
            wants_logits: whether the output has logits, which takes time.

        Returns:
            As many drafts as the drafter makes at once, also where the context ends before.

        Raises:
            RequestError: an invalid token, or the engine has no drafter or is closed.
            CapacityError: the token does not fit into the context.
        """
        if self.config.draft is None:
            raise RequestError(
                "this engine has no drafter; speculate by n-grams, or rebuild it from a checkpoint "
                f"that has one: {self.config.rebuild_command}",
                param="method",
            )
        (token,) = check_tokens([token], self.config)
        self._require_open()
        sequence = self._sequence
        self._states.require_context(sequence, 1)
        step_input = StepInput(
            [token], sequence.length, sequence.slot, sequence.pages, sampling, coupled
        )
        output = self._executor.run(DRAFT_STEP, step_input, wants_logits=wants_logits)
        return DraftOutput(output.tokens, output.logits, output.confidences)

    def rollback(self, length: int) -> None:
        """Forget all tokens from position `length` on.

        Raises:
            RequestError: `length` is not in 0..self.length.
            CapacityError: further back than the engine keeps state for; 0 is always allowed.
        """
        self._require_open()
        self._states.rollback(self._sequence, length)
        del self._tokens[length:]

    def fork(self) -> "Session":
        """Open a second session with the same tokens; both go on independently.

        Raises:
            CapacityError: all slots are in use.
        """
        self._require_open()
        sequence = self._states.fork(self._sequence)
        try:
            self._executor.copy_slot(self._sequence.slot, sequence.slot)
        except BaseException:
            self._states.free(sequence)
            raise
        return Session(self._executor, self._states, self.config, sequence, self._tokens)

    def close(self) -> None:
        """Give back slot and pages; may be called again."""
        if self._sequence.is_open:
            self._states.free(self._sequence)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        step: StepSpec,
        tokens: list[int],
        sampling: Sampling,
        *,
        wants_logits: bool = True,
        features: FeatureRows | None = None,
    ) -> StepOutput:
        def run(step_input: StepInput) -> StepOutput:
            if features is not None:
                step_input = replace(step_input, features=features)
            return self._executor.run(step.name, step_input, wants_logits=wants_logits)

        return self._append(tokens, sampling, 0, run)

    def _append(
        self,
        tokens: list[int],
        sampling: Sampling,
        num_ahead: int,
        run: Callable[[StepInput], _T],
    ) -> _T:
        """Append the tokens that `run` writes, while `num_ahead` positions more are writable."""
        self._require_open()
        sequence = self._sequence
        with self._reserved(len(tokens) + num_ahead):
            step_input = StepInput(tokens, sequence.length, sequence.slot, sequence.pages, sampling)
            output = run(step_input)
        self._states.commit(sequence, len(tokens))
        self._tokens.extend(tokens)
        return output

    @contextlib.contextmanager
    def _reserved(self, num_tokens: int) -> Iterator[None]:
        """The next positions are writable; if what writes them fails, they are given up."""
        copies = self._states.reserve(self._sequence, num_tokens)
        try:
            for copy in copies:
                self._executor.copy_page(copy.source, copy.target)
            yield
        except BaseException:
            self._states.cancel(self._sequence)
            raise

    def _require_open(self) -> None:
        if not self._sequence.is_open:
            raise RequestError(
                "the session is closed; open another with engine.session()", param="session"
            )
