"""Drawing tokens: Philox, the tails of the noise, filters, exact distributions, reproducibility."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from oracles_fused import keep_set
from torch import Tensor

from inkrt.plugins.caseutil import int32
from inkrt.plugins.noise import Purpose, gumbel, philox4x32, token_bits, uniform
from inkrt.plugins.sample.op import sample, sampling_arguments
from inkrt.plugins.sampling import filtered_logits

# Random123's known answers for philox4x32-10: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip

# A vocabulary of 16 tokens whose probabilities span three orders of magnitude, with ties.
LOGITS = torch.tensor(
    [2.0, -1.0, 0.5, 0.5, -4.0, 1.0, 2.0, -0.25, -2.0, 0.0, 1.5, -3.0, 0.5, -1.0, 0.75, -0.5]
)


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def _draw(
    logits: Tensor, *, position: int = 0, num_tokens: int | None = None, **sampling: float
) -> Tensor:
    return sample(
        logits,
        **sampling_arguments(**sampling),
        position=int32(position),
        num_tokens=int32(num_tokens or len(logits)),
        last_row=num_tokens is not None,
    )


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: str, key: str, expected: str):
    k0, k1 = _words(key)
    # Two equal counters: the function is elementwise.
    counters = torch.tensor([_words(counter)] * 2)
    assert philox4x32(counters, (k0, k1)).tolist() == [_words(expected)] * 2


def test_token_bits_use_all_of_the_key_and_the_counter():
    seed, position = 2**62 + 2**40 + 17, 1_048_575
    positions = torch.tensor([position, position + 1, 0])
    bits = token_bits(seed, positions, Purpose.SAMPLE, 11)
    assert bits.shape == (3, 11)
    for r, p in enumerate(positions.tolist()):
        for token in range(11):
            counter = torch.tensor([token // 4, p, 0, 0])
            block = philox4x32(counter, (seed % 2**32, seed // 2**32))
            assert bits[r, token] == block[token % 4]
    assert len(set(bits.flatten().tolist())) == bits.numel()
    for other in (seed + 1, seed + 2**32):
        assert not (token_bits(other, positions, Purpose.SAMPLE, 11) == bits).any()


def test_gumbel_is_accurate_in_both_tails():
    largest = 2**32 - 1
    near = [0, 1, 2, 5, 1000]
    bits = near + [largest - b for b in near] + [2**31 - 1, 2**31, 2**20, largest - 2**20]
    got = gumbel(torch.tensor(bits))
    assert got.dtype == torch.float32
    with localcontext() as context:
        context.prec = 60
        for value, b in zip(got.tolist(), bits, strict=True):
            u = (Decimal(b) + Decimal("0.5")) / 2**32
            exact = float(-(-u.ln()).ln())
            assert value == np.float32(exact)
    assert got[0] == pytest.approx(-math.log(33 * math.log(2)), rel=1e-6)
    assert got[5] == pytest.approx(33 * math.log(2), rel=1e-6)
    # Every word has its own u, and u is symmetric about 1/2.
    u = uniform(torch.tensor(bits))
    assert len(set(u.tolist())) == len(bits)
    assert torch.equal(u[:5] + u[5:10], torch.ones(5, dtype=torch.float64))


def test_uniform_words_pass_chi_square_by_leading_and_trailing_bits():
    bits = token_bits(3, torch.arange(16), Purpose.SAMPLE, 4000).flatten()
    for part in (bits >> 26, bits & 63):
        counts = torch.bincount(part, minlength=64).double()
        expected = len(bits) / 64
        assert _chi_square_z(float(((counts - expected) ** 2 / expected).sum()), 63) < 4


def _chi_square_z(statistic: float, dof: int) -> float:
    """The standard normal quantile of a chi-square statistic (Wilson and Hilferty)."""
    return ((statistic / dof) ** (1 / 3) - (1 - 2 / (9 * dof))) / math.sqrt(2 / (9 * dof))


FILTERS = {
    "none": {},
    "temperature": {"temperature": 1.8},
    "cold": {"temperature": 0.6},
    "min_p": {"min_p": 0.2},
    "top_k": {"top_k": 6},
    "top_k_splits_a_tie": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "top_p_splits_a_tie": {"top_p": 0.2},
    "top_k_then_top_p": {"top_k": 5, "top_p": 0.75},
    "all": {"temperature": 1.4, "min_p": 0.1, "top_k": 9, "top_p": 0.85},
}
NUM_KEPT = {
    "none": 16, "temperature": 16, "cold": 16, "min_p": 8, "top_k": 8, "top_k_splits_a_tie": 8,
    "top_p": 8, "top_p_splits_a_tie": 2, "top_k_then_top_p": 3, "all": 8,
}  # fmt: skip


def _exact_distribution(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    logits = LOGITS.double().numpy()
    ids = keep_set(logits, temperature, top_k, top_p, min_p)
    weights = np.zeros(len(logits))
    weights[ids] = np.exp(logits[ids] / temperature)
    return weights / weights.sum()


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_exact_filtered_distribution(name: str):
    exact = _exact_distribution(**FILTERS[name])
    kept = np.flatnonzero(exact)
    assert len(kept) == NUM_KEPT[name]
    num_positions, num_seeds = 300, 16
    rows = LOGITS.expand(num_positions, -1)
    draws = torch.cat([_draw(rows, seed=seed, **FILTERS[name]) for seed in range(num_seeds)])
    counts = np.bincount(draws.numpy(), minlength=16)
    expected = exact * num_positions * num_seeds
    assert counts[exact == 0].sum() == 0
    # Chi-square needs a few expected counts in each class: rare tokens share one.
    is_rare = expected[kept] < 10
    observed = [*counts[kept][~is_rare], counts[kept][is_rare].sum()]
    means = [*expected[kept][~is_rare], expected[kept][is_rare].sum()]
    pairs = [(o, m) for o, m in zip(observed, means, strict=True) if m > 0]
    statistic = sum((o - m) ** 2 / m for o, m in pairs)
    # One in 30,000 honest generators would fail; the seeds are fixed.
    assert abs(_chi_square_z(statistic, len(pairs) - 1)) < 4


def test_draws_at_neighboring_positions_and_seeds_are_independent():
    rows = torch.zeros(2001, 4)
    first, second = _draw(rows, seed=1), _draw(rows, seed=2)
    for a, b in ((first[:-1], first[1:]), (first, second)):
        counts = torch.bincount((a * 4 + b).long(), minlength=16).double()
        expected = len(a) / 16
        assert abs(_chi_square_z(float(((counts - expected) ** 2 / expected).sum()), 15)) < 4


@pytest.mark.parametrize("seed", range(20))
def test_filters_keep_the_oracles_set(seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(300, generator=generator) * 4
    if seed % 2:
        logits = logits.round()
    draw = torch.rand(4, generator=generator)
    sampling = {
        "temperature": 0.25 + float(draw[0]),
        "top_k": int(draw[1] * 40),
        "top_p": 0.3 + 0.7 * float(draw[2]),
        "min_p": 0.05 * float(draw[3]),
    }
    kept = filtered_logits(logits, **sampling)
    expected = torch.from_numpy(keep_set(logits.double().numpy(), **sampling))
    assert torch.equal(kept.isfinite().nonzero().flatten(), expected.sort().values)
    assert torch.equal(kept[expected], logits[expected] / sampling["temperature"])


def test_top_p_mass_is_that_after_top_k():
    # Of all, 0.7 needs three tokens; of the two best alone, renormalized, it needs one.
    logits = torch.tensor([0.4, 0.15, 0.15, 0.1, 0.1, 0.1]).log()
    assert filtered_logits(logits, 1.0, 0, 0.5, 0.0).isfinite().sum() == 3
    logits = torch.tensor([0.4, 0.15, 0.1, 0.1, 0.1, 0.15001]).log()
    assert filtered_logits(logits, 1.0, 2, 0.7, 0.0).isfinite().tolist() == [True] + [False] * 5


def test_top_p_never_removes_all_tokens_nor_counts_forever():
    logits = torch.zeros(4097)  # equal: the smallest set is one token, and all tie with it
    assert filtered_logits(logits, 1.0, 0, 1e-9, 0.0).isfinite().all()
    logits[7] = 1e-3
    assert filtered_logits(logits, 1.0, 0, 1e-9, 0.0).isfinite().nonzero().tolist() == [[7]]
    just_below_1 = float(np.nextafter(np.float32(1), np.float32(0)))
    assert filtered_logits(logits, 1.0, 0, just_below_1, 0.0).isfinite().all()


def test_greedy_takes_the_lowest_of_equal_logits_and_ignores_the_filters():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-3.0, -2.0, -1.0, -1.0]])
    tokens = _draw(logits, temperature=0.0, top_k=1, top_p=0.1, min_p=1.0, seed=9)
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == [1, 0, 2]
    wide = torch.randn(3, 70_001, generator=torch.Generator().manual_seed(0))
    wide[0, [69_999, 40_000, 33_333]] = 50.0
    wide[1, [70_000, 64]] = 50.0
    wide[2, [5, 4]] = 50.0
    assert _draw(wide, temperature=0.0).tolist() == [33_333, 64, 4]


def test_min_p_of_one_keeps_only_the_largest():
    rows = LOGITS.expand(64, -1)
    assert set(_draw(rows, min_p=1.0, seed=1).tolist()) == {0, 6}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_a_largest_logit_that_is_not_finite_is_taken(filters: dict[str, float], temperature: float):
    inf, nan = math.inf, math.nan
    rows = torch.tensor(
        [
            [1.0, -inf, nan, 3.0, inf, nan],
            [1.0, -inf, 0.0, inf, 3.0, inf],
            [-inf] * 6,
        ]
    )
    assert _draw(rows, temperature=temperature, seed=3, **filters).tolist() == [2, 3, 0]


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.01}])
def test_a_logit_of_minus_infinity_is_never_drawn(filters: dict[str, float]):
    rows = torch.tensor([-math.inf, 0.5, -math.inf, 0.0, 0.25]).expand(200, -1)
    assert set(_draw(rows, seed=4, **filters).tolist()) == {1, 3, 4}


def test_same_arguments_same_tokens_and_other_seed_other_tokens():
    rows = torch.zeros(8, 5000)
    first = _draw(rows, seed=5)
    assert torch.equal(first, _draw(rows, seed=5))
    assert not (first == _draw(rows, seed=6)).any()
    assert not (first == _draw(rows, seed=5 + 2**32)).any()


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "top_k": 50, "min_p": 0.01}])
def test_token_does_not_depend_on_the_number_of_rows(filters: dict[str, float]):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(11, 1003, generator=generator) * 2
    all_rows = _draw(logits, position=100, seed=77, temperature=1.5, **filters)
    for r in range(len(logits)):
        arguments = {"seed": 77, "temperature": 1.5, **filters}
        alone = _draw(logits[r : r + 1], position=100 + r, **arguments)
        # A prefill of r + 1 tokens from position 100 draws for the same place in the timeline.
        after_prefill = _draw(logits[r : r + 1], position=100, num_tokens=r + 1, **arguments)
        assert alone.item() == after_prefill.item() == all_rows[r].item()


def test_logits_are_not_written():
    logits = LOGITS[None].clone()
    _draw(logits, top_k=3, seed=1)
    assert torch.equal(logits[0], LOGITS)
