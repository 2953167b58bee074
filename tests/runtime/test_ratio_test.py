"""The ratio test and the choice of widths leave the target's distribution as it is.

Two ways: all blocks of a small vocabulary with their exact probabilities, and rounds with the real
random numbers against the target's distribution by chi-square.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inkrt.runtime.executor import Sampling
from inkrt.runtime.noise import Purpose, token_bits, uniform
from inkrt.runtime.sampling import draw, one_hot, probabilities
from inkrt.runtime.spec.accept import (
    accept_block,
    accept_probabilistic,
    coins,
    draw_residual,
    residual,
    thresholds,
)
from inkrt.runtime.spec.width import (
    ConfidenceThreshold,
    CostAware,
    FixedWidth,
    RoundCosts,
    WidthPolicy,
)

MakePolicy = Callable[[], WidthPolicy]
Choose = Callable[[NDArray[np.int64]], NDArray[np.int64]]

V = 6
WIDTH = 3
SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "cold": Sampling(temperature=0.3),
    "plain": Sampling(temperature=1.0),
    "hot": Sampling(temperature=2.0),
    "top_k": Sampling(temperature=1.0, top_k=3),
    "top_p": Sampling(temperature=1.0, top_p=0.7),
    "min_p": Sampling(temperature=1.0, min_p=0.2),
    "all": Sampling(temperature=1.4, top_k=4, top_p=0.85, min_p=0.1),
}


def oracle(logits: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    """The filters on one row of probabilities, token by token; no two logits may be equal."""
    if sampling.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    weights = np.exp(logits / sampling.temperature)
    weights[weights < sampling.min_p * weights.max()] = 0
    order = np.argsort(-weights)
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    weights /= weights.sum()
    mass = 0.0
    for token in order:
        if mass >= sampling.top_p:
            weights[token] = 0
        mass += weights[token]
    return weights / weights.sum()


@dataclass(frozen=True)
class Chain:
    """A target and a drafter that know the last token only.

    Attributes:
        logits: float32 [V, V], of the target behind each token.
        draft_logits: of the drafter.
        is_certain: the drafter proposes its likeliest token and has no distribution.
    """

    logits: NDArray[np.float32]
    draft_logits: NDArray[np.float32]
    is_certain: bool = False

    @classmethod
    def make(cls, kind: str, size: int = V) -> "Chain":
        generator = np.random.default_rng(11)
        logits = (generator.standard_normal((size, size)) * 1.5).astype(np.float32)
        other = generator.standard_normal((size, size)).astype(np.float32)
        drafts = {
            "near": logits + 1.2 * other,
            "same": logits,
            "unrelated": 2 * other,
            "opposite": -logits,
            "onehot": logits + other,
        }
        return cls(logits, drafts[kind], is_certain=kind == "onehot")

    def target(self, sampling: Sampling) -> NDArray[np.float64]:
        return probabilities(self.logits, sampling)

    def draft(self, sampling: Sampling) -> NDArray[np.float64]:
        if self.is_certain:
            return one_hot(self.draft_logits.argmax(-1), len(self.logits))
        return probabilities(self.draft_logits, sampling)


KINDS = ("near", "same", "unrelated", "opposite", "onehot")


def output_distribution(chain: Chain, sampling: Sampling, choose: Choose) -> NDArray[np.float64]:
    """Exact, of the WIDTH + 1 tokens behind token 0: one round, then plain draws."""
    target, draft = chain.target(sampling), chain.draft(sampling)
    size = len(target)
    blocks = np.array(list(itertools.product(range(size), repeat=WIDTH)))
    before = np.concatenate([np.zeros((len(blocks), 1), int), blocks], 1)
    p, q = target[before], draft[before[:, :-1]]
    chance = np.take_along_axis(q, blocks[..., None], -1)[..., 0].prod(-1)
    widths = choose(blocks)
    limits, shares = thresholds(blocks, p, q, widths)
    shares = np.concatenate([np.ones((len(blocks), 1)), shares], 1)
    result = np.zeros([size] * (WIDTH + 1))
    for accepted in range(WIDTH + 1):
        is_it = limits[:, accepted - 1] if accepted else np.ones(len(blocks))
        here = chance * is_it * (1 - limits[:, accepted:]).prod(-1)
        rest = residual(p, q, np.full(len(blocks), accepted), shares[:, accepted], widths)
        rest = rest / rest.sum(-1, keepdims=True)
        for block, weight, row in zip(blocks, here, rest, strict=True):
            if weight > 0:
                tail = row.reshape([size] + [1] * (WIDTH - accepted))
                for place in range(WIDTH - accepted):
                    shape = [1] * place + [size, size] + [1] * (WIDTH - accepted - place - 1)
                    tail = tail * target.reshape(shape)
                result[tuple(block[:accepted])] += weight * tail
    return result


def plain_distribution(target: NDArray[np.float64]) -> NDArray[np.float64]:
    whole = target[0]
    for _ in range(WIDTH):
        whole = whole[..., None] * target
    return whole


def confidences_of(chain: Chain, sampling: Sampling, blocks: NDArray[np.int64]) -> np.ndarray:
    """c_j = 1 - TV(p_j, q_j): reads the tokens before x_j and no other."""
    overlap = np.minimum(chain.target(sampling), chain.draft(sampling)).sum(-1)
    before = np.concatenate([np.zeros((len(blocks), 1), int), blocks[:, :-1]], 1)
    return overlap[before]


def chooser(make_policy: MakePolicy, chain: Chain, sampling: Sampling) -> Choose:
    def choose(blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        rows = confidences_of(chain, sampling, blocks)
        found, back = np.unique(rows, axis=0, return_inverse=True)
        widths = [make_policy().choose(row.tolist(), WIDTH, 0) for row in found]
        return np.array(widths)[back.ravel()]

    return choose


def by_cost(*seconds: float) -> MakePolicy:
    costs = RoundCosts(seconds[0], seconds)
    return lambda: CostAware(lambda _: costs, explore_every=10**9, num_first=0)


POLICIES: dict[str, MakePolicy] = {
    "fixed": FixedWidth,
    "threshold": lambda: ConfidenceThreshold(0.68),
    "cost": by_cost(1.0, 1.65, 2.2, 2.8),
    "stairs": by_cost(1.0, 1.35, 2.2, 2.3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_block_together_gives_the_targets_distribution(kind: str, name: str, policy: str):
    chain, sampling = Chain.make(kind, 4), SETTINGS[name]
    choose = chooser(POLICIES[policy], chain, sampling)
    expected = plain_distribution(np.array([oracle(row, sampling) for row in chain.logits]))
    got = output_distribution(chain, sampling, choose)
    assert np.abs(got - expected).max() < 2e-7  # the oracle knows no float32


def test_policies_do_choose_different_widths():
    for size in (4, V):
        chain, sampling = Chain.make("near", size), SETTINGS["plain"]
        blocks = np.array(list(itertools.product(range(size), repeat=WIDTH)))
        for name in ("threshold", "cost"):
            widths = chooser(POLICIES[name], chain, sampling)(blocks)
            assert len(set(widths.tolist())) > 1, (size, name, widths)


def test_a_choice_that_sees_the_draft_is_found_out():
    """Paper, appendix A: the best width of a block, found with all its confidences, is biased."""
    chain, sampling = Chain.make("near", 4), SETTINGS["plain"]

    def choose(blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        ahead = confidences_of(chain, sampling, np.roll(blocks, -1, 1))  # c_j of the next token
        return np.where(ahead[:, 1] < np.median(ahead), 0, WIDTH)

    got = output_distribution(chain, sampling, choose)
    assert np.abs(got - plain_distribution(chain.target(sampling))).max() > 1e-3


def test_accepts_at_least_as_many_as_the_test_token_by_token():
    for kind in KINDS:
        chain, sampling = Chain.make(kind, 4), SETTINGS["plain"]
        target, draft = chain.target(sampling), chain.draft(sampling)
        blocks = np.array(list(itertools.product(range(4), repeat=WIDTH)))
        before = np.concatenate([np.zeros((len(blocks), 1), int), blocks], 1)
        p, q = target[before], draft[before[:, :-1]]
        at = blocks[..., None]
        px = np.take_along_axis(p[:, :-1], at, -1)[..., 0]
        qx = np.take_along_axis(q, at, -1)[..., 0]
        chance = qx.prod(-1)
        one_by_one = np.minimum(1, px / np.where(qx > 0, qx, 1)).cumprod(-1).sum(-1) @ chance
        limits, _ = thresholds(blocks, p, q, np.full(len(blocks), WIDTH))
        at_least = 1 - (1 - limits[:, ::-1]).cumprod(-1)[:, ::-1]  # P(A >= i)
        assert at_least.sum(-1) @ chance >= one_by_one - 1e-12
        if kind == "near":
            assert at_least.sum(-1) @ chance > one_by_one + 1e-3


def simulate(
    chain: Chain,
    sampling: Sampling,
    make_policy: MakePolicy,
    num_tokens: int,
    seeds: NDArray[np.int64],
    *,
    by_position_only: bool = False,
) -> NDArray[np.int64]:
    """The first tokens behind token 0, one row per seed, by as many rounds as they take."""
    target, draft = chain.target(sampling), chain.draft(sampling)
    output = np.zeros((len(seeds), num_tokens + WIDTH + 2), int)  # place 0 is the first anchor
    anchors = np.zeros(len(seeds), int)
    choose = chooser_behind(make_policy, chain, sampling)
    while (running := anchors < num_tokens).any():
        rows = np.flatnonzero(running)
        seed, anchor = seeds[rows], anchors[rows]
        key = np.zeros_like(anchor) if by_position_only else anchor
        tokens = [output[rows, anchor]]
        for place in range(WIDTH):
            logits = chain.draft_logits[tokens[-1]]
            drawn = logits.argmax(-1)
            if not chain.is_certain:
                drawn = draw(
                    logits, sampling, anchor + place + 1,
                    seeds=seed, purpose=Purpose.DRAFT, anchors=key,
                )  # fmt: skip
            tokens.append(drawn)
        block = np.stack(tokens, 1)
        p, q, drafts = target[block], draft[block[:, :-1]], block[:, 1:]
        widths = choose(block)
        coin = coins(seed, anchor, WIDTH)
        if by_position_only:
            where = anchor[:, None] + np.arange(1, WIDTH + 1)
            coin = uniform(token_bits(seed[:, None], where, Purpose.ACCEPT, 1)[..., 0])
        accepted, share = accept_block(drafts, p, q, coin, widths)
        rest = residual(p, q, accepted, share, widths)
        token = draw_residual(rest, seed, key, anchor - key + accepted)
        for place in range(WIDTH):
            output[rows, anchor + 1 + place] = drafts[:, place]
        output[rows, anchor + 1 + accepted] = token
        anchors[rows] = anchor + 1 + accepted
    return output[:, 1 : num_tokens + 1]


def chooser_behind(make_policy: MakePolicy, chain: Chain, sampling: Sampling) -> Choose:
    """As `chooser`, for blocks with their anchor in front."""
    overlap = np.minimum(chain.target(sampling), chain.draft(sampling)).sum(-1)

    def choose(blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        found, back = np.unique(blocks[:, :-1], axis=0, return_inverse=True)
        widths = [make_policy().choose(overlap[tokens].tolist(), WIDTH, 0) for tokens in found]
        return np.array(widths)[back.ravel()]

    return choose


def p_value(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Of a chi-square test; cells with fewer than 5 expected count as one."""
    counts, expected = counts.ravel(), expected.ravel() * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token that cannot be drawn"
    is_large = expected >= 5
    seen = np.append(counts[is_large], counts[~is_large].sum())
    wanted = np.append(expected[is_large], expected[~is_large].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    if len(seen) < 2:
        return 1.0
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2).double()))


