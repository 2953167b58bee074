"""What the real round emits is distributed as the target says: chi-square, rule by rule.

The session is made up: it knows a table of logits by the last token, and so does its drafter. All
else is real: drafter protocol, policies, rules and noise. One long chain of tokens is cut into
transitions, transitions behind anchors, and pairs; given where they start, these are independent.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_ratio_test import KINDS, POLICIES, SETTINGS, Chain, oracle

from inkrt.runtime.executor import Sampling, StepOutput
from inkrt.runtime.noise import Purpose, gumbel, token_bits
from inkrt.runtime.sampling import filtered_logits
from inkrt.runtime.spec.drafter import EngineDrafter, Proposal
from inkrt.runtime.spec.round import AcceptRule, Speculator
from inkrt.runtime.spec.width import CostAware, FixedWidth, RoundCosts

V, WIDTH, SEED = 6, 3, 20_261_130
# One that skips, explores, fits rates and changes its mind, unlike those that forget each round.
LEARNING = RoundCosts(1.0, [1.25, 1.4, 1.6, 1.7])
ALL_POLICIES = {**POLICIES, "learning": lambda: CostAware(lambda _: LEARNING, explore_every=6)}


class TableSession:
    """A session whose target and drafter know nothing but the last token."""

    def __init__(self, chain: Chain, sampling: Sampling, prompt: Sequence[int]) -> None:
        self.chain, self.sampling = chain, sampling
        self.length = len(prompt) - 1
        self.config = SimpleNamespace(model=SimpleNamespace(vocab_size=V))
        self.scores, self.draft_scores = (
            logits if sampling.temperature == 0 else filtered_logits(logits, sampling)
            for logits in (chain.logits, chain.draft_logits)
        )
        overlap = np.minimum(chain.target(sampling), chain.draft(sampling)).sum(-1)
        self.overlap = np.minimum(overlap, 1).astype(np.float32)

    def takes_rounds(self, _settings: object) -> bool:
        return False

    def num_writable(self, num_tokens: int) -> int:
        return num_tokens

    def decode(self, token: int, sampling: Sampling, *, num_more: int = 0) -> int:  # noqa: ARG002
        return int(self.step([token], sampling, wants_logits=False).tokens[0])

    def step(
        self, tokens: Sequence[int], sampling: Sampling, *, wants_logits: bool = True
    ) -> StepOutput:
        assert sampling == self.sampling
        drawn = self._scores(self.scores[tokens], Purpose.SAMPLE).argmax(-1)
        self.length += len(tokens)
        rows = self.chain.logits[tokens]
        return StepOutput(drawn.astype(np.int32), rows if wants_logits else rows[:0])

    def draft(self, token: int, sampling: Sampling, *, coupled: bool, wants_logits: bool) -> Any:
        assert sampling == self.sampling
        assert coupled != wants_logits
        noise = np.zeros((WIDTH, V))
        if not self.chain.is_certain:
            purpose = Purpose.SAMPLE if coupled else Purpose.DRAFT
            noise = self._scores(noise, purpose)
        before, drawn = [], [token]
        for row in noise:
            before.append(drawn[-1])
            scores = self.chain.draft_logits if self.chain.is_certain else self.draft_scores
            drawn.append(int((scores[before[-1]] + row).argmax()))
        logits = self.chain.draft_logits[before]
        return SimpleNamespace(
            tokens=np.array(drawn[1:], np.int32),
            logits=logits if wants_logits else logits[:0],
            confidences=self.overlap[before],
        )

    def rollback(self, length: int) -> None:
        assert length <= self.length
        self.length = length

    def _scores(self, rows: NDArray[Any], purpose: Purpose) -> NDArray[Any]:
        if self.sampling.temperature == 0:
            return rows
        positions = self.length + 1 + np.arange(len(rows))
        anchor = 0 if purpose == Purpose.SAMPLE else self.length
        return rows + gumbel(token_bits(self.sampling.seed, positions, purpose, V, anchor))


class CertainEngineDrafter(EngineDrafter):
    """Drafts of a drafter that has no distribution."""

    def draft(self, *args: Any, **options: Any) -> Proposal:
        return replace(super().draft(*args, **options), logits=None)


class Emitted:
    """Tokens of one long generation.

    Attributes:
        tokens: with the first anchor.
        anchors: places in them of the anchors of rounds.
        accepted: drafts accepted by each round, -1 for plain steps.
    """

    def __init__(
        self, chain: Chain, sampling: Sampling, policy: str, rule: AcceptRule, num_tokens: int
    ) -> None:
        session: Any = TableSession(chain, sampling, [0])
        drafter = CertainEngineDrafter() if chain.is_certain else EngineDrafter()
        speculator = Speculator(drafter, ALL_POLICIES[policy](), WIDTH, rule)
        self.tokens, self.anchors, self.accepted = [0], [], []
        self.widths: set[int] = set()
        while len(self.tokens) <= num_tokens:
            self.anchors.append(len(self.tokens) - 1)
            step = speculator.run(session, self.tokens, sampling, num_tokens + 100)
            self.tokens += step.tokens
            self.widths.add(step.drafted)
            self.accepted.append(len(step.tokens) - 1 if step.drafted else -1)
            assert session.length == len(self.tokens) - 1


def rows_p_value(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Of a chi-square test of rows [n, cells], each given its total; small cells count as one."""
    statistic, freedom = 0.0, 0
    for row, chances in zip(counts, expected, strict=True):
        assert row[chances == 0].sum() == 0, "a token that cannot be drawn"
        wanted = chances * row.sum()
        is_large = wanted >= 5
        seen = np.append(row[is_large], row[~is_large].sum())
        wanted = np.append(wanted[is_large], wanted[~is_large].sum())
        seen, wanted = seen[wanted > 0], wanted[wanted > 0]
        if len(seen) > 1:
            statistic += float(((seen - wanted) ** 2 / wanted).sum())
            freedom += len(seen) - 1
    if not freedom:
        return 1.0
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2).double()))


