"""The kernel `sample` on the CPU, thread by thread: the reference's tokens, exact distributions."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from oracles_fused import gumbel_row, keep_set

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from emulator import COMPILER, Emulator  # noqa: E402
from sample_checks import (  # noqa: E402
    Sampler,
    check,
    check_head,
    check_noise,
    check_special,
    expected,
    rows_of,
)

from inkrt.plugins.w4a16.shapes import Dims  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


class Failures(list[str]):
    """Takes reports; holds those of failed checks."""

    def __call__(self, name: str, ok: bool, detail: str) -> None:
        if not ok:
            self.append(f"{name}: {detail}")


def test_noise_is_that_of_the_reference(folder: Path) -> None:
    failed = Failures()
    check_noise(Emulator(folder), failed)
    assert failed == []


# Odd sizes, rows without 16-byte alignment, parts with nothing to do, more quads than threads.
@pytest.mark.parametrize(
    ("vocab", "parts", "threads", "reverse"),
    [
        (131, 1, 32, False),
        (1003, 1, 64, True),
        (300, 2, 32, False),
        (7, 2, 32, True),
        pytest.param(1003, 3, 64, True, marks=pytest.mark.slow),
        pytest.param(300, 5, 32, False, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_the_reference(
    folder: Path, vocab: int, parts: int, threads: int, reverse: bool
) -> None:
    failed = Failures()
    check(Sampler(Emulator(folder, reverse=reverse), vocab, parts, threads), failed)
    assert failed == []


@pytest.mark.parametrize(("vocab", "parts"), [(131, 1), (300, 2)])
def test_special_values_are_treated_as_by_the_reference(
    folder: Path, vocab: int, parts: int
) -> None:
    failed = Failures()
    check_special(Sampler(Emulator(folder), vocab, parts, 32), failed)
    assert failed == []


@pytest.mark.parametrize("bf16", [pytest.param(False, marks=pytest.mark.slow), True])
def test_head_and_draw(folder: Path, bf16: bool) -> None:
    failed = Failures()
    check_head(Emulator(folder), Dims(hidden=256, vocab=301, bf16=bf16), failed)
    assert failed == []


# A vocabulary of 16 tokens whose probabilities span three orders of magnitude, with ties.
LOGITS = np.array(
    [2, -1, 0.5, 0.5, -4, 1, 2, -0.25, -2, 0, 1.5, -3, 0.5, -1, 0.75, -0.5], np.float32
)
DISTRIBUTIONS = {
    "none": {},
    "hot": {"temperature": 1.8},
    "min_p": {"min_p": 0.2},
    "top_k splits a tie": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "top_p splits a tie": {"top_p": 0.2},
    "all": {"temperature": 1.4, "min_p": 0.1, "top_k": 9, "top_p": 0.85},
}


def _chi_square_z(observed: np.ndarray, means: np.ndarray) -> float:
    """The standard normal quantile of a chi-square statistic (Wilson and Hilferty)."""
    dof = len(means) - 1
    statistic = float(((observed - means) ** 2 / means).sum())
    return ((statistic / dof) ** (1 / 3) - (1 - 2 / (9 * dof))) / math.sqrt(2 / (9 * dof))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_follow_the_exact_distribution(folder: Path, name: str) -> None:
    filters = DISTRIBUTIONS[name]
    sampler = Sampler(Emulator(folder), len(LOGITS), 1, 32, count=3)
    rows = np.tile(LOGITS, (8, 1))
    draws = [
        sampler.draw(rows, position=8 * step, seed=2**40 + seed, **filters)
        for seed in range(6)
        for step in range(50)
    ]
    counts = np.bincount(np.concatenate(draws), minlength=len(LOGITS))
    every = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
    kept = keep_set(LOGITS.astype(np.float64), **every)
    weights = np.exp(LOGITS[kept].astype(np.float64) / every["temperature"])
    means = weights / weights.sum() * counts.sum()
    assert counts[kept].sum() == counts.sum() == 8 * len(draws)
    is_rare = means < 10
    if is_rare.any():  # rare tokens share one class
        observed = np.append(counts[kept][~is_rare], counts[kept][is_rare].sum())
        means = np.append(means[~is_rare], means[is_rare].sum())
    else:
        observed = counts[kept]
    # One in 30,000 honest generators would fail; the seeds are fixed.
    assert abs(_chi_square_z(observed, means)) < 4


def test_tokens_have_the_best_score_of_a_float64_oracle(folder: Path) -> None:
    """The oracle shares no code with the reference: probabilities, sorting, Python's integers."""
    vocab, seed, position = 203, 2**63 - 5, 2**31 - 20
    sampler = Sampler(Emulator(folder), vocab, 2, 32)
    filters = {"temperature": 0.7, "top_k": 30, "top_p": 0.97, "min_p": 1e-3}
    for kind in ("wide", "ties"):
        rows = rows_of(vocab, kind, seed=7)
        tokens = sampler.draw(rows, position=position, seed=seed, **filters)
        for r, token in enumerate(tokens):
            row = rows[r].astype(np.float64)
            kept = keep_set(row, **filters)
            scores = row / filters["temperature"] + gumbel_row(seed, position + 1 + r, vocab)
            assert token in kept
            assert scores[token] >= scores[kept].max() - 1e-5