def p_values(tokens: NDArray[np.int64], target: NDArray[np.float64]) -> list[float]:
    """Of the first three tokens and of the pairs that follow each other."""
    size = len(target)
    results, at = [], np.eye(size)[0]
    for place in range(tokens.shape[1]):
        joint = at[:, None] * target
        at = joint.sum(0)
        results.append(p_value(np.bincount(tokens[:, place], minlength=size), at))
        if place:
            pairs = tokens[:, place - 1] * size + tokens[:, place]
            results.append(p_value(np.bincount(pairs, minlength=size**2), joint))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_rounds_draw_from_the_target(name: str, kind: str, policy: str):
    check_rounds(name, kind, policy, 100_000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["greedy", "plain", "all"])
def test_rounds_draw_from_the_target_few_samples(name: str, kind: str):
    check_rounds(name, kind, "threshold", 10_000)


def check_rounds(name: str, kind: str, policy: str, num_samples: int) -> None:
    chain, sampling = Chain.make(kind), SETTINGS[name]
    seeds = np.arange(num_samples, dtype=np.int64) * 2_654_435_761 + 12345
    tokens = simulate(chain, sampling, POLICIES[policy], 4, seeds)
    expected = np.array([oracle(row, sampling) for row in chain.logits])
    values = p_values(tokens, expected)
    assert min(values) > 1e-4, values


