"""How many of the drafts of a round to verify.

Under the ratio test whether draft j is verified may depend on anything known before x_j was drawn,
and on nothing else (dspark.md 6.8 and 7.4): earlier rounds, and the confidences c_1..c_j, since c_j
reads x_{j-1} at most. So every policy here goes from left to right, looks at c_j only when it comes
to draft j and never comes back: a stopping time. In particular it does not search all widths for
the best one with the confidences of this block, which would look ahead; what it expects of later
drafts comes from earlier rounds alone. Under the coupled rule no choice can change a token.

What a policy has learned ends with its session: a request gives the same output whatever was asked
before it.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class WidthPolicy(Protocol):
    """Chooses widths for one session."""

    def skip(self, context: int) -> int:
        """Plain steps to take from here on, before drafting again; 0 to draft now.

        Asked before each round that has room for drafts; the next answer counts anew.

        Args:
            context: tokens in front of the round.
        """

    def choose(self, confidences: Sequence[float] | None, most: int, context: int) -> int:
        """Drafts to verify, 0..most.

        Args:
            confidences: c_j, probability that draft j is accepted if those before it are, made
                before draft j was drawn; None if the drafter has none.
            most: drafts there are, at least 1.
            context: tokens in front of the round.
        """

    def observe(self, drafted: int, accepted: int) -> None:
        """Hear how many of the verified drafts were accepted."""


@dataclass(frozen=True, slots=True)
class FixedWidth:
    """All drafts."""

    def skip(self, context: int) -> int:  # noqa: ARG002
        """See `WidthPolicy`; never skips."""
        return 0

    def choose(self, confidences: Sequence[float] | None, most: int, context: int) -> int:  # noqa: ARG002
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

    def skip(self, context: int) -> int:  # noqa: ARG002
        """See `WidthPolicy`; never skips."""
        return 0

    def choose(self, confidences: Sequence[float] | None, most: int, context: int) -> int:  # noqa: ARG002
        """See `WidthPolicy`; the drafter must have confidences."""
        assert confidences is not None, "a drafter without confidences"
        return next((j for j in range(most) if confidences[j] < self.threshold), most)

    def observe(self, drafted: int, accepted: int) -> None:
        """See `WidthPolicy`."""


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Seconds of steps behind one context.

    Attributes:
        plain: of a plain step, nothing drafted.
        rounds: of a round that verifies 0, 1, ... drafts, the time to draft included.
    """

    plain: float
    rounds: Sequence[float]


@dataclass(frozen=True, slots=True)
class CostsByContext:
    """Costs at some contexts; between them those of the next one count, behind the last its own.

    Attributes:
        contexts: tokens in front of a round, rising, at least one.
        costs: as many.
    """

    contexts: tuple[int, ...]
    costs: tuple[RoundCosts, ...]

    def __call__(self, context: int) -> RoundCosts:
        """Costs of a round with `context` tokens in front."""
        return self.costs[min(bisect_left(self.contexts, context), len(self.contexts) - 1)]


@dataclass(frozen=True, slots=True)
class CostState:
    """What a `CostAware` has learned.

    Attributes:
        reached: by place in the block, weight of the drafts that were judged there.
        accepted: that of those among them that were accepted.
        num_rounds: rounds that were chosen.
        num_plain: plain steps that are left of those that were decided on.
        drafts_pay: whether they did when it was last asked.
        last_width: of the last round.
        unread: confidence of the draft that the last round stopped at, if it says something.
    """

    reached: tuple[float, ...]
    accepted: tuple[float, ...]
    num_rounds: int
    num_plain: int
    drafts_pay: bool
    last_width: int
    unread: float | None


