"""Validation of SamplingParams and defaults from generation_config.json."""

import dataclasses
import math
from typing import Any

import pytest

from inkrt.errors import RequestError
from inkrt.runtime.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("temperature", [-0.1, math.nan, math.inf, True, "1", None], "a number of at least 0"),
        ("top_k", [-1, 1.0, True, None, 2**31], "an integer from 0 (off) to 2147483647"),
        ("top_p", [0, 1.1, -1, math.nan, True], "a number above 0 and at most 1 (1 is off)"),
        ("min_p", [-0.1, 1.1, math.inf, False], "a number from 0 to 1 (0 is off)"),
        ("seed", [-1, 2**63, 1.0, True], "an integer from 0 to 9223372036854775807, or None"),
        ("max_tokens", [0, -1, 2.0, True], "an integer of at least 1, or None"),
        ("stop", ["", [""], [1], None, {"a"}], "a non-empty string or a list of non-empty strings"),
        (
            "stop_token_ids",
            [[-1], [True], [1.0], 5, None],
            "a list of token ids (integers of at least 0)",
        ),
        ("ignore_eos", [1, None], "True or False"),
        ("include_stop_str_in_output", [0], "True or False"),
        ("skip_special_tokens", ["yes"], "True or False"),
    ],
)
def test_values_out_of_range(name: str, values: list[Any], allowed: str) -> None:
    for value in values:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        assert str(caught.value) == f"{name} is {value!r}, it must be {allowed}"
        assert caught.value.param == name


def test_edges_are_allowed() -> None:
    SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, seed=0, max_tokens=1)
    SamplingParams(temperature=100.0, top_p=1e-9, min_p=1, seed=2**63 - 1, stop=[])


def test_lists_are_frozen_and_a_single_string_is_one_stop() -> None:
    stops, ids = ["a"], [1]
    params = SamplingParams(stop=stops, stop_token_ids=ids)
    stops.append("b")
    ids.append(2)
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))
    assert SamplingParams(stop="ab").stop == ("ab",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SamplingParams()),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams(temperature=0.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 3},
            SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
        ),
        ({"min_p": 0.1, "top_p": None, "max_new_tokens": 5}, SamplingParams(min_p=0.1)),
    ],
)
def test_from_generation_config(config: dict[str, Any], expected: SamplingParams) -> None:
    assert SamplingParams.from_generation_config(config) == expected