def p_values(emitted: Emitted, target: NDArray[np.float64]) -> list[float]:
    tokens, starts = np.array(emitted.tokens), np.array(emitted.anchors)
    singles = np.zeros((V, V), np.int64)
    np.add.at(singles, (tokens[:-1], tokens[1:]), 1)
    behind_anchors = np.zeros((V, V), np.int64)
    np.add.at(behind_anchors, (tokens[starts], tokens[starts + 1]), 1)
    first = tokens[0:-2:2]
    second, third = tokens[1:-1:2][: len(first)], tokens[2::2][: len(first)]
    pairs = np.zeros((V, V, V), np.int64)
    np.add.at(pairs, (first, second, third), 1)
    joint = target[:, :, None] * target[None]
    return [
        rows_p_value(singles, target),
        rows_p_value(behind_anchors, target),
        rows_p_value(pairs.reshape(V, -1), joint.reshape(V, -1)),
    ]


def check(name: str, kind: str, policy: str, rule: AcceptRule, num_tokens: int) -> None:
    chain, sampling = Chain.make(kind, V), replace(SETTINGS[name], seed=SEED)
    emitted = Emitted(chain, sampling, policy, rule, num_tokens)
    target = np.array([oracle(row, sampling) for row in chain.logits])
    values = p_values(emitted, target)
    assert min(values) > 1e-4, values
    # Drafts that are always right, or nearly so as where all is flat, are all worth reading.
    if policy == "learning" and kind != "same" and name != "hot":
        assert len(emitted.widths) > 1, emitted.widths


@pytest.mark.parametrize("rule", ["coupled", "probabilistic"])
@pytest.mark.parametrize(
    ("name", "kind", "policy"),
    [
        ("greedy", "near", "threshold"),
        ("cold", "unrelated", "learning"),
        ("plain", "near", "fixed"),
        ("plain", "opposite", "threshold"),
        ("hot", "onehot", "cost"),
        ("all", "near", "stairs"),
    ],
)
def test_few_samples(name: str, kind: str, policy: str, rule: AcceptRule) -> None:
    check(name, kind, policy, rule, 4_000)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["coupled", "probabilistic"])
