"""Rounds of speculative decoding that a device runs ahead of the host.

A round is one launch: it drafts, chooses how many of the drafts to verify, verifies and accepts,
and leaves the inputs of the next one. So the host can queue rounds without knowing what they give,
and reads their records one behind. What a round does is what `runtime.spec.round.Speculator` does
on the host. This module knows no GPU; the executor gives it a device and says when anything else
has used that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from inkrt.errors import DeviceError
from inkrt.runtime.executor import StepInput
from inkrt.runtime.executor.round_state import (
    MAX_CONTEXTS,
    MAX_DRAFTS,
    MAX_STOP_IDS,
    RoundStatus,
)
from inkrt.runtime.spec.width import (
    ConfidenceThreshold,
    CostAware,
    CostState,
    FixedWidth,
    WidthPolicy,
)

DeviceRule = Literal["coupled", "probabilistic", "forced"]
# Rounds that may be queued behind the one that is waited for. One keeps a device at work while the
# host is late by less than a round; with two, a session could not go on where it stands, as two
# rounds of eight write further than can be undone.
MAX_ROUNDS_AHEAD = 1


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """What stays the same in all rounds of a request.

    Attributes:
        rule: how drafts are accepted; "forced" is for benchmarks: of drafts that are not judged,
            draft j is accepted with probability `forced[j]` if those before it are.
        policy: chooses widths. What it has learned is that of the device when a chain of rounds
            begins; from then on it must be set from the records.
        most: drafts of a round, 1 to MAX_DRAFTS.
        stop_ids: tokens that end the request.
        forced: see `rule`; as many as `most`.
    """

    rule: DeviceRule
    policy: WidthPolicy
    most: int
    stop_ids: frozenset[int] = frozenset()
    forced: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundInput:
    """One round.

    Attributes:
        step: the anchor, its position, and the session's state; whether drafts are coupled.
        settings: of the request.
        num_left: tokens that the caller can still use, at least 1.
        writable_end: positions below it may be written, and the page table covers them; the
            anchor's is one of them.
    """

    step: StepInput
    settings: RoundSettings
    num_left: int
    writable_end: int


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What a round gives.

    Attributes:
        status: only a round that is OK has tokens.
        tokens: the accepted drafts and one more.
        drafted: drafts that were verified.
        proposed: drafts that there were.
        position: of the anchor behind the round.
        learned: by a `CostAware` policy; None for others.
    """

    status: RoundStatus
    tokens: list[int]
    drafted: int
    proposed: int
    position: int
    learned: CostState | None = None


class RoundDevice(Protocol):
    """What a queue drives. Work of the device, all of it, runs in the order of the calls."""

    def begin_rounds(self, given: RoundInput) -> None:
        """Wait for all work, forget records, and set all that the next round reads."""

    def extend_rounds(self, first: int, pages: Sequence[int], writable_end: int) -> None:
        """Set entries of the page table from `first` on, and raise what may be written.

        For the rounds that are queued from now.
        """

    def queue_round(self) -> None:
        """Queue a round; it leaves the inputs of the next one."""

    def await_record(self, number: int) -> RoundRecord:
        """Wait for a round, counted from 0 since `begin_rounds`.

        Raises:
            DeviceError: a kernel gave up, or the device is idle and has not run the round.
        """


def is_for_device(settings: RoundSettings, rules: frozenset[DeviceRule]) -> bool:
    """Whether a device that accepts drafts by these rules can run such rounds."""
    policy, most = settings.policy, settings.most
    can_choose = isinstance(policy, FixedWidth | ConfidenceThreshold)
    if isinstance(policy, CostAware) and (costs := policy.on_device) is not None:
        can_choose = len(costs.contexts) <= MAX_CONTEXTS and all(
            len(of_context.rounds) == most + 1 for of_context in costs.costs
        )
    return (
        can_choose
        and settings.rule in rules
        and most <= MAX_DRAFTS
        and len(settings.stop_ids) <= MAX_STOP_IDS
    )


