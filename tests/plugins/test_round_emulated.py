"""Kernels of a round on the CPU, thread by thread: what the host does, double for double."""

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from emulator import COMPILER, Emulator  # noqa: E402
from round_device import UNWRITTEN, Proposed, RoundDevice, policy_state  # noqa: E402
from round_host import (  # noqa: E402
    CONTEXTS,
    THRESHOLD,
    VOCAB,
    HostSession,
    LongTimeline,
    Told,
    costs_at,
    make_policy,
    require_same,
)

from inkrt.runtime.executor import Sampling  # noqa: E402
from inkrt.runtime.executor.round_state import MAX_DRAFTS, POLICY_STATE, RoundRule  # noqa: E402
from inkrt.runtime.spec import round as host_round  # noqa: E402
from inkrt.runtime.spec.accept import Verdict, coins  # noqa: E402
from inkrt.runtime.spec.round import AcceptRule, Speculator  # noqa: E402
from inkrt.runtime.spec.width import CostAware, WidthPolicy  # noqa: E402

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU")
SEED = 0x1234_5678_9ABC_DEF0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


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
        return self.drafts.tolist(), self.sure.tolist() if self.has_confidences else None

    def step(self, tokens: Sequence[int]) -> Sequence[int]:
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
        session: Any = HostSession(turn.start, turn.end, told.step)
        monkeypatch.setattr(host_round, "accept_probabilistic", turn.accept)
        drafter: Any = Told(told.draft)
        timeline: Any = LongTimeline(turn.start + 1, turn.anchor)
        expected = Speculator(drafter, policy, most, host_rule).run(
            session, timeline, Sampling(temperature=1.0, seed=SEED), turn.left
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


# The others take a second each; what they share with the ones above is the code of one kernel.
@pytest.mark.parametrize(
    ("policy", "most", "has_confidences", "reverse"),
    [
        ("cost", 3, True, True),
        ("cost", MAX_DRAFTS, False, False),
        ("cost", 1, True, False),
        ("fixed", 2, False, True),
    ],
)
def test_narrower_blocks_and_drafters_without_confidences(
    folder: Path,
    policy: str,
    most: int,
    has_confidences: bool,
    reverse: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = RoundDevice(Emulator(folder, reverse=reverse))
    widths = random_rounds(
        device, make_policy(policy, most), "coupled", 200, monkeypatch,
        has_confidences=has_confidences, most=most,
    )  # fmt: skip
    assert min(widths) > 0, widths


@pytest.mark.slow
@pytest.mark.parametrize("margin", [0.0, 0.04, 0.3])
@pytest.mark.parametrize("most", [4, 7])
def test_costs_decide_as_on_the_host_for_long(
    folder: Path, most: int, margin: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy("cost", most)
    assert isinstance(policy, CostAware)
    policy.margin, policy.explore_every = margin, 32
    device = RoundDevice(Emulator(folder))
    widths = random_rounds(device, policy, "coupled", 5000, monkeypatch, most=most)
    assert min(widths) > 0, widths
