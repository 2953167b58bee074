"""What speculation has done, counted in tokens that reached the caller.

A round is one step of the target on drafted tokens. Steps without drafts are counted apart, so that
a drafter that has nothing to propose does not look like one that is wrong. Two shares of acceptance
are told apart, which are easily confused: of all rounds those whose draft at a place was accepted,
and of the rounds that came to that place. Source: dspark.md section 8.
"""

from dataclasses import dataclass, field, fields
from itertools import pairwise


@dataclass(slots=True)
class SpeculationStats:
    """Counts of one generation, or of several added up.

    For all of them emitted = rounds + accepted + plain_steps - cut, and each of `drafted_at`,
    `reached_at` and `accepted_at` falls from place to place.

    Attributes:
        rounds: steps that read drafts.
        plain_steps: decode steps, which read none.
        proposed: tokens that the drafter proposed, whether or not they were read.
        drafted: tokens that rounds read as drafts.
        accepted: drafts that became output. A generation that ends inside a round counts those up
            to its last token.
        emitted: tokens that rounds and plain steps gave; the one that reading the prompt gives is
            not among them.
        on_device: steps, rounds and plain ones, that the device chose and judged by itself.
        cut: rounds whose last token to become output is a draft: the generation ended there.
        drafted_at: by place in the block, rounds that read a draft there.
        reached_at: those whose drafts before that place all became output, and which went on.
        accepted_at: by place in the block, rounds whose draft there became output.
    """

    rounds: int = 0
    plain_steps: int = 0
    proposed: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    cut: int = 0
    on_device: int = 0
    drafted_at: list[int] = field(default_factory=list)
    reached_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a round gives, with the one behind the drafts; 0 without rounds."""
        return (self.emitted - self.plain_steps) / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that a step of the target gives, rounds and plain ones; 0 without steps."""
        steps = self.rounds + self.plain_steps
        return self.emitted / steps if steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafts that rounds read; 0 without any."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_at(self) -> list[float]:
        """By place in the block, the share of all rounds whose draft there was accepted."""
        return [accepted / self.rounds for accepted in self.accepted_at]

    @property
    def conditional_acceptance_at(self) -> list[float]:
        """By place, the share of the rounds that reached a draft there; 0 where none did."""
        pairs = zip(self.accepted_at, self.reached_at, strict=True)
        return [accepted / reached if reached else 0.0 for accepted, reached in pairs]

    @property
    def rounds_of_length(self) -> list[int]:
        """Rounds by the number of drafts that became output, from 0."""
        at_least = [self.rounds, *self.accepted_at, 0]
        return [more - most for more, most in pairwise(at_least)]

    def count(
        self,
        drafted: int,
        accepted: int,
        emitted: int,
        *,
        proposed: int = 0,
        on_device: bool = False,
    ) -> None:
        """Add a step.

        Args:
            drafted: drafts it read; 0 for a plain step.
            accepted: drafts that reached the caller.
            emitted: all tokens that reached the caller; as many as were accepted if the generation
                ended with one of them, else one more.
            proposed: what the drafter had proposed, if that is more than `drafted`.
            on_device: whether the device ran it by itself.
        """
        assert accepted <= emitted <= accepted + 1, (accepted, emitted)
        assert accepted <= drafted, (accepted, drafted)
        self.emitted += emitted
        self.proposed += max(proposed, drafted)
        self.on_device += on_device
        if not drafted:
            self.plain_steps += 1
            return
        is_cut = emitted == accepted
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.cut += is_cut
        reached = accepted if is_cut else min(accepted + 1, drafted)
        for counts, number in (
            (self.drafted_at, drafted),
            (self.reached_at, reached),
            (self.accepted_at, accepted),
        ):
            counts.extend([0] * (drafted - len(counts)))
            for place in range(number):
                counts[place] += 1

    def add(self, other: "SpeculationStats") -> None:
        """Add the counts of another generation."""
        self._combine(other, 1)

    def copy(self) -> "SpeculationStats":
        """The counts as they are now."""
        copy = SpeculationStats()
        copy.add(self)
        return copy

    def since(self, earlier: "SpeculationStats") -> "SpeculationStats":
        """What has been added to a `copy` made earlier."""
        copy = self.copy()
        copy._combine(earlier, -1)
        return copy

    def _combine(self, other: "SpeculationStats", sign: int) -> None:
        for count in fields(self):
            mine, more = getattr(self, count.name), getattr(other, count.name)
            if isinstance(mine, list):
                mine.extend([0] * (len(more) - len(mine)))
                for place, number in enumerate(more):
                    mine[place] += sign * number
            else:
                setattr(self, count.name, mine + sign * more)
