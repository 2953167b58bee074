"""Kernels of a round on the CPU, thread by thread: what `Speculator.run` does, double for double."""

import copy
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from emulator import COMPILER, Emulator  # noqa: E402
from round_device import NOTHING, UNWRITTEN, Proposed, RoundDevice, policy_state  # noqa: E402

from inkrt.errors import CapacityError  # noqa: E402
from inkrt.runtime.executor import Sampling  # noqa: E402
from inkrt.runtime.executor import round_state as mirror  # noqa: E402
from inkrt.runtime.executor.round_state import (  # noqa: E402
    MAX_DRAFTS,
    POLICY_STATE,
    RING_RECORDS,
    RoundRule,
    RoundStatus,
)
from inkrt.runtime.session import Session  # noqa: E402
from inkrt.runtime.spec import round as host_round  # noqa: E402
from inkrt.runtime.spec.accept import Verdict, coins  # noqa: E402
from inkrt.runtime.spec.drafter import Drafter, Proposal  # noqa: E402
from inkrt.runtime.spec.round import AcceptRule, Round, Speculator  # noqa: E402
from inkrt.runtime.spec.width import (  # noqa: E402
    ConfidenceThreshold,
    CostAware,
    FixedWidth,
    RoundCosts,
    WidthPolicy,
)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU")

VOCAB = 500
SEED = 0x1234_5678_9ABC_DEF0
CONTEXTS = (100, 1000, 5000)
COSTS = [
    RoundCosts(1.0, [1.21, 1.3, 1.43, 1.61, 1.7, 1.93, 2.0, 2.2]),
    RoundCosts(1.1, [1.3, 1.9, 2.43, 2.61, 3.3, 3.93, 4.1, 4.7]),
    RoundCosts(1.3, [1.7, 1.75, 1.8, 1.83, 1.91, 1.93, 2.1, 2.15]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def costs_at(context: int, most: int) -> RoundCosts:
    place = min(sum(known < context for known in CONTEXTS), len(CONTEXTS) - 1)
    return RoundCosts(COSTS[place].plain, COSTS[place].rounds[: most + 1])


def make_policy(name: str, most: int) -> WidthPolicy:
    if name == "fixed":
        return FixedWidth()
    if name == "threshold":
        return ConfidenceThreshold(0.55)
    return CostAware(lambda context: costs_at(context, most), explore_every=9, num_first=2)


# ---- the host's rounds: a session that knows no model, and a drafter that is told what to say ----


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
        return max(min(num_tokens, self.end - self.length), 0)

    def decode(self, token: int, sampling: Sampling, *, num_more: int = 0) -> int:
        return int(self.step([token], sampling).tokens[0])

    def step(self, tokens: Sequence[int], sampling: Sampling, *, wants_logits: bool = True) -> Any:
        if self.length + len(tokens) > self.end:
            raise CapacityError("full")
        self.length += len(tokens)
        self.num_read = len(tokens)
        drawn = np.asarray(self._step(list(tokens)), np.int32)
        return SimpleNamespace(tokens=drawn, logits=np.zeros((len(tokens), 1), np.float32))

    def rollback(self, length: int) -> None:
        self.length = length


class Told:
    """A drafter that proposes what it is told."""

    def __init__(self, draft: Callable[[], Proposed]) -> None:
        self._draft = draft

    def draft(self, *arguments: Any, coupled: bool) -> Proposal:
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


# ---- one round after the other, each of other circumstances ----


def require_same(record: Any, expected: Round, start: int) -> None:
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
        self.has_confidences = has_confidences
        is_right = random.random(MAX_DRAFTS) < (self.sure if has_confidences else quality)
        others = VOCAB + 10 + random.integers(90, size=MAX_DRAFTS + 1)
        self.drawn = np.append(np.where(is_right, self.drafts, others[:-1]), others[-1])
        self.verdict = int(random.integers(8)), int(random.integers(VOCAB))
        self.forced = 0

    def draft(self) -> Proposed:
        return self.drafts.tolist(), self.sure.tolist() if self.has_confidences else None

    def step(self, tokens: Sequence[int]) -> Sequence[int]:
        accepted = min(self.forced, len(tokens) - 1)
        return [*self.drafts[:accepted].tolist(), *self.drawn[accepted : len(tokens)].tolist()]

    def accept(self, drafts: Sequence[int], *arguments: Any) -> Verdict:
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
    device: RoundDevice,
    policy: WidthPolicy,
    rule: str,
    num_rounds: int,
    monkeypatch: pytest.MonkeyPatch,
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
        session = HostSession(turn.start, turn.end, told.step)
        monkeypatch.setattr(host_round, "accept_probabilistic", turn.accept)
        expected = Speculator(cast(Drafter, Told(told.draft)), policy, most, host_rule).run(
            cast(Session, session),
            cast(Sequence[int], LongTimeline(turn.start + 1, turn.anchor)),
            Sampling(temperature=1.0, seed=SEED),
            turn.left,
        )
        verdict = None
        if rule == "probabilistic":
            verdict = len(expected.tokens) - 1, expected.tokens[-1]

        state["num_left"], state["writable_end"], state["forced"] = turn.left, turn.end, turn.sure
        device.position[0], device.tokens[0] = turn.start, turn.anchor
        read: list[int] = []

        def step(tokens: list[int], read: list[int] = read, turn: Turn = turn) -> Sequence[int]:
            read += tokens
            return turn.step(tokens)

        record = device.round(turn.draft, step, verdict)
        require_same(record, expected, turn.start)
        assert read == [turn.anchor, *turn.drafts[: expected.drafted]]
        assert len(read) == session.num_read
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


@pytest.mark.parametrize("rule", ["coupled", "probabilistic", "forced"])
@pytest.mark.parametrize("policy", ["fixed", "threshold", "cost"])
def test_rounds_are_those_of_the_host(
    folder: Path, policy: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = RoundDevice(Emulator(folder))
    widths = random_rounds(device, make_policy(policy, MAX_DRAFTS), rule, 300, monkeypatch)
    assert min(widths) > 0, widths
