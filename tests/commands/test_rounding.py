"""The rule that tells rounding from a defect, on distances whose answer is known."""

import dataclasses

import numpy as np
import pytest

from inkrt.commands.rounding import Nearness

NUM_ROWS = 200


def drawn(seed: int, *, defect: float = 0.0) -> Nearness:
    """Rows of errors like those of trained models: most about 0.01, few ten times that.

    A defect is one more error, independent of rounding, in each row of the engine.
    """
    generator = np.random.default_rng(seed)
    ours, theirs = 0.01 * np.exp(generator.normal(0, 0.5, (2, NUM_ROWS)))
    flips = generator.random((2, NUM_ROWS)) < 0.03
    ours[flips[0]] += 0.1
    theirs[flips[1]] += 0.1
    right = generator.random((2, NUM_ROWS)) < 0.95
    return Nearness(np.hypot(ours, defect), theirs, right[0], right[1])


@pytest.mark.parametrize("seed", range(20))
def test_rounding_passes_whoever_is_whose_engine(seed: int) -> None:
    near = drawn(seed)
    assert near.is_rounding
    assert Nearness(near.theirs, near.ours, near.theirs_top1, near.ours_top1).is_rounding


@pytest.mark.parametrize("seed", range(20))
def test_an_error_as_large_as_rounding_fails(seed: int) -> None:
    near = drawn(seed, defect=0.015)
    assert not near.is_rounding
    assert "200 rows that differ are further from float32 than transformers" in near.describe()


def constant(num_rows: int = 50) -> Nearness:
    ones, right = np.full(num_rows, 0.01), np.ones(num_rows, bool)
    return Nearness(ones, ones, right, right)


def test_at_least_50_rows_are_needed() -> None:
    assert constant(50).is_rounding
    assert not constant(49).is_rounding
    assert "49 rows that differ are too few" in constant(49).describe()
    assert not constant(0).is_rounding


@pytest.mark.parametrize(("factor", "passes"), [(1.29, True), (1.31, False)])
def test_median(factor: float, passes: bool) -> None:
    near = constant()
    assert dataclasses.replace(near, ours=factor * near.ours).is_rounding == passes


@pytest.mark.parametrize(("outlier", "passes"), [(0.50, True), (0.52, False)])
def test_a_few_rows_far_off_are_seen_in_the_mean(outlier: float, passes: bool) -> None:
    """49 rows of 0.01 and one of 0.51 have a mean of 0.02."""
    near = constant()
    ours = near.ours.copy()
    ours[7] = outlier
    assert dataclasses.replace(near, ours=ours).is_rounding == passes


@pytest.mark.parametrize(
    ("lost", "won", "passes"), [(9, 0, True), (10, 0, False), (20, 5, True), (21, 5, False)]
)
def test_most_likely_tokens_are_lost_by_chance_only(lost: int, won: int, passes: bool) -> None:
    """9 of 9 are 3 standard deviations; 20 of 25 are 3.0, and 21 of 26 are 3.1."""
    near = constant()
    ours_top1, theirs_top1 = near.ours_top1.copy(), near.theirs_top1.copy()
    ours_top1[:lost] = False
    theirs_top1[lost : lost + won] = False
    changed = dataclasses.replace(near, ours_top1=ours_top1, theirs_top1=theirs_top1)
    assert changed.is_rounding == passes


def test_rows_that_are_no_numbers_fail() -> None:
    near = constant()
    ours = near.ours.copy()
    ours[0] = np.nan
    assert not dataclasses.replace(near, ours=ours).is_rounding
