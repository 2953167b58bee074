"""Widths: what they may look at, and that the cost-aware one pays.

That no policy changes the distribution is shown in test_ratio_test.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from inkrt.runtime.spec.width import (
    ConfidenceThreshold,
    CostAware,
    FixedWidth,
    RoundCosts,
    WidthPolicy,
)

SECONDS = [1, 1.2, 1.5, 1.55, 2, 2.4, 3, 3.1]


def cost_aware(seconds: Sequence[float], *, plain: float | None = None, **options: Any):
    """Costs that do not depend on the context; drafting costs nothing unless `plain` is less."""
    costs = RoundCosts(seconds[0] if plain is None else plain, seconds)
    return CostAware(lambda _: costs, **options)


def test_threshold_cuts_before_the_first_that_is_below():
    assert ConfidenceThreshold(0.5).choose([0.9, 0.5, 0.4, 0.9], 4, 0) == 2
    assert ConfidenceThreshold(0.5).choose([0.9, 0.5, 0.4, 0.9], 1, 0) == 1
    with pytest.raises(AssertionError, match="without confidences"):
        ConfidenceThreshold(0.5).choose(None, 4, 0)
    assert ConfidenceThreshold(0.0).choose([0.0, 0.0], 2, 0) == 2


@pytest.mark.parametrize(
    "make",
    [FixedWidth, lambda: ConfidenceThreshold(0.6), lambda: cost_aware(SECONDS, num_first=0)],
    ids=["fixed", "threshold", "cost"],
)
def test_no_confidence_behind_the_one_it_stops_at_matters(make: Callable[[], WidthPolicy]):
    generator = np.random.default_rng(3)
    for _ in range(300):
        confidences = generator.random(7).tolist()
        width = make().choose(confidences, 7, 0)
        changed = [*confidences[: width + 1], *generator.random(7).tolist()][:7]
        assert make().choose(changed, 7, 0) == width


@pytest.mark.parametrize("rate", [0.05, 0.4, 0.7, 0.95])
@pytest.mark.parametrize(
    "seconds", [[1, 1.1, 1.3, 1.7, 2.4], [1, 1.5, 1.5, 1.5, 1.5], [1, 2.2, 2.2, 3, 3]], ids=str
)
def test_cost_aware_takes_the_width_that_pays(seconds: list[float], rate: float):
    """On drafts accepted at a steady rate; flat parts of the costs do not stop it early."""
    generator = np.random.default_rng(9)
    policy = cost_aware(seconds, explore_every=16)
    speeds = np.cumsum([rate**place for place in range(5)]) / np.array(seconds)
    chosen = []
    for _ in range(800):
        width = policy.choose(None, 4, 0)
        right = int((generator.random(4) < rate).cumprod().sum())
        policy.observe(width, min(right, width))
        chosen.append(speeds[width])
    assert np.mean(chosen[200:]) > 0.94 * speeds.max()


def test_cost_aware_goes_no_wider_than_was_measured():
    assert cost_aware([1, 1, 1]).choose([0.5, 0.5, 0.5, 0.5], 4, 0) == 2


def test_cost_aware_explores_what_it_gave_up():
    policy = cost_aware([1.0, 3.0, 5.0], explore_every=8, num_first=2)
    widths = [policy.choose(None, 2, 0) for _ in range(16)]
    assert widths == [2, 2, *[0] * 5, 2, *[0] * 7, 2]


def test_nothing_is_drafted_where_it_does_not_pay_and_again_when_it_does():
    """That drafts have become right is found out by looking now and then."""
    policy = cost_aware([1.3, 1.5, 1.7, 1.9], plain=1.0, explore_every=10)
    generator = np.random.default_rng(5)

    def rounds(rate: float, count: int) -> list[int]:
        """Drafts read by each step, -1 where nothing was drafted."""
        widths = []
        for _ in range(count):
            if left := policy.skip(100):
                assert left <= 10
                widths.append(-1)
                continue
            widths.append(policy.choose(None, 3, 100))
            right = int((generator.random(3) < rate).cumprod().sum())
            policy.observe(widths[-1], min(right, widths[-1]))
        return widths

    bad = rounds(0.02, 400)
    assert bad[:4] == [3] * 4
    assert bad[200:].count(-1) >= 0.85 * 200
    assert 15 <= len(bad[200:]) - bad[200:].count(-1) <= 30  # it goes on looking
    good = rounds(0.95, 600)
    assert good[-300:].count(-1) == 0
    assert good[-300:].count(3) > 250


def test_drafts_that_are_never_read_count_as_what_was_thought_of_them():
    """Else a drafter that is sure once in a while would be asked for ever."""
    policy = cost_aware([1.3, 1.4, 1.5], plain=1.0, explore_every=20)
    generator = np.random.default_rng(8)
    skipped = 0
    for _ in range(400):
        if policy.skip(0):
            skipped += 1
            continue
        is_sure = generator.random() < 0.1
        confidences = [0.95, 0.95] if is_sure else [0.05, 0.05]
        width = policy.choose(confidences, 2, 0)
        if width:
            right = int((generator.random(2) < confidences).cumprod().sum())
            policy.observe(width, min(right, width))
    assert skipped > 300


def test_skipping_tells_how_many_plain_steps_are_left():
    policy = cost_aware([2.0, 5.0], plain=1.0, explore_every=6, num_first=0)
    assert [policy.skip(0) for _ in range(7)] == [6, 5, 4, 3, 2, 1, 0]
    assert policy.choose(None, 1, 0) == 1
    policy.observe(1, 0)
    assert policy.skip(0) == 6


def test_a_choice_is_kept_unless_another_is_better_by_the_margin():
    # One draft more costs 2 % more than it brings, or brings 2 % more than it costs.
    for gain in (0.98, 1.02):
        seconds = [1.0, 1.5 / gain]
        policy = cost_aware(seconds, num_first=0, explore_every=10**9)
        policy._last_width = 0
        assert policy.choose([0.5], 1, 0) == 0
        policy._last_width = 1
        assert policy.choose([0.5], 1, 0) == 1
        sure = cost_aware(seconds, num_first=0, explore_every=10**9, margin=0.0)
        assert sure.choose([0.5], 1, 0) == (gain > 1)


def test_costs_of_the_context_decide():
    short, long = RoundCosts(1.0, [1.0, 3.0, 5.0]), RoundCosts(1.0, [1.0, 1.1, 1.2])
    policy = CostAware(
        lambda context: short if context < 100 else long, num_first=0, explore_every=10**9
    )
    assert policy.choose([0.6, 0.6], 2, 99) == 0
    assert policy.choose([0.6, 0.6], 2, 100) == 2
    assert policy.skip(99) > 0


def test_the_first_draft_that_is_not_read_counts_as_what_was_thought_of_it():
    def rates(policy: CostAware) -> list[float]:
        return [policy._rate(place) for place in range(2)]

    sure, unsure = [0.9, 0.1], [0.1, 0.9]
    policy = cost_aware([1.0, 1.5, 3.0], num_first=0, explore_every=10**9)
    assert rates(policy) == [0.5, 0.5]  # one of two: nothing is known
    assert policy.choose(unsure, 2, 0) == 0
    assert rates(policy) == pytest.approx([(0.98 + 0.1) / (1.96 + 1), 0.5])
    # Behind a wrong draft nothing would have been accepted, so nothing is learned of it.
    for accepted, second in ((0, 0.5), (1, (0.98 + 0.1) / (1.96 + 1))):
        policy = cost_aware([1.0, 1.5, 3.0], num_first=0, explore_every=10**9)
        assert policy.choose(sure, 2, 0) == 1
        policy.observe(1, accepted)
        assert rates(policy) == pytest.approx([(0.98 + accepted) / (1.96 + 1), second])


def test_what_earlier_rounds_accepted_is_forgotten_while_nothing_is_drafted():
    policy = cost_aware([2.0, 5.0], plain=1.0, explore_every=50, num_first=0)
    for _ in range(60):
        policy.observe(1, 0)
    before = policy._reached[0]
    assert [policy.skip(0) for _ in range(50)] == list(range(50, 0, -1))
    assert policy._reached[0] == pytest.approx(max(0.98**50 * before, 2), rel=0.02)
    assert policy._rate(0) < 0.05  # it weighs less, but says the same
