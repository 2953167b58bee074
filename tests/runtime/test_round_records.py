"""What is sent to GPUs that run rounds, and what comes back."""

from dataclasses import replace

import numpy as np
import pytest
from fake_rounds import cost_aware, make_input

from inkrt.runtime.executor.cuda_rounds import cases_of_widths, decode_record, encode_state
from inkrt.runtime.executor.round_state import ROUND_RECORD, RoundStatus
from inkrt.runtime.spec.width import ConfidenceThreshold, FixedWidth

WIDTHS = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("widths", "most", "cases"),
    [
        (WIDTHS, 7, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([1, 2, 4, 8], 7, [0, 1, 2, 2, 3, 3, 3, 3]),
        ([1, 8], 3, [0, 1, 1, 1]),
    ],
)
def test_every_width_has_the_narrowest_step(widths: list[int], most: int, cases: list[int]) -> None:
    assert cases_of_widths(widths, most) == cases


def test_the_state_of_every_policy() -> None:
    (state,) = encode_state(make_input(FixedWidth()), 400, WIDTHS)
    plain = {
        "policy": 0, "rule": 0, "most": 7, "num_left": 44, "writable_end": 128, "finished": 0,
        "round": 0, "num_stop_ids": 2, "vocab_size": 400, "seed": 2**62 + 3, "num_contexts": 1,
    }  # fmt: skip
    assert {name: int(state[name]) for name in plain} == plain
    assert state["stop_ids"][:3].tolist() == [2, 9, 0]
    assert state["case_of_width"].tolist() == [*range(8)]
    (state,) = encode_state(
        make_input(ConfidenceThreshold(0.3), rule="forced", most=2, forced=(0.5, 0.25)), 400, [1, 4]
    )
    assert (state["policy"], state["rule"], state["threshold"]) == (1, 2, 0.3)
    assert state["forced"].tolist() == [0.5, 0.25, 0, 0, 0, 0, 0]
    assert state["case_of_width"].tolist() == [0, 1, 1, 0, 0, 0, 0, 0]


def test_the_state_of_costs_goes_there_and_back() -> None:
    """What a policy has learned is in the state, and comes out of a record as it was."""
    policy = cost_aware(explore_every=5, num_first=2, margin=0.125)
    for drafted, accepted in ((7, 3), (7, 7), (0, 0)):
        assert policy.skip(20) == 0
        policy.choose([0.9, 0.8, 0.1, 0.7, 0.7, 0.7, 0.7], 7, 20)
        policy.observe(drafted, accepted)
    (state,) = encode_state(make_input(policy), 400, WIDTHS)
    costs = policy.on_device
    assert costs is not None
    assert (state["policy"], state["explore_every"], state["num_first"]) == (2, 5, 2)
    assert (state["margin"], state["num_contexts"]) == (0.125, 3)
    assert state["contexts"][:4].tolist() == [16, 40, 100, 0]
    assert state["plain"][:3].tolist() == [one.plain for one in costs.costs]
    assert state["rounds"][:3].tolist() == [list(one.rounds) for one in costs.costs]
    for unread in (None, 0.25):
        policy.state = replace(policy.state, unread=unread)
        (state,) = encode_state(make_input(policy), 400, WIDTHS)
        record = np.zeros(1, ROUND_RECORD)
        record["policy_state"] = state["policy_state"]
        assert decode_record(record, 7).learned == policy.state
    assert decode_record(record, 0).learned is None


def test_tokens_that_cannot_come_end_nothing() -> None:
    """A request may name any id, also one that is no int32."""
    stop_ids = frozenset({399, 400, 3, 2**31, 2**64})
    (state,) = encode_state(make_input(FixedWidth(), stop_ids=stop_ids), 400, WIDTHS)
    assert (state["num_stop_ids"], state["stop_ids"][:3].tolist()) == (2, [3, 399, 0])


def test_a_record() -> None:
    record = np.zeros(1, ROUND_RECORD)
    record[0] = (3, [4, 5, 6, 0, 0, 0, 0, 0], 6, 7, 2, 0, 33, record["policy_state"][0], 1)
    found = decode_record(record, 0)
    assert (found.status, found.tokens, found.drafted) == (RoundStatus.OK, [4, 5, 6], 6)
    assert (found.proposed, found.position) == (7, 33)
