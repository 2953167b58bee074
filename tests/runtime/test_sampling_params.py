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
        (
            "temperature",
            [-0.1, 1e39, math.nan, math.inf, True, "1", None],
            "a number from 0 to 1e30",
        ),
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
        (
            "repetition_penalty",
            [0, -1, 0.009, 101, math.nan, math.inf, True, "1", None, 1 << 2000],
            "a number from 0.01 to 100 (1 is off)",
        ),
        (
            "frequency_penalty",
            [-2.1, 2.1, math.nan, -math.inf, False, "0", None],
            "a number from -2 to 2 (0 is off)",
        ),
        (
            "presence_penalty",
            [-3, 2.0001, math.nan, math.inf, True, [0]],
            "a number from -2 to 2 (0 is off)",
        ),
        ("min_tokens", [-1, 1.0, True, None, math.nan], "an integer of at least 0"),
        ("logit_bias", [None, [], [5], "x", 1], "an object of token ids and numbers"),
        (
            "allowed_token_ids",
            [[], [-1], [True], [1.0], 5, "1", {1}],
            "a list of at least one token id (integers of at least 0), or None",
        ),
        ("bad_words", ["word", None, {"a"}, 5], "a list of texts and of lists of token ids"),
        ("ignore_eos", [1, None], "True or False"),
        ("include_stop_str_in_output", [0], "True or False"),
        ("skip_special_tokens", ["yes"], "True or False"),
    ],
)
def test_values_out_of_range(name: str, values: list[Any], allowed: str) -> None:
    for value in values:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        shown = repr(value) if len(repr(value)) <= 100 else f"{value!r:.100}..."
        assert str(caught.value) == f"{name} is {shown}, it must be {allowed}"
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"logit_bias": {True: 1.0}},
            "a token id of logit_bias is True, it must be an integer of at least 0",
        ),
        (
            {"logit_bias": {"5": 1.0}},
            "a token id of logit_bias is '5', it must be an integer of at least 0",
        ),
        (
            {"logit_bias": {-1: 1.0}},
            "a token id of logit_bias is -1, it must be an integer of at least 0",
        ),
        (
            {"logit_bias": {3: math.nan}},
            "logit_bias[3] is nan, it must be a number from -100 to 100",
        ),
        (
            {"logit_bias": {3: 1.0, 4: -100.5}},
            "logit_bias[4] is -100.5, it must be a number from -100 to 100",
        ),
        (
            {"logit_bias": {**dict.fromkeys(range(10**5), 0), 7: True}},
            "logit_bias[7] is True, it must be a number from -100 to 100",
        ),
        (
            {"bad_words": ["a", ""]},
            "bad_words[1] is '', it must be a non-empty text or list of token ids (integers of at "
            "least 0)",
        ),
        (
            {"bad_words": [[1], [2, -3]]},
            "bad_words[1] is [2, -3], it must be a non-empty text or list of token ids (integers "
            "of at least 0)",
        ),
        (
            {"bad_words": ["\ud800"]},
            "bad_words[0] is '\\ud800', it must be a non-empty text or list of token ids (integers "
            "of at least 0)",
        ),
        (
            {"bad_words": [[True]]},
            "bad_words[0] is [True], it must be a non-empty text or list of token ids (integers of "
            "at least 0)",
        ),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, it must be at most max_tokens (4)"),
        (
            {"frequency_penalty": 10**5000},
            "frequency_penalty is a value with thousands of digits, it must be a number from -2 "
            "to 2 (0 is off)",
        ),
        (
            {"temperature": -(10**5000)},
            "temperature is a value with thousands of digits, it must be a number from 0 to 1e30",
        ),
        (
            {"allowed_token_ids": [-1] * 10**5},
            f"allowed_token_ids is [{'-1, ' * 24}-1,..., it must be a list of at least one token "
            "id (integers of at least 0), or None",
        ),
    ],
)
def test_hostile_values_give_one_short_line(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    assert str(caught.value) == message
    assert caught.value.param == next(iter(params))


def test_edges_are_allowed() -> None:
    SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, seed=0, max_tokens=1)
    SamplingParams(temperature=100.0, top_p=1e-9, min_p=1, seed=2**63 - 1, stop=[])
    SamplingParams(repetition_penalty=0.01, frequency_penalty=-2, presence_penalty=2)
    SamplingParams(repetition_penalty=100, frequency_penalty=2, presence_penalty=-2)
    SamplingParams(logit_bias={0: -100, 10**9: 100}, bad_words=[], allowed_token_ids=[0])
    SamplingParams(min_tokens=3, max_tokens=3)


def test_lists_are_frozen_and_a_single_string_is_one_stop() -> None:
    stops, ids, biases = ["a"], [1], {1: 2.0}
    params = SamplingParams(
        stop=stops,
        stop_token_ids=ids,
        logit_bias=biases,
        allowed_token_ids=ids,
        bad_words=[ids, "b"],
    )
    stops.append("b")
    ids.append(2)
    biases[2] = 3.0
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))
    assert (params.allowed_token_ids, params.bad_words) == ((1,), ((1,), "b"))
    assert params.logit_bias == {1: 2.0}
    assert hash(params) == hash(dataclasses.replace(params))
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
        (
            {"repetition_penalty": 1.05, "bad_words_ids": [[5], [6, 7]], "min_new_tokens": 3},
            SamplingParams(repetition_penalty=1.05, bad_words=[[5], [6, 7]]),
        ),
        (
            {"do_sample": False, "top_k": 5, "repetition_penalty": 1.2},
            SamplingParams(temperature=0.0, repetition_penalty=1.2),
        ),
    ],
)
def test_from_generation_config(config: dict[str, Any], expected: SamplingParams) -> None:
    assert SamplingParams.from_generation_config(config) == expected
