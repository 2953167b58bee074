"""How many of the drafts of a round to verify.

Under the ratio test whether draft j is verified may depend on anything known before x_j was drawn,
and on nothing else (dspark.md 6.8 and 7.4): earlier rounds, and the confidences c_1..c_j, since c_j
reads x_{j-1} at most. So every policy here goes from left to right, looks at c_j only when it comes
to draft j and never comes back: a stopping time. In particular it does not search all widths for
the best one with the confidences of this block, which would look ahead; what it expects of later
drafts comes from earlier rounds alone. Under the coupled rule no choice can change a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class WidthPolicy(Protocol):
    """Chooses widths for one session."""

    def choose(self, confidences: Sequence[float] | None, most: int) -> int:
        """Drafts to verify, 0..most.

        Args:
            confidences: c_j, probability that draft j is accepted if those before it are, made
                before draft j was drawn; None if the drafter has none.
            most: drafts there are.
        """

    def observe(self, drafted: int, accepted: int) -> None:
        """Hear how many of the verified drafts were accepted."""


@dataclass(frozen=True, slots=True)
class FixedWidth:
    """All drafts."""

    def choose(self, confidences: Sequence[float] | None, most: int) -> int:  # noqa: ARG002
        """See `WidthPolicy`."""
        return most

    def observe(self, drafted: int, accepted: int) -> None:
        """See `WidthPolicy`."""


@dataclass(frozen=True, slots=True)
class ConfidenceThreshold:
    """The drafts before the first whose confidence is below a threshold.

    Attributes:
        threshold: 0..1; 0 verifies all.
    """

    threshold: float

    def choose(self, confidences: Sequence[float] | None, most: int) -> int:
        """See `WidthPolicy`; all drafts if the drafter has no confidences."""
        if confidences is None:
            return most
        return next((j for j in range(most) if confidences[j] < self.threshold), most)

    def observe(self, drafted: int, accepted: int) -> None:
        """See `WidthPolicy`."""


@dataclass(slots=True)
class CostAware:
    """The width that is expected to give the most tokens per second.

    Draft j is verified if, with what is known before it is drawn, some width from j on promises
    more tokens per second than j - 1 does. Beyond j, and where there are no confidences, the
    shares of drafts that earlier rounds accepted stand in for them.

    Attributes:
        seconds: of a round that verifies 0, 1, ... drafts, the time to draft included.
        explore_every: after so many rounds one verifies everything, so that shares of far drafts
            do not stay at what they once were; 0 never does.
    """

    seconds: Sequence[float]
    explore_every: int = 32
    _reached: list[float] = field(default_factory=list)
    _accepted: list[float] = field(default_factory=list)
    _num_rounds: int = 0

    def __post_init__(self) -> None:
        assert self.seconds, "no widths"
        assert min(self.seconds) > 0, self.seconds
        # As if two rounds had been seen, one accepted: says little and is soon forgotten.
        self._reached = [2.0] * (len(self.seconds) - 1)
        self._accepted = [1.0] * (len(self.seconds) - 1)

    def choose(self, confidences: Sequence[float] | None, most: int) -> int:
        """See `WidthPolicy`."""
        most = min(most, len(self.seconds) - 1)
        self._num_rounds += 1
        if self.explore_every and self._num_rounds % self.explore_every == 0:
            return most
        survival, tokens, width = 1.0, 1.0, 0
        while width < most:
            rate = self._rate(width) if confidences is None else confidences[width]
            survival *= rate
            if self._best_from(width + 1, most, survival, tokens) <= tokens / self.seconds[width]:
                break
            tokens += survival
            width += 1
        return width

    def observe(self, drafted: int, accepted: int) -> None:
        """See `WidthPolicy`; a round weighs half as much after some 35 more."""
        for place in range(min(drafted, accepted + 1, len(self._reached))):
            self._reached[place] = 0.98 * self._reached[place] + 1
            self._accepted[place] = 0.98 * self._accepted[place] + (place < accepted)

    def _rate(self, place: int) -> float:
        return self._accepted[place] / self._reached[place]

    def _best_from(self, width: int, most: int, survival: float, tokens: float) -> float:
        """Most tokens per second of widths from `width` on, whose last draft has `survival`."""
        best = 0.0
        for wider in range(width, most + 1):
            if wider > width:
                survival *= self._rate(wider - 1)
            tokens += survival
            best = max(best, tokens / self.seconds[wider])
        return best
