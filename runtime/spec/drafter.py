"""What proposes tokens: the protocol, the engine's own drafter, and one that needs no weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inkrt.runtime.executor import Sampling
from inkrt.runtime.session import Session


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may come next.

    Attributes:
        tokens: the nearest first; none if there is nothing to propose.
        logits: float32 [n, V], before temperature and filters; draft i was drawn from row i with
            the request's own temperature and filters, and with noise that is used for nothing else
            and keyed by the round (`runtime/noise.py`, purpose DRAFT). None: the drafts are
            certain, that is they do not depend on any random number of this round.
        confidences: n numbers c_j in 0..1: how likely draft j is accepted if those before it are.
            c_j must not depend on draft j or on what comes after it. None if there are none.
    """

    tokens: Sequence[int] = ()
    logits: NDArray[np.float32] | None = None
    confidences: Sequence[float] | None = None

    def first(self, most: int) -> "Proposal":
        """The first drafts, `most` at most."""
        if len(self.tokens) <= most:
            return self
        return Proposal(
            self.tokens[:most],
            None if self.logits is None else self.logits[:most],
            None if self.confidences is None else self.confidences[:most],
        )


class Drafter(Protocol):
    """Proposes the tokens that may come next. One object serves one session."""

    def draft(
        self,
        session: Session,
        tokens: Sequence[int],
        sampling: Sampling,
        most: int,
        *,
        coupled: bool,
    ) -> Proposal:
        """Tokens that may follow, the nearest first.

        What it proposes costs time where it is wrong, and never changes what is generated.

        Args:
            session: holds all of `tokens` but the last; the drafter appends nothing to it.
            tokens: the timeline, prompt and output, with the token that no step has read yet, the
                anchor. From call to call it only grows.
            sampling: of the request.
            most: how many can be used, at least 1; what is more is dropped.
            coupled: how drafts are accepted. If true, draft i should be what the noise of its
                position draws, as a step of the target draws, and logits are not read. Else it must
                be as `Proposal.logits` says.
        """


class NgramDrafter:
    """Proposes what followed the last time the timeline ended like this.

    The longest ending of `longest` down to `shortest` tokens that stood before decides, and of its
    places the latest. Good where the output repeats its prompt: edits, quotes, code, tables.

    Args:
        shortest: tokens that must agree, at least 1.
        longest: tokens that are compared at most.
    """

    def __init__(self, shortest: int = 2, longest: int = 4) -> None:
        assert 1 <= shortest <= longest, (shortest, longest)
        self._sizes = range(longest, shortest - 1, -1)
        # What followed each n-gram: the index behind its latest place that has a next token.
        self._behind: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def draft(
        self,
        session: Session,  # noqa: ARG002
        tokens: Sequence[int],
        sampling: Sampling,  # noqa: ARG002
        most: int,
        *,
        coupled: bool,  # noqa: ARG002
    ) -> Proposal:
        """See `Drafter`; the time it takes does not grow with the timeline."""
        return Proposal(self.find(tokens, most))

    def find(self, tokens: Sequence[int], most: int) -> list[int]:
        """What followed the ending of `tokens` where it stood last; at most `most` tokens."""
        end = len(tokens)
        for behind in range(self._num_indexed + 1, end):
            for size in self._sizes:
                if size <= behind:
                    self._behind[tuple(tokens[behind - size : behind])] = behind
        self._num_indexed = max(end - 1, 0)
        for size in self._sizes:
            if size <= end and (start := self._behind.get(tuple(tokens[end - size :]))) is not None:
                return list(tokens[start : start + most])
        return []


class EngineDrafter:
    """Proposes what the engine's draft step gives: a DSpark block, or a draft of every MTP head."""

    def draft(
        self,
        session: Session,
        tokens: Sequence[int],
        sampling: Sampling,
        most: int,
        *,
        coupled: bool,
    ) -> Proposal:
        """See `Drafter`; the step always gives a whole block, so `most` saves nothing."""
        output = session.draft(tokens[-1], sampling, coupled=coupled, wants_logits=not coupled)
        confidences = output.confidences
        return Proposal(
            output.tokens.tolist(),
            None if coupled else output.logits,
            None if confidences is None else confidences.tolist(),
        ).first(most)
