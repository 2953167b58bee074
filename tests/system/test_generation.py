"""LLM on a CPU engine draws what single steps draw: greedy, sampled, stopped early, continued."""

import numpy as np
import pytest

from inkrt import LLM, SamplingParams
from inkrt.runtime.executor import Sampling

COUNT = 30
PROMPT = [(7 * i + i * i) % 470 for i in range(30)]


@pytest.fixture(scope="module")
def llm(make_engine):
    with LLM(make_engine("float32", num_layers=6, max_batch_size=8)) as opened:
        yield opened


def _stepped(llm: LLM, sampling: Sampling) -> list[int]:
    with llm.engine.session() as session:
        drawn = [int(session.prefill(PROMPT, sampling).tokens[-1])]
        while len(drawn) < COUNT:
            drawn.append(int(session.step(drawn[-1:], sampling).tokens[-1]))
    return drawn


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_steps(llm, temperature):
    expected = _stepped(llm, Sampling(temperature=temperature, seed=3))
    params = {"temperature": temperature, "seed": 3, "ignore_eos": True}
    (output,) = llm.generate([PROMPT], SamplingParams(**params, max_tokens=COUNT))
    assert list(output.outputs[0].token_ids) == expected
    stop = expected[COUNT // 2]
    (output,) = llm.generate([PROMPT], SamplingParams(**params, stop_token_ids=[stop]))
    assert list(output.outputs[0].token_ids) == expected[: expected.index(stop) + 1]
    stream = llm.stream(PROMPT, SamplingParams(**params))
    assert [next(stream).token_ids[0] for _ in range(9)] == expected[:9]
    stream.close()
    assert llm.engine.states.num_free_slots == 8


def test_a_session_goes_on_after_decode(llm):
    with llm.engine.session() as plain, llm.engine.session() as session:
        plain.prefill(PROMPT, Sampling())
        token = int(session.prefill(PROMPT, Sampling(), wants_logits=False).tokens[-1])
        for _ in range(7):
            plain.step([token], Sampling())
            token = session.decode(token, Sampling(), num_more=5)
        for new in ([5, 6, 7], [8]):
            output = session.step(new, Sampling())
            np.testing.assert_array_equal(output.logits, plain.step(new, Sampling()).logits)