@dataclass(slots=True)
class _Chain:
    """Queued rounds that feed each other.

    Attributes:
        settings: of all rounds.
        step: that the host must ask for next to stay in the chain.
        num_left: as above.
        pages: what the device's page table holds.
        writable_end: what the device knows of it.
        num_queued: rounds.
        num_taken: rounds whose records the host has read.
    """

    settings: RoundSettings
    step: StepInput
    num_left: int
    pages: list[int]
    writable_end: int
    num_queued: int = 0
    num_taken: int = 0

    def continues(self, given: RoundInput) -> bool:
        """Whether the round is the next one here."""
        step, own = given.step, self.step
        num_common = min(len(self.pages), len(step.pages))
        return (
            given.settings == self.settings
            and given.num_left == self.num_left
            and step.position == own.position
            and list(step.tokens) == list(own.tokens)
            and step.slot == own.slot
            and step.sampling == own.sampling
            and step.is_coupled == own.is_coupled
            and list(step.pages[:num_common]) == self.pages[:num_common]
        )


class RoundQueue:
    """Answers calls for rounds from those that are queued already, where they are those asked for.

    What was queued in vain, because something else came in between, is run again when it is asked
    for: from the same state, so with the same result. The first round of a chain is run alone:
    sessions that take turns queue nothing in vain.

    Args:
        device: runs the rounds.
        rules: that it can accept drafts by.
    """

    def __init__(self, device: RoundDevice, rules: frozenset[DeviceRule]) -> None:
        self._device = device
        self._chain: _Chain | None = None
        self.rules = rules

    def takes(self, settings: RoundSettings) -> bool:
        """Whether the device can run such rounds."""
        return is_for_device(settings, self.rules)

    def run(self, given: RoundInput, num_ahead: int) -> RoundRecord:
        """Run a round, or take its record if it has run ahead.

        Args:
            given: what to run; `takes` its settings.
            num_ahead: most rounds to queue behind it, which the caller is likely to ask for next.

        Raises:
            DeviceError: a kernel gave up.
        """
        assert given.num_left >= 1, given
        assert given.writable_end > given.step.position, given
        chain, self._chain = self._chain, None  # an error ends it
        if chain is None or not chain.continues(given):
            self._device.begin_rounds(given)
            pages = list(given.step.pages)
            chain = _Chain(given.settings, given.step, given.num_left, pages, given.writable_end)
        else:
            self._extend(chain, given)
        record = self._take(chain, min(num_ahead, chain.num_taken))
        assert record.position == given.step.position + len(record.tokens), record
        chain.num_left -= len(record.tokens)
        chain.step = StepInput(
            record.tokens[-1:],
            record.position,
            given.step.slot,
            (),
            given.step.sampling,
            given.step.is_coupled,
        )
        has_ended = not given.settings.stop_ids.isdisjoint(record.tokens)
        if chain.num_left > 0 and not has_ended:
            self._chain = chain
        return record

    def clear(self) -> None:
        """The device's inputs or state are used otherwise: the next round begins anew."""
        self._chain = None

    def _extend(self, chain: _Chain, given: RoundInput) -> None:
        new = list(given.step.pages[len(chain.pages) :])
        if new or given.writable_end > chain.writable_end:
            self._device.extend_rounds(len(chain.pages), new, given.writable_end)
            chain.pages += new
            chain.writable_end = given.writable_end

    def _take(self, chain: _Chain, num_ahead: int) -> RoundRecord:
        """The record of the next round that had a position to write.

        Rounds that were queued before there was one say so; the first that was queued after that
        is another one.
        """
        last = chain.num_queued
        while True:
            while chain.num_queued <= chain.num_taken + num_ahead:
                self._device.queue_round()
                chain.num_queued += 1
            record = self._device.await_record(chain.num_taken)
            chain.num_taken += 1
            if record.status is RoundStatus.OK:
                return record
            if record.status is not RoundStatus.FULL or chain.num_taken > last:
                raise DeviceError(
                    f"the GPU ran no round at position {chain.step.position}: "
                    f"{record.status.name.lower()}; open the session again"
                )
