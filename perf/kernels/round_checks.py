"""Rounds of a device against those of the host, in circumstances drawn at random.

The rounds of the host are those of `Speculator`, with a session that knows no model and a drafter
that is told what to say.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import CapacityError
from inkrt.runtime.executor import Sampling
from inkrt.runtime.executor.round_state import (
    MAX_DRAFTS,
    POLICY_STATE,
    RING_RECORDS,
    ROUND_RECORD,
    ROUND_STATE,
    RoundPolicy,
    RoundRule,
    RoundStatus,
)
from inkrt.runtime.spec.accept import Verdict, coins
from inkrt.runtime.spec.drafter import Proposal
from inkrt.runtime.spec.round import AcceptRule, Round, Speculator
from inkrt.runtime.spec.width import (
    ConfidenceThreshold,
    CostAware,
    FixedWidth,
    RoundCosts,
    WidthPolicy,
)

# Tokens of the row steps.
STEPS = (1, 2, 4, 8)
UNWRITTEN = -0x11111112  # EE bytes
SEED = 0x1234_5678_9ABC_DEF0
VOCAB = 500
THRESHOLD = 0.5625  # a float32 can be it
CONTEXTS = (100, 1000, 5000)
COSTS = [
    RoundCosts(1.0, [1.21, 1.3, 1.43, 1.61, 1.7, 1.93, 2.0, 2.2]),
    RoundCosts(1.1, [1.3, 1.9, 2.43, 2.61, 3.3, 3.93, 4.1, 4.7]),
    RoundCosts(1.3, [1.7, 1.75, 1.8, 1.83, 1.91, 1.93, 2.1, 2.15]),
]

Proposed = tuple[Sequence[int], Sequence[float] | None]


class RoundMemory(ABC):
    """Memory of a rank; who inherits it runs kernels on it.

    Attributes:
        state, ring, tokens, num_tokens, position, error: see `plugins/round/state.cuh`.
        read: tokens that the row step of the last round read.

    Args:
        allocate: gives memory of a size in bytes.
        has_ring: whether it is rank 0.
    """

    def __init__(
        self, allocate: Callable[[int], NDArray[np.uint8]], *, has_ring: bool = True
    ) -> None:
        self.state: NDArray[Any] = allocate(ROUND_STATE.itemsize).view(ROUND_STATE)
        self.ring: NDArray[Any] = allocate(RING_RECORDS * ROUND_RECORD.itemsize).view(ROUND_RECORD)
        self.tokens = allocate(64).view(np.int32)
        self.num_tokens, self.position, self.error = (allocate(4).view(np.int32) for _ in range(3))
        for memory in (self.ring, self.tokens):
            memory.view(np.uint8)[:] = 0xEE
        for memory in (self.state, self.num_tokens, self.position, self.error):
            memory.view(np.uint8)[:] = 0
        self.state["case_of_width"] = [
            next(i for i, step in enumerate(STEPS) if step > width)
            for width in range(MAX_DRAFTS + 1)
        ]
        self.has_ring = has_ring
        self.read: list[int] = []

    def set_policy(
        self, policy: WidthPolicy, contexts: Sequence[int] = (), costs: Sequence[RoundCosts] = ()
    ) -> None:
        """Let the state say what a policy object says."""
        state = self.state[0]
        state["policy"] = RoundPolicy.FIXED
        if isinstance(policy, ConfidenceThreshold):
            state["policy"] = RoundPolicy.THRESHOLD
            state["threshold"] = policy.threshold
        if isinstance(policy, CostAware):
            state["policy"] = RoundPolicy.COST
            state["explore_every"], state["num_first"] = policy.explore_every, policy.num_first
            state["margin"] = policy.margin
            state["num_contexts"] = len(contexts)
            state["contexts"][: len(contexts)] = contexts
            for place, of_context in enumerate(costs):
                state["plain"][place] = of_context.plain
                state["rounds"][place][: len(of_context.rounds)] = of_context.rounds
            state["policy_state"] = policy_state(policy)

    def round(
        self,
        draft: Callable[[], Proposed],
        step: Callable[[list[int]], Sequence[int]],
        verdict: tuple[int, int] | None = None,
        error: int = 0,
    ) -> Any:
        """Run a round, and give its record; None on ranks that show none.

        Args:
            draft: the draft step.
            step: what a row step draws behind the tokens that it reads.
            verdict: of the ratio test.
            error: that a kernel of the row step sets.
        """
        number = int(self.state[0]["round"])
        self.run_round(draft, step, verdict, error)
        assert self.state[0]["round"] == number + 1
        if not self.has_ring:
            return None
        record = self.ring[number % RING_RECORDS]
        assert record["sequence"] == number + 1
        return record

    @abstractmethod
    def run_round(
        self,
        draft: Callable[[], Proposed],
        step: Callable[[list[int]], Sequence[int]],
        verdict: tuple[int, int] | None,
        error: int,
    ) -> None:
        """Run a round; see `round`."""


def policy_state(policy: CostAware) -> tuple[Any, ...]:
    """What a policy has learned, as a POLICY_STATE."""

    def padded(values: list[float]) -> list[float]:
        return values + [0.0] * (MAX_DRAFTS - len(values))

    unread = np.nan if policy._unread is None else policy._unread
    return (
        padded(policy._reached), padded(policy._accepted), unread, policy._num_rounds,
        policy._num_plain, int(policy._drafts_pay), policy._last_width,
    )  # fmt: skip


def costs_at(context: int, most: int) -> RoundCosts:
    """What rounds of up to `most` drafts cost behind a context."""
    place = min(sum(known < context for known in CONTEXTS), len(CONTEXTS) - 1)
    return RoundCosts(COSTS[place].plain, COSTS[place].rounds[: most + 1])


def make_policy(name: str, most: int) -> WidthPolicy:
    """A new policy: fixed, threshold or cost."""
    if name == "fixed":
        return FixedWidth()
    if name == "threshold":
        return ConfidenceThreshold(THRESHOLD)
    return CostAware(lambda context: costs_at(context, most), explore_every=9, num_first=2)


class HostSession:
    """What `Speculator` needs of a session.

    Args:
        length: of the timeline.
        step: what a row step draws behind the tokens that it reads.
    """

    config = SimpleNamespace(model=SimpleNamespace(vocab_size=VOCAB))

    def __init__(self, length: int, end: int, step: Callable[[list[int]], Sequence[int]]) -> None:
        self.length, self.end, self._step = length, end, step
        self.num_read = 0

    def num_writable(self, num_tokens: int) -> int:
        """See `Session`."""
        return max(min(num_tokens, self.end - self.length), 0)

    def decode(self, token: int, sampling: Sampling, **options: int) -> int:  # noqa: ARG002
        """See `Session`."""
        return int(self.step([token], sampling).tokens[0])

    def step(self, tokens: Sequence[int], sampling: Sampling, **options: bool) -> Any:  # noqa: ARG002
        """See `Session`."""
        if self.length + len(tokens) > self.end:
            raise CapacityError("full")
        self.length += len(tokens)
        self.num_read = len(tokens)
        drawn = np.asarray(self._step(list(tokens)), np.int32)
        return SimpleNamespace(tokens=drawn, logits=np.zeros((len(tokens), 1), np.float32))

    def rollback(self, length: int) -> None:
        """See `Session`."""
        self.length = length


class Told:
    """A drafter that proposes what it is told."""

    def __init__(self, draft: Callable[[], Proposed]) -> None:
        self._draft = draft

    def draft(self, *arguments: Any, coupled: bool) -> Proposal:  # noqa: ARG002
        """See `Drafter`."""
        tokens, confidences = self._draft()
        if confidences is not None:  # a drafter gives float32
            confidences = np.asarray(confidences, np.float32).tolist()
        return Proposal(tokens, None, confidences)


class LongTimeline:
    """Stands for a timeline of which only the last token is read."""

    def __init__(self, length: int, last: int) -> None:
        self._length, self._last = length, last

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int | slice) -> Any:
        assert place in (-1, slice(-1, None, None))
        return self._last if place == -1 else [self._last]


def require_same(record: Any, expected: Round, start: int) -> None:
    """Check the record of a round whose anchor was at `start`."""
    assert record["status"] == RoundStatus.OK
    count = record["num_tokens"]
    assert record["tokens"][:count].tolist() == expected.tokens
    assert (record["tokens"][count:] == 0).all()
    assert (record["drafted"], record["proposed"]) == (expected.drafted, expected.proposed)
    assert record["accepted"] == len(expected.tokens) - 1
    assert record["position"] == start + len(expected.tokens)


class Turn:
    """Circumstances of one round, drawn at random.

    Attributes:
        start: position of the anchor.
        left: tokens that the caller can use.
        end: of the positions that may be written.
        drafts: of the drafter.
        confidences: theirs.
        drawn: by the row step.
        forced: drafts that are drawn whatever is in `drawn`.
    """

    def __init__(self, random: np.random.Generator, number: int, *, has_confidences: bool) -> None:
        self.start, self.anchor = int(random.integers(1, 7000)), int(random.integers(VOCAB))
        if random.random() < 0.1:
            self.start = int(random.choice(CONTEXTS))
        few_left, few_free = random.random(2) < 0.15
        self.left = int(random.integers(1, 10)) if few_left else 1000
        self.end = self.start + (int(random.integers(1, 10)) if few_free else 1000)
        self.drafts = random.integers(VOCAB, size=MAX_DRAFTS)
        if random.random() < 0.1:
            bad = random.choice([VOCAB, 2 * VOCAB, 2**31 - 1])
            self.drafts[random.integers(MAX_DRAFTS)] = bad
        # Drafters get better and worse, so that drafting pays at times.
        quality = 0.5 + 0.48 * np.sin(number / 25)
        self.sure = np.clip(random.normal(quality, 0.2, MAX_DRAFTS), 0, 1).astype(np.float32)
        self.sure = np.where(random.random(MAX_DRAFTS) < 0.1, np.float32(THRESHOLD), self.sure)
        self.has_confidences = has_confidences
        is_right = random.random(MAX_DRAFTS) < (self.sure if has_confidences else quality)
        others = VOCAB + 10 + random.integers(90, size=MAX_DRAFTS + 1)
        self.drawn = np.append(np.where(is_right, self.drafts, others[:-1]), others[-1])
        self.verdict = int(random.integers(8)), int(random.integers(VOCAB))
        self.forced = 0

    def draft(self) -> Proposed:
        """What the draft step gives."""
        return self.drafts.tolist(), self.sure.tolist() if self.has_confidences else None

    def step(self, tokens: Sequence[int]) -> Sequence[int]:
        """What is drawn behind each of the tokens."""
        accepted = min(self.forced, len(tokens) - 1)
        return [*self.drafts[:accepted].tolist(), *self.drawn[accepted : len(tokens)].tolist()]

    def accept(self, drafts: Sequence[int], *arguments: Any) -> Verdict:  # noqa: ARG002
        """Stands in for the ratio test."""
        return Verdict(self.verdict[0] % (len(drafts) + 1), self.verdict[1])

    def force(self) -> "Turn":
        """The same for the host, to which drafts that coins accept are those that are drawn."""
        sure = self.sure.astype(np.float64)
        accepted = int(np.cumprod(coins(SEED, self.start, MAX_DRAFTS) < sure).sum())
        # What is drawn in place of a draft that a coin rejects would not be in its stead.
        self.drawn[accepted] = VOCAB + 10
        turn = copy.copy(self)
        turn.has_confidences = True  # whatever the drafter has
        turn.forced = accepted
        return turn


def random_rounds(
    device: RoundMemory,
    policy: WidthPolicy,
    rule: str,
    num_rounds: int,
    *,
    has_confidences: bool = True,
    most: int = MAX_DRAFTS,
) -> list[int]:
    """Rounds that agree with the host's; how many had each width."""
    random = np.random.default_rng(num_rounds)
    device.set_policy(policy, CONTEXTS, [costs_at(context, most) for context in CONTEXTS])
    state = device.state[0]
    state["most"], state["rule"], state["vocab_size"] = most, RoundRule[rule.upper()], VOCAB
    state["seed"] = SEED
    state["num_stop_ids"], state["stop_ids"] = 3, VOCAB + 10  # of which only the first three count
    state["stop_ids"][:3] = VOCAB + 1, VOCAB + 2, VOCAB + 3
    widths = [0] * (most + 1)
    host_rule: AcceptRule = "probabilistic" if rule == "probabilistic" else "coupled"
    for number in range(num_rounds):
        turn = Turn(random, number, has_confidences=has_confidences)
        told = turn.force() if rule == "forced" else turn
        session: Any = HostSession(turn.start, turn.end, told.step)
        drafter: Any = Told(told.draft)
        timeline: Any = LongTimeline(turn.start + 1, turn.anchor)
        speculator = Speculator(drafter, policy, most, host_rule)
        with patch("inkrt.runtime.spec.round.accept_probabilistic", turn.accept):
            expected = speculator.run(
                session, timeline, Sampling(temperature=1.0, seed=SEED), turn.left
            )
        verdict = None
        if rule == "probabilistic":
            verdict = len(expected.tokens) - 1, expected.tokens[-1]

        state["num_left"], state["writable_end"], state["forced"] = turn.left, turn.end, turn.sure
        device.position[0], device.tokens[0] = turn.start, turn.anchor
        record = device.round(turn.draft, turn.step, verdict)
        require_same(record, expected, turn.start)
        assert device.read == [turn.anchor, *turn.drafts[: expected.drafted]]
        assert len(device.read) == session.num_read
        assert device.position[0] == session.length == turn.start + len(expected.tokens)
        assert device.tokens[0] == expected.tokens[-1]
        assert state["num_left"] == turn.left - len(expected.tokens)
        assert state["finished"] == (state["num_left"] == 0)
        state["finished"] = 0
        if isinstance(policy, CostAware):
            wanted = np.array(policy_state(policy), POLICY_STATE)
            for got in (record["policy_state"], state["policy_state"]):
                assert got.tobytes() == wanted.tobytes(), (number, got, wanted)
        widths[expected.drafted] += 1
    assert (device.tokens[most + 1 :] == UNWRITTEN).all()
    return widths