def test_noise_keyed_by_position_alone_is_found_out():
    """Why rounds key their noise by the anchor too (see `runtime/spec/accept.py`)."""
    chain, sampling = Chain.make("near"), SETTINGS["plain"]
    seeds = np.arange(100_000, dtype=np.int64)
    target = chain.target(sampling)
    reused = simulate(chain, sampling, FixedWidth, 4, seeds, by_position_only=True)
    assert min(p_values(reused, target)) < 1e-6
    fresh = simulate(chain, sampling, FixedWidth, 4, seeds)
    assert min(p_values(fresh, target)) > 1e-4


@pytest.mark.parametrize("width", range(WIDTH + 1))
@pytest.mark.parametrize("kind", ["near", "onehot"])
def test_one_round_is_a_row_of_many(width: int, kind: str):
    """The function that takes logits of one round decides as the arrays of many do."""
    chain = Chain.make(kind)
    for seed in range(40):
        sampling = Sampling(temperature=0.9, top_k=5, seed=seed)
        anchor = 3 * seed
        tokens = [seed % V]
        for place in range(width):
            row = chain.draft_logits[tokens[-1]]
            place_of = anchor + place + 1
            drawn = draw(row, sampling, place_of, purpose=Purpose.DRAFT, anchors=anchor)
            tokens.append(int(row.argmax() if chain.is_certain else drawn))
        rows = chain.draft_logits[tokens[:-1]]
        verdict = accept_probabilistic(
            tokens[1:], chain.logits[tokens], None if chain.is_certain else rows, sampling, anchor
        )
        p, q = chain.target(sampling)[tokens][None], chain.draft(sampling)[tokens[:-1]][None]
        block = np.array(tokens[1:], np.int64)[None]
        # One row more than is verified: its content must not matter.
        p, q = np.concatenate([p, p[:, :1]], 1), np.concatenate([q, np.full((1, 1, V), 1 / V)], 1)
        block = np.concatenate([block, [[0]]], 1)
        widths = np.array([width])
        accepted, share = accept_block(block, p, q, coins([seed], [anchor], width + 1), widths)
        rest = residual(p, q, accepted, share, widths)
        token = draw_residual(rest, [seed], [anchor], accepted)
        assert (verdict.accepted, verdict.token) == (accepted[0], token[0])


def test_a_draft_that_its_distribution_cannot_give_is_an_error():
    logits = np.array([[0.0, 5.0, 1.0]] * 2, np.float32)
    with pytest.raises(AssertionError, match="not of its distribution"):
        accept_probabilistic([0], logits, logits[:1], Sampling(temperature=1.0, top_k=1), 0)


def test_greedy_accepts_what_the_target_says_and_nothing_else():
    logits = np.array([[0, 2, 1], [3, 0, 1], [0, 1, 2]], np.float32)
    greedy = Sampling(temperature=0.0)
    for drafts, accepted, token in (
        ([1, 0], 2, 2), ([1, 2], 1, 0), ([0, 0], 0, 1), ([1], 1, 0), ([], 0, 1),
    ):  # fmt: skip
        verdict = accept_probabilistic(drafts, logits[: len(drafts) + 1], None, greedy, 8)
        assert (verdict.accepted, verdict.token) == (accepted, token)
