"""The runtime's own sampling gives the tokens that a step draws, with the same random numbers."""

import numpy as np
import pytest
import torch

from inkrt.plugins import noise as plugin_noise
from inkrt.plugins.caseutil import int32
from inkrt.plugins.registry import Case
from inkrt.plugins.sample.op import cases, sample, sampling_arguments
from inkrt.plugins.sampling import filtered_logits as plugin_filtered
from inkrt.runtime.executor import Sampling
from inkrt.runtime.noise import Purpose, gumbel, token_bits, uniform
from inkrt.runtime.sampling import draw, filtered_logits, probabilities

SEED = 2**62 + 2**40 + 17
NAMES = ("temperature", "top_k", "top_p", "min_p", "seed")
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3, "top_k": 40},
    {"temperature": 2.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 60, "top_p": 0.8, "min_p": 0.02},
]


def test_words_are_those_of_the_plugins():
    positions = [0, 1, 1_048_575, 2**32 - 1]
    expected = plugin_noise.token_bits(
        SEED, torch.tensor(positions), plugin_noise.Purpose.SAMPLE, 131
    )
    got = token_bits(SEED, positions, Purpose.SAMPLE, 131)
    assert got.astype(np.int64).tolist() == expected.tolist()


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("anchor", [0, 7, 2**32 - 1])
def test_words_of_every_purpose_are_those_of_the_plugins(purpose: Purpose, anchor: int):
    theirs = plugin_noise.Purpose[purpose.name]
    assert int(theirs) == int(purpose)
    expected = plugin_noise.token_bits(SEED, torch.tensor([5, 900]), theirs, 31, anchor)
    got = token_bits(SEED, [5, 900], purpose, 31, anchor)
    assert got.astype(np.int64).tolist() == expected.tolist()


def test_purpose_and_anchor_stand_in_the_counter():
    seeds, anchors = np.array([SEED, 3]), np.array([7, 2**32 - 1])
    got = token_bits(seeds, 900, Purpose.RESIDUAL, 6, anchors)
    for row, (seed, anchor) in enumerate(zip(seeds.tolist(), anchors.tolist(), strict=True)):
        counters = torch.tensor([[block, 900, int(Purpose.RESIDUAL), anchor] for block in (0, 1)])
        words = plugin_noise.philox4x32(counters, (seed & 0xFFFFFFFF, seed >> 32))
        assert got[row].tolist() == words.flatten()[:6].tolist()


def test_noise_has_the_same_bits_on_a_million_words_and_at_both_ends():
    words = token_bits(SEED, np.arange(1000), Purpose.SAMPLE, 1000).ravel()
    ends = np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint64)
    words = np.concatenate([ends, words])
    expected = plugin_noise.gumbel(torch.from_numpy(words.astype(np.int64))).numpy()
    assert gumbel(words).view(np.int32).tolist() == expected.view(np.int32).tolist()
    assert 0 < uniform(ends)[0] < uniform(ends)[-1] < 1


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_tokens_of_the_cases_of_sample(case: Case):
    arguments = case.arguments(torch.float32, torch.Generator().manual_seed(5))
    expected = sample(**arguments)
    sampling = Sampling(*(arguments[name].item() for name in NAMES))
    rows = arguments["logits"].numpy()
    shift = int(arguments["num_tokens"]) if arguments["last_row"] else 1
    positions = int(arguments["position"]) + shift + np.arange(len(rows))
    assert draw(rows, sampling, positions).tolist() == expected.tolist()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("step", [0.0, 0.25], ids=["distinct", "ties"])
def test_tokens_and_filters_on_many_rows(setting: dict[str, float], step: float):
    logits = torch.randn(400, 997, generator=torch.Generator().manual_seed(1)) * 4
    if step:
        logits = (logits / step).round() * step
    expected = sample(
        logits,
        **sampling_arguments(**setting, seed=SEED),
        position=int32(5000),
        num_tokens=int32(400),
        last_row=False,
    )
    sampling = Sampling(**setting, seed=SEED)
    got = draw(logits.numpy(), sampling, 5001 + np.arange(400))
    assert got.tolist() == expected.tolist()
    if setting["temperature"] > 0:
        parameters = sampling_arguments(**setting)
        exact = [float(parameters[name]) for name in ("temperature", "top_p", "min_p")]
        top_k = int(parameters["top_k"])
        kept = [plugin_filtered(row, exact[0], top_k, exact[1], exact[2]) for row in logits]
        assert np.array_equal(filtered_logits(logits.numpy(), sampling), torch.stack(kept).numpy())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_without_a_distribution_give_the_token_that_a_step_gives(value: float):
    logits = torch.zeros(3, 9)
    logits[:, 4] = value
    logits[2, 2] = value
    setting = {"temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.1}
    expected = sample(
        logits,
        **sampling_arguments(**setting, seed=1),
        position=int32(0),
        num_tokens=int32(3),
        last_row=False,
    ).tolist()
    assert expected == [4, 4, 2]
    sampling = Sampling(**setting, seed=1)
    assert draw(logits.numpy(), sampling, np.arange(1, 4)).tolist() == expected
    assert probabilities(logits.numpy(), sampling).argmax(-1).tolist() == expected
    assert probabilities(logits.numpy(), sampling).max(-1).tolist() == [1, 1, 1]