@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("name", SETTINGS)
def test_many_samples(name: str, policy: str, rule: AcceptRule) -> None:
    # Every kind of drafter meets every policy and every setting, though not both at once.
    place = list(SETTINGS).index(name) + list(ALL_POLICIES).index(policy)
    check(name, KINDS[place % len(KINDS)], policy, rule, 100_000)


def test_a_round_that_peeks_is_found_out() -> None:
    """The test can fail: a policy that looks at the drafts biases what is emitted."""
    chain, sampling = Chain.make("near", V), replace(SETTINGS["plain"], seed=SEED)

    class Peeking(CertainEngineDrafter):
        def draft(self, *args: Any, **options: Any) -> Proposal:
            proposal = EngineDrafter.draft(self, *args, **options)
            return proposal if proposal.tokens[0] < V // 2 else Proposal()

    session: Any = TableSession(chain, sampling, [0])
    speculator = Speculator(Peeking(), FixedWidth(), WIDTH, "probabilistic")
    emitted: Any = SimpleNamespace(tokens=[0], anchors=[])
    while len(emitted.tokens) < 8_000:
        emitted.anchors.append(len(emitted.tokens) - 1)
        emitted.tokens += speculator.run(session, emitted.tokens, sampling, 100).tokens
    assert min(p_values(emitted, chain.target(sampling))) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_coupled_rounds_emit_the_tokens_of_plain_decoding(
    name: str, kind: str, policy: str
) -> None:
    chain, sampling = Chain.make(kind, V), replace(SETTINGS[name], seed=7)
    session = TableSession(chain, sampling, [0])
    plain = [0]
    for _ in range(150):
        plain.append(session.decode(plain[-1], sampling))
    assert Emitted(chain, sampling, policy, "coupled", 150).tokens[:151] == plain


def expected_accepted(chain: Chain, sampling: Sampling) -> NDArray[np.float64]:
    """Mean number of accepted drafts behind each anchor, over all blocks.

    By the theorem of block verification: at least i are accepted with probability
    P_i = min(1, P_{i-1} p_i / q_i).
    """
    target = np.array([oracle(row, sampling) for row in chain.logits])
    draft = np.array([oracle(row, sampling) for row in chain.draft_logits])
    if chain.is_certain:
        draft = np.eye(V)[chain.draft_logits.argmax(-1)]
    means = np.zeros(V)
    for anchor, size in itertools.product(range(V), range(1, WIDTH + 1)):
        for block in itertools.product(range(V), repeat=size):
            chance, share, last = 1.0, 1.0, anchor
            for token in block:
                chance *= draft[last, token]
                if chance == 0:
                    break
                share = min(1.0, share * target[last, token] / draft[last, token])
                last = token
            means[anchor] += chance * share
    return means


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["plain", "hot", "all"])
def test_probabilistic_acceptance_is_that_of_p_and_q(name: str, kind: str) -> None:
    chain, sampling = Chain.make(kind, V), replace(SETTINGS[name], seed=SEED)
    means = expected_accepted(chain, sampling)
    emitted = Emitted(chain, sampling, "fixed", "probabilistic", 3_000)
    accepted = np.array(emitted.accepted)
    excess = accepted - means[np.array(emitted.tokens)[emitted.anchors]]
    # The excess over the mean is a martingale, so its sum is known to so many standard deviations.
    deviation = excess.std() * np.sqrt(len(excess))
    rounding = 1e-6 * len(excess)  # the oracle knows no float32
    assert abs(excess.sum()) <= 4.5 * deviation + rounding, (accepted.mean(), excess.mean())
    if kind == "same":
        assert (accepted == WIDTH).all()
    coupled = Emitted(chain, sampling, "fixed", "coupled", 3_000)
    if kind == "near":
        assert np.mean(coupled.accepted) < accepted.mean()
