"""A small Flint on the GPU against the same plan's operators on the CPU, in NVFP4 and in bf16."""

from dataclasses import replace

import numpy as np
import pytest
from both_targets import (
    FLIPPED,
    TYPICAL,
    check_decode_loop,
    check_launches,
    check_rows_alike,
    make_prompt,
    open_both,
    relative_error,
)

from inkrt import LLM, SamplingParams, SpeculativeConfig
from inkrt.commands.launch_parity import compare_launches
from inkrt.runtime.executor import Sampling

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["nvfp4", "bf16"])
def engines(request, gpu, tmp_path_factory):
    with open_both(tmp_path_factory.mktemp(request.param), request.param, 64) as opened:
        yield opened


@pytest.mark.parametrize("width", [1, 5, 8])
def test_every_launch_is_near_the_cpu(engines, width):
    distances = compare_launches(engines["cpu"], engines["sm_90a"], make_prompt(width))
    check_launches(distances, 15)


@pytest.mark.parametrize("length", [1, 2, 9, 65, 600])
def test_logits_equal_those_of_the_cpu(engines, length):
    prompt = make_prompt(length)
    with engines["cpu"].session() as cpu, engines["sm_90a"].session() as gpu:
        expected = cpu.prefill(prompt, Sampling())
        got = gpu.prefill(prompt, Sampling())
        errors, flips = [], 0
        for _ in range(24):
            a, b = got.logits[-1].astype(np.float64), expected.logits[-1].astype(np.float64)
            errors.append(relative_error(a, b))
            best = np.sort(b)[-2:]
            is_clear = best[1] - best[0] > 2 * np.abs(a - b).max()
            flips += int(a.argmax()) != int(b.argmax())
            assert int(got.tokens[-1]) == int(a.argmax())
            assert not is_clear or int(a.argmax()) == int(b.argmax())
            token = int(expected.tokens[-1])
            expected = cpu.step([token], Sampling())
            got = gpu.step([token], Sampling())
    assert np.median(errors) <= TYPICAL, f"{errors}, {flips} other tokens of 24"
    assert max(errors) <= FLIPPED, f"{errors}, {flips} other tokens of 24"


def test_rows_do_not_depend_on_the_width(engines):
    """Across the window of 513, pages of 64 and the ring of 576."""
    check_rows_alike(engines["sm_90a"], make_prompt(640))


def test_decode_feeds_itself_like_steps(engines):
    check_decode_loop(engines["sm_90a"], make_prompt(70))


def test_llm_generates_what_steps_give(engines):
    """Over the window and the ring's wrap, stopped early, and gone on with in a session."""
    engine, prompt, count = engines["sm_90a"], make_prompt(70), 600
    with engine.session() as session:
        expected = [int(session.prefill(prompt, Sampling()).tokens[-1])]
        while len(expected) < count:
            expected.append(int(session.step(expected[-1:], Sampling()).tokens[-1]))
    greedy = {"temperature": 0.0, "ignore_eos": True}
    with LLM(engine.folder) as llm:
        (output,) = llm.generate([prompt], SamplingParams(**greedy, max_tokens=count))
        assert list(output.outputs[0].token_ids) == expected
        stop = expected[count // 2]
        params = SamplingParams(**greedy, stop_token_ids=[stop])
        (output,) = llm.generate([prompt], params)
        assert list(output.outputs[0].token_ids) == expected[: expected.index(stop) + 1]
    with engine.session() as plain, engine.session() as ahead:
        for session in (plain, ahead):
            token = int(session.prefill(prompt, Sampling()).tokens[-1])
        for token in expected[:500]:  # more were announced than come
            ahead.decode(token, Sampling(), num_more=9)
        for start in range(0, 500, 5):
            plain.step(expected[start : start + 5], Sampling())
        for width in (3, 1, 8):
            other = make_prompt(width)
            a, b = plain.step(other, Sampling()), ahead.step(other, Sampling())
            np.testing.assert_array_equal(a.logits, b.logits)


def test_the_host_draws_what_the_step_draws(engines):
    """Requests with logits processing: one that changes nothing, one with drafts."""
    folder, prompt = engines["sm_90a"].folder, make_prompt(70)
    shared = {"max_tokens": 150, "ignore_eos": True}
    requests = [
        SamplingParams(temperature=0.0, **shared),
        SamplingParams(temperature=1.0, seed=2**62 + 1, **shared),
        SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02, seed=3, **shared),
    ]
    prompts = [prompt] * len(requests)
    on_host = [replace(params, logit_bias={5: 0.0}) for params in requests]
    changed = [
        replace(params, allowed_token_ids=[5, 6, 7, 8], frequency_penalty=0.02, min_tokens=20)
        for params in requests
    ]
    with LLM(folder) as llm:
        by_step = [output.outputs for output in llm.generate(prompts, requests)]
        assert [output.outputs for output in llm.generate(prompts, on_host)] == by_step
        plain = [output.outputs for output in llm.generate(prompts, changed)]
    with LLM(folder, speculative=SpeculativeConfig("ngram")) as llm:
        assert [output.outputs for output in llm.generate(prompts, on_host)] == by_step
        assert [output.outputs for output in llm.generate(prompts, changed)] == plain
        assert llm.speculation.accepted > 0
