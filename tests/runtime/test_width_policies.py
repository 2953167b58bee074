"""Widths: what they may look at, and that the cost-aware one pays.

That no policy changes the distribution is shown in test_ratio_test.py.
"""

from collections.abc import Callable

import numpy as np
import pytest

from inkrt.runtime.spec.width import ConfidenceThreshold, CostAware, FixedWidth, WidthPolicy

SECONDS = [1, 1.2, 1.5, 1.55, 2, 2.4, 3, 3.1]


def test_threshold_cuts_before_the_first_that_is_below():
    assert ConfidenceThreshold(0.5).choose([0.9, 0.5, 0.4, 0.9], 4) == 2
    assert ConfidenceThreshold(0.5).choose([0.9, 0.5, 0.4, 0.9], 1) == 1
    assert ConfidenceThreshold(0.5).choose(None, 4) == 4
    assert ConfidenceThreshold(0.0).choose([0.0, 0.0], 2) == 2


@pytest.mark.parametrize(
    "make",
    [FixedWidth, lambda: ConfidenceThreshold(0.6), lambda: CostAware(SECONDS)],
    ids=["fixed", "threshold", "cost"],
)
def test_no_confidence_behind_the_one_it_stops_at_matters(make: Callable[[], WidthPolicy]):
    generator = np.random.default_rng(3)
    for _ in range(300):
        confidences = generator.random(7).tolist()
        width = make().choose(confidences, 7)
        changed = [*confidences[: width + 1], *generator.random(7).tolist()][:7]
        assert make().choose(changed, 7) == width


@pytest.mark.parametrize("rate", [0.05, 0.4, 0.7, 0.95])
@pytest.mark.parametrize(
    "seconds", [[1, 1.1, 1.3, 1.7, 2.4], [1, 1.5, 1.5, 1.5, 1.5], [1, 2.2, 2.2, 3, 3]], ids=str
)
def test_cost_aware_takes_the_width_that_pays(seconds: list[float], rate: float):
    """On drafts accepted at a steady rate; flat parts of the costs do not stop it early."""
    generator = np.random.default_rng(9)
    policy = CostAware(seconds, explore_every=16)
    speeds = np.cumsum([rate**place for place in range(5)]) / np.array(seconds)
    chosen = []
    for _ in range(800):
        width = policy.choose(None, 4)
        right = int((generator.random(4) < rate).cumprod().sum())
        policy.observe(width, min(right, width))
        chosen.append(speeds[width])
    assert np.mean(chosen[200:]) > 0.94 * speeds.max()


def test_cost_aware_goes_no_wider_than_was_measured():
    assert CostAware([1, 1, 1]).choose([0.5, 0.5, 0.5, 0.5], 4) == 2


def test_cost_aware_explores_what_it_gave_up():
    policy = CostAware([1.0, 3.0, 5.0], explore_every=8)
    widths = [policy.choose(None, 2) for _ in range(16)]
    assert widths == [0] * 7 + [2] + [0] * 7 + [2]