def test_all_tokens_that_tie_with_the_last_are_kept(folder: Path) -> None:
    row = np.zeros(40, np.float32)
    row[[3, 17]] = 1.0
    row[[5, 20, 39]] = 0.5  # the third to fifth largest
    sampler = Sampler(Emulator(folder), 40, 2, 32)
    rows = np.tile(row, (8, 1))
    for filters in ({"top_k": 3}, {"top_k": 5}, {"top_p": 0.12}):
        draws = [sampler.draw(rows, position=8 * i, seed=1, **filters) for i in range(12)]
        assert set(np.concatenate(draws).tolist()) == {3, 5, 17, 20, 39}


def test_edges_of_the_filters(folder: Path) -> None:
    vocab = 64
    rows = rows_of(vocab, "flat", seed=3)
    rows[:, 33] += np.float32(5)  # two thirds of the probability
    sampler = Sampler(Emulator(folder), vocab, 2, 32)
    for filters in (
        {"top_p": 0.5},
        {"top_k": 1},
        {"min_p": 1.0},
        {"min_p": 0.5},
        {"top_p": 1e-30},
        {"top_p": 1e-50},  # 0 in float32
    ):
        assert (sampler.draw(rows, seed=2, **filters) == 33).all()
    free = [sampler.draw(rows, position=8 * i, seed=2) for i in range(20)]
    assert len(set(np.concatenate(free).tolist())) > 20
    # Filters that let everything pass draw what no filter draws.
    for filters in ({"top_p": 1.0}, {"top_k": vocab}, {"top_k": 2**31 - 1}, {"min_p": 1e-30}):
        for i, tokens in enumerate(free):
            assert (sampler.draw(rows, position=8 * i, seed=2, **filters) == tokens).all()


@pytest.mark.parametrize("seed", range(3))
def test_mass_of_top_p_is_exact_to_neighboring_values_of_p(folder: Path, seed: int) -> None:
    """240 tokens tie between 80 others and a tail: they are in or out with the last bit of p."""
    vocab = 400
    generator = np.random.default_rng(seed)
    row = np.zeros(vocab, np.float32)
    best, tail = generator.permutation(vocab)[:160].reshape(2, 80)
    row[best] = 0.5 + generator.random(80, dtype=np.float32)
    row[tail] = -12 - generator.random(80, dtype=np.float32)
    weights = np.exp(row.astype(np.float64) - float(row.max()))
    share = math.fsum(weights[best]) / math.fsum(weights)
    least_out = np.float32(share)
    if float(least_out) > share:
        least_out = np.nextafter(least_out, np.float32(0))
    sampler = Sampler(Emulator(folder), vocab, 2, 32)
    rows = np.tile(row, (8, 1))
    for top_p, is_in in ((least_out, False), (np.nextafter(least_out, np.float32(1)), True)):
        draws = [sampler.draw(rows, position=8 * i, top_p=float(top_p)) for i in range(4)]
        assert (not set(np.concatenate(draws).tolist()) <= set(best.tolist())) == is_in


def test_the_last_row_of_a_prefill_is_drawn_for_its_own_position(folder: Path) -> None:
    vocab = 131
    sampler = Sampler(Emulator(folder), vocab, 1, 32)
    rows = rows_of(vocab, "flat")
    wide = sampler.draw(rows, position=100, seed=9, temperature=2.0)
    last = Sampler(sampler.backend, vocab, 1, 32)
    for r in range(8):
        sampling = {"position": 100, "num_tokens": r + 1, "seed": 9, "temperature": 2.0}
        token = last.draw(rows[r : r + 1], **sampling)
        assert token == wide[r] == expected(rows[r : r + 1], **sampling)
