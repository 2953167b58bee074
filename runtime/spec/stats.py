"""What speculation has done, counted in tokens that reached the caller.

A round is one step of the target on drafted tokens. Steps without drafts are counted apart, so that
a drafter that has nothing to propose does not look like one that is wrong.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationStats:
    """Counts of one generation, or of several added up.

    Attributes:
        rounds: steps that read drafts.
        plain_steps: decode steps, which read none.
        drafted: tokens that rounds read as drafts.
        accepted: drafts that became output. A generation that ends inside a round counts those up
            to its last token.
        emitted: tokens that rounds and plain steps gave; the one that reading the prompt gives is
            not among them.
        drafted_at: by place in the block, rounds that read a draft there.
        accepted_at: by place in the block, rounds whose draft there became output.
    """

    rounds: int = 0
    plain_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    drafted_at: list[int] = field(default_factory=list)
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

    def count(self, drafted: int, accepted: int, emitted: int) -> None:
        """Add a step.

        Args:
            drafted: drafts it read; 0 for a plain step.
            accepted: drafts that reached the caller.
            emitted: all tokens that reached the caller.
        """
        self.emitted += emitted
        if not drafted:
            self.plain_steps += 1
            return
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        for counts, number in ((self.drafted_at, drafted), (self.accepted_at, accepted)):
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
        self.rounds += sign * other.rounds
        self.plain_steps += sign * other.plain_steps
        self.drafted += sign * other.drafted
        self.accepted += sign * other.accepted
        self.emitted += sign * other.emitted
        for counts, more in (
            (self.drafted_at, other.drafted_at),
            (self.accepted_at, other.accepted_at),
        ):
            counts.extend([0] * (len(more) - len(counts)))
            for place, number in enumerate(more):
                counts[place] += sign * number