@dataclass(slots=True)
class CostAware:
    """The width that is expected to give the most tokens per second.

    Draft j is verified if, with what is known before it is drawn, some width from j on promises
    more tokens per second than j - 1 does. Beyond j, and where there are no confidences, the
    shares of drafts that earlier rounds accepted stand in for them. Where earlier rounds say that
    no width pays, nothing is drafted for a while. A choice is given up only for one that is better
    by `margin`, so that noise does not make widths jump.

    Attributes:
        costs: of rounds by context.
        explore_every: after so many rounds one verifies everything, so that shares of far drafts
            do not stay at what they once were, and so many plain steps are taken where drafting
            does not pay; at least 1.
        margin: least gain, as a share.
        num_first: rounds that verify everything before anything is known: enough to tell a drafter
            that is mostly right from one that is mostly wrong.
        on_device: of rounds that a device runs by itself, which are cheaper; None if it cannot go
            by this policy.
    """

    costs: Callable[[int], RoundCosts]
    explore_every: int = 32
    margin: float = 0.04
    num_first: int = 4
    on_device: CostsByContext | None = None
    _reached: list[float] = field(default_factory=list)
    _accepted: list[float] = field(default_factory=list)
    _num_rounds: int = 0
    _num_plain: int = 0
    _drafts_pay: bool = True
    _last_width: int = 0
    _unread: float | None = None

    def __post_init__(self) -> None:
        assert self.explore_every >= 1, self.explore_every
        costs = self.costs(0)
        assert costs.plain > 0, costs
        assert min(costs.rounds) > 0, costs
        # As if two rounds had been seen, one accepted: says little and is soon forgotten.
        self._reached = [2.0] * (len(costs.rounds) - 1)
        self._accepted = [1.0] * (len(costs.rounds) - 1)
        self._last_width = len(costs.rounds) - 1

    def skip(self, context: int) -> int:
        """See `WidthPolicy`."""
        if self._num_plain == 0:
            if self._is_exploring():
                return 0
            costs = self.costs(context)
            best = max((tokens / seconds for tokens, seconds in self._expected(costs)), default=0.0)
            gain = best * costs.plain
            bound = 1 / (1 + self.margin) if self._drafts_pay else 1 + self.margin
            self._drafts_pay = gain > bound
            if self._drafts_pay:
                return 0
            self._num_plain = self.explore_every
            # The round behind these explores.
            self._num_rounds += -(self._num_rounds + 1) % self.explore_every
        left = self._num_plain
        self._num_plain -= 1
        for place, reached in enumerate(self._reached):  # what is old weighs less, but not nothing
            if reached > 2:
                self._reached[place] *= 0.98
                self._accepted[place] *= 0.98
        return left

    def choose(self, confidences: Sequence[float] | None, most: int, context: int) -> int:
        """See `WidthPolicy`."""
        seconds = self.costs(context).rounds
        most = min(most, len(seconds) - 1)
        is_exploring = self._is_exploring()
        self._num_rounds += 1
        self._unread = None
        if is_exploring:
            return most
        survival, tokens, width = 1.0, 1.0, 0
        while width < most:
            rate = self._rate(width) if confidences is None else confidences[width]
            survival *= rate
            here = tokens / seconds[width]
            beyond = self._best_from(width + 1, most, survival, tokens, seconds)
            if width < self._last_width:
                is_wider_better = beyond * (1 + self.margin) > here
            else:
                is_wider_better = beyond > here * (1 + self.margin)
            if not is_wider_better:
                break
            tokens += survival
            width += 1
        self._last_width = width
        self._unread = None if confidences is None or width == most else confidences[width]
        if width == 0 and self._unread is not None:
            self._see(0, self._unread)
        return width

    def observe(self, drafted: int, accepted: int) -> None:
        """See `WidthPolicy`; a round weighs half as much after some 35 more."""
        for place in range(min(drafted, accepted + 1, len(self._reached))):
            self._see(place, float(place < accepted))
        if accepted == drafted and self._unread is not None:
            self._see(drafted, self._unread)

    @property
    def state(self) -> CostState:
        """What it has learned; setting it replaces that."""
        return CostState(
            tuple(self._reached),
            tuple(self._accepted),
            self._num_rounds,
            self._num_plain,
            self._drafts_pay,
            self._last_width,
            self._unread,
        )

    @state.setter
    def state(self, state: CostState) -> None:
        assert len(state.reached) == len(state.accepted) == len(self._reached), state
        self._reached, self._accepted = list(state.reached), list(state.accepted)
        self._num_rounds, self._num_plain = state.num_rounds, state.num_plain
        self._drafts_pay, self._last_width = state.drafts_pay, state.last_width
        self._unread = state.unread

    def _is_exploring(self) -> bool:
        """Whether the next round verifies everything: the first few, and then now and then."""
        return self._num_rounds < self.num_first or (self._num_rounds + 1) % self.explore_every == 0

    def _see(self, place: int, acceptance: float) -> None:
        """Take in what became of a draft, or what was thought of the first that was not read.

        Without the latter, only drafts that looked good would count.
        """
        self._reached[place] = 0.98 * self._reached[place] + 1
        self._accepted[place] = 0.98 * self._accepted[place] + acceptance

    def _rate(self, place: int) -> float:
        return self._accepted[place] / self._reached[place]

    def _expected(self, costs: RoundCosts) -> list[tuple[float, float]]:
        """Tokens and seconds of rounds that verify 1, 2, ... drafts, going by earlier rounds."""
        survival, tokens, expected = 1.0, 1.0, []
        for place, seconds in enumerate(costs.rounds[1:]):
            survival *= self._rate(place)
            tokens += survival
            expected.append((tokens, seconds))
        return expected

    def _best_from(
        self, width: int, most: int, survival: float, tokens: float, seconds: Sequence[float]
    ) -> float:
        """Most tokens per second of widths from `width` on, whose last draft has `survival`."""
        best = 0.0
        for wider in range(width, most + 1):
            if wider > width:
                survival *= self._rate(wider - 1)
            tokens += survival
            best = max(best, tokens / seconds[wider])
        return best
