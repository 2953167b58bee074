"""What a queue of rounds asks of its device, call by call."""

from dataclasses import replace
from typing import Any

import pytest
from fake_rounds import BLOCK, cost_aware

from inkrt.errors import DeviceError
from inkrt.runtime.executor import Sampling, StepInput
from inkrt.runtime.executor.round_queue import (
    RoundInput,
    RoundQueue,
    RoundRecord,
    RoundSettings,
)
from inkrt.runtime.executor.round_state import RoundStatus
from inkrt.runtime.spec.width import ConfidenceThreshold, CostAware, FixedWidth, RoundCosts

GREEDY = Sampling()
NOISY = Sampling(temperature=0.8, seed=5)


class Recorder:
    """A device that notes what it is told; its rounds give one token, 100 + position."""

    def __init__(self, statuses: list[RoundStatus]) -> None:
        self.told: list[object] = []
        self.statuses, self.position = statuses, 0

    def begin_rounds(self, given: RoundInput) -> None:
        self.told.append(("begin", given.step.position))
        self.position = given.step.position

    def extend_rounds(self, first: int, pages: Any, writable_end: int) -> None:
        self.told.append(("extend", first, pages, writable_end))

    def queue_round(self) -> None:
        self.told.append("round")

    def await_record(self, number: int) -> RoundRecord:
        status = self.statuses[number]
        tokens = [101 + self.position] if status is RoundStatus.OK else []
        self.position += len(tokens)
        return RoundRecord(status, tokens, 0, 0, self.position)


def make_input(position: int, **changes: Any) -> RoundInput:
    token = 100 + position if position else 5
    step = StepInput([token], position, 1, [8, 9], GREEDY, True)
    settings = RoundSettings("coupled", FixedWidth(), BLOCK)
    return RoundInput(step, settings, 50 - position, changes.get("writable_end", 16))


def test_pages_that_come_free_raise_what_a_queued_round_may_write() -> None:
    """It was queued where there was nothing to write; the next one goes on in its chain."""
    device = Recorder([RoundStatus.OK, RoundStatus.OK, RoundStatus.FULL, RoundStatus.OK])
    queue = RoundQueue(device, frozenset({"coupled"}))
    queue.run(make_input(0), 1)
    queue.run(make_input(1), 1)
    assert device.told == [("begin", 0), "round", "round", "round"]
    device.told.clear()
    given = make_input(2)
    queue.run(replace(given, writable_end=20), 1)
    assert device.told == [("extend", 2, [], 20), "round", "round"]


def test_a_round_that_can_write_and_does_not_is_an_error() -> None:
    for status in (RoundStatus.FULL, RoundStatus.FINISHED, RoundStatus.ERROR):
        queue = RoundQueue(Recorder([status] * 3), frozenset({"coupled"}))
        with pytest.raises(DeviceError, match=f"no round at position 0: {status.name.lower()}"):
            queue.run(make_input(0), 1)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ["round"]),
        ({"pages": [8, 9, 4]}, [("extend", 2, [4], 16), "round"]),
        ({"pages": [8]}, ["round"]),
        ({"writable_end": 17}, [("extend", 2, [], 17), "round"]),
        ({"writable_end": 15}, ["round"]),
        ({"pages": [8, 7]}, [("begin", 2), "round"]),
        ({"slot": 2}, [("begin", 2), "round"]),
        ({"tokens": [9]}, [("begin", 2), "round"]),
        ({"sampling": NOISY}, [("begin", 2), "round"]),
        ({"is_coupled": False}, [("begin", 2), "round"]),
        ({"position": 3}, [("begin", 3), "round"]),
        ({"num_left": 47}, [("begin", 2), "round"]),
        ({"settings": RoundSettings("coupled", FixedWidth(), 3)}, [("begin", 2), "round"]),
        ({"settings": RoundSettings("coupled", FixedWidth(), 7, frozenset({3}))},
         [("begin", 2), "round"]),
        ({"settings": RoundSettings("coupled", ConfidenceThreshold(0.5), 7)},
         [("begin", 2), "round"]),
    ],
)  # fmt: skip
def test_only_the_round_that_was_foreseen_is_taken_from_the_queue(
    changes: dict[str, Any], told: list[object]
) -> None:
    device = Recorder([RoundStatus.OK] * 9)
    queue = RoundQueue(device, frozenset({"coupled"}))
    for position in (0, 1):
        assert queue.run(make_input(position), 1).tokens == [101 + position]
    assert device.told == [("begin", 0), "round", "round", "round"]
    device.told.clear()
    given = make_input(2)
    of_round = {name: value for name, value in changes.items() if hasattr(given, name)}
    of_step = {name: value for name, value in changes.items() if name not in of_round}
    given = replace(given, step=replace(given.step, **of_step), **of_round)
    if told[0] != "round" and told[0][0] == "begin":  # type: ignore[index]
        device.statuses = [RoundStatus.OK] * 9
    queue.run(given, 1)
    assert device.told == told


def test_nothing_is_taken_from_a_queue_that_was_cleared() -> None:
    device = Recorder([RoundStatus.OK] * 4)
    queue = RoundQueue(device, frozenset({"coupled"}))
    queue.run(make_input(0), 1)
    queue.clear()
    queue.run(make_input(1), 1)
    assert device.told == [("begin", 0), "round", ("begin", 1), "round"]


def test_what_a_device_takes() -> None:
    queue = RoundQueue(Recorder([]), frozenset({"coupled", "forced"}))
    fine = RoundSettings("coupled", FixedWidth(), 7, frozenset(range(64)))
    host_only = CostAware(lambda _: RoundCosts(1.0, [1.0] * 8))
    refused: list[dict[str, Any]] = [
        {"rule": "probabilistic"},
        {"most": 8},
        {"stop_ids": frozenset(range(65))},
        {"policy": host_only},
        {"policy": cost_aware(), "most": 6},  # costs of other widths
    ]
    assert queue.takes(fine)
    assert queue.takes(replace(fine, rule="forced", policy=cost_aware()))
    assert queue.takes(replace(fine, policy=ConfidenceThreshold(0.3), most=1))
    assert [queue.takes(replace(fine, **changes)) for changes in refused] == [False] * 5
