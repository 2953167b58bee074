"""Draws of a small Flint on the GPU: the reference's on the same logits, the CPU engine's, and each
other's, step by step, in wide steps and in the loop that feeds itself.
"""

import json

import numpy as np
import pytest
import torch
from flint_config import CONFIG

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.plugins.caseutil import int32
from inkrt.plugins.noise import Purpose, gumbel, token_bits
from inkrt.plugins.sample.op import sample, sampling_arguments
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling

pytestmark = pytest.mark.gpu

VOCAB = 5003  # rows without 16-byte alignment, five blocks a row
MODEL = {
    **CONFIG,
    "vocab_size": VOCAB,
    "num_hidden_layers": 3,
    "quantization_config": {"quant_method": "nvfp4"},
}
REQUESTS = {
    "plain": Sampling(temperature=1.0, seed=2**62 + 5),
    "min_p": Sampling(temperature=0.8, min_p=0.05, seed=1),
    "top_k": Sampling(temperature=1.5, top_k=20, seed=2),
    "top_p": Sampling(temperature=1.0, top_p=0.9, seed=3),
    "all": Sampling(temperature=1.2, top_k=50, top_p=0.95, min_p=0.01, seed=4),
}
STEPS = 300


@pytest.fixture(scope="module")
def engines(gpu, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampling")
    (folder / "config.json").write_text(json.dumps(MODEL))
    opened = {}
    for target in ("cpu", "sm_90a"):
        options = BuildOptions(target=target, weights="dummy", max_batch_size=2)
        build_engine(folder, folder / target, options)
        opened[target] = Engine.open(folder / target)
    yield opened
    for engine in opened.values():
        engine.close()


def _prompt(length: int) -> list[int]:
    return [(37 * i + i * i) % VOCAB for i in range(length)]


def _reference(logits: np.ndarray, position: int, sampling: Sampling) -> list[int]:
    """Tokens of the operator's reference for rows of a step at `position`."""
    arguments = sampling_arguments(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
    )
    rows = torch.from_numpy(logits)
    return sample(
        rows, **arguments, position=int32(position), num_tokens=int32(len(rows)), last_row=False
    ).tolist()


def _generate(engine: Engine, sampling: Sampling, count: int) -> list[int]:
    """Tokens of single steps behind a prompt, each checked against the reference."""
    prompt = _prompt(70)
    with engine.session() as session:
        output = session.prefill(prompt, sampling)
        tokens = [int(output.tokens[-1])]
        assert tokens == _reference(output.logits, len(prompt) - 1, sampling)
        for _ in range(count):
            position = session.length
            output = session.step([tokens[-1]], sampling)
            tokens.append(int(output.tokens[0]))
            assert tokens[-1:] == _reference(output.logits, position, sampling)
    return tokens


@pytest.mark.parametrize("name", REQUESTS)
def test_tokens_are_those_of_the_reference_on_the_same_logits(engines, name):
    tokens = _generate(engines["sm_90a"], REQUESTS[name], STEPS)
    assert len(set(tokens)) > 20


def test_one_graph_serves_greedy_and_sampled_requests(engines):
    engine = engines["sm_90a"]
    greedy = _generate(engine, Sampling(top_k=3, seed=8), 20)
    sampled = _generate(engine, REQUESTS["all"], 20)
    assert _generate(engine, Sampling(), 20) == greedy
    assert _generate(engine, REQUESTS["all"], 20) == sampled != greedy


@pytest.mark.parametrize("name", ["plain", "all"])
def test_loop_that_feeds_itself_draws_what_steps_draw(engines, name):
    engine, sampling, prompt = engines["sm_90a"], REQUESTS[name], _prompt(70)
    expected = _generate(engine, sampling, STEPS)
    with engine.session() as session:
        token = int(session.prefill(prompt, sampling).tokens[-1])
        drawn = [token]
        for _ in range(STEPS):
            drawn.append(session.decode(drawn[-1], sampling, num_more=9))
        assert drawn == expected


@pytest.mark.parametrize("name", ["plain", "all"])
def test_draws_do_not_depend_on_the_width(engines, name):
    engine, sampling = engines["sm_90a"], REQUESTS[name]
    tokens = _prompt(240)
    with engine.session() as plain, engine.session() as wide:
        single = [int(plain.step([token], sampling).tokens[0]) for token in tokens]
        position, width = 0, 1
        while position < len(tokens):
            piece = tokens[position : position + width]
            output = wide.step(piece, sampling)
            assert output.tokens.tolist() == single[position : position + len(piece)]
            position += len(piece)
            width = width % 8 + 1


def test_tokens_are_those_of_the_cpu_where_logits_decide_clearly(engines):
    """Same noise on both: only scores nearer than the logits' own distance may differ."""
    sampling = REQUESTS["plain"]
    clear = 0
    with engines["cpu"].session() as cpu, engines["sm_90a"].session() as gpu:
        for token in _prompt(STEPS):
            a = gpu.step([token], sampling)
            b = cpu.step([token], sampling)
            positions = torch.tensor([gpu.length])
            noise = gumbel(token_bits(sampling.seed, positions, Purpose.SAMPLE, VOCAB))[0].numpy()
            scores = np.sort(b.logits[0] + noise)
            is_clear = scores[-1] - scores[-2] > 2.1 * np.abs(a.logits[0] - b.logits[0]).max()
            clear += int(is_clear)
            assert not is_clear or a.tokens[0] == b.tokens[0]
    assert clear > STEPS // 2
