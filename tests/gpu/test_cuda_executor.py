"""The CUDA executor on a toy engine: steps, sessions, self-feeding decode, errors."""

import random
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import toy

from inkrt import LLM, SamplingParams
from inkrt.errors import DeviceError
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling, StepInput
from inkrt.runtime.executor.cuda_timing import Chain, Timer

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engine(gpu, tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "engine"
    toy.write_engine(folder, gpu)
    with Engine.open(folder) as opened:
        yield opened


def test_sessions_with_rollback_and_fork(engine):
    generator = random.Random(3)
    sessions = [(engine.session(), [])]
    for _ in range(300):
        session, tokens = generator.choice(sessions)
        action = generator.random()
        if action < 0.1 and len(sessions) < toy.SLOTS:
            sessions.append((session.fork(), list(tokens)))
            continue
        if action < 0.2 and len(sessions) > 1:
            sessions.remove((session, tokens))
            session.close()
            continue
        width = generator.randint(1, 8)
        if len(tokens) + width > engine.config.max_seq_len:
            session.rollback(0)
            tokens.clear()
        new = [generator.randrange(toy.VOCAB) for _ in range(width)]
        output = session.step(new, Sampling())
        for row in range(width):
            expected = toy.next_token(tokens + new[: row + 1])
            assert output.tokens[row] == expected
            assert output.logits[row].argmax() == expected
            assert output.logits[row].sum() == 1
        kept = generator.randint(1, width)
        session.rollback(len(tokens) + kept)
        tokens.extend(new[:kept])
    for session, _ in sessions:
        session.close()


def test_decode_feeds_itself(engine):
    """Over all pages, to the end of the context."""
    with engine.session() as session:
        tokens = [5]
        while len(tokens) <= 256:
            tokens.append(session.decode(tokens[-1], Sampling(), num_more=256 - len(tokens)))
            assert tokens[-1] == toy.next_token(tokens[:-1])
        assert session.length == engine.config.max_seq_len == 256


def test_decode_goes_on_with_what_was_not_foreseen(engine):
    """Early stops, other tokens, steps, forks and sessions in between."""
    generator = random.Random(4)
    sessions = [(engine.session(), [3]) for _ in range(2)]
    for _ in range(200):
        number = generator.randrange(len(sessions))
        session, tokens = sessions[number]
        if len(tokens) > 200:
            session.rollback(0)
            del tokens[1:]
        for _ in range(generator.randint(1, 12)):  # tokens[-1] is not appended yet
            tokens.append(session.decode(tokens[-1], Sampling(), num_more=9))
            assert tokens[-1] == toy.next_token(tokens[:-1])
        action = generator.random()
        if action < 0.4:
            tokens[-1] = generator.randrange(toy.VOCAB)
        elif action < 0.6:
            new = [tokens[-1], *(generator.randrange(toy.VOCAB) for _ in range(7))]
            output = session.step(new[: generator.randint(1, 8)], Sampling())
            tokens[-1:] = [*new[: len(output.tokens)], int(output.tokens[-1])]
            assert tokens[-1] == toy.next_token(tokens[:-1])
        elif action < 0.8:
            twin = session.fork()
            sessions[number] = (twin, tokens)
            session.close()
        elif action < 0.9:  # a page for another session, and back again
            with engine.session() as other:
                other.step([1, 2], Sampling())
        assert sessions[number][0].tokens == tokens[:-1]
    for session, _ in sessions:
        session.close()


@pytest.fixture
def llm(engine):
    with LLM(engine.folder) as opened:
        yield opened


def _generated(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(toy.next_token(tokens))
    return tuple(tokens[len(prompt) :])


def test_generation_at_the_pace_of_the_gpu(llm):
    prompt = [7, 1, 30, 2, 2, 9, 11, 4, 5, 6, 12]
    expected = _generated(prompt, 245)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0.0))
    assert output.outputs[0].token_ids == expected
    assert output.outputs[0].finish_reason == "length"
    stop = next(token for token in expected if expected.index(token) > 20)
    until_stop = expected[: expected.index(stop) + 1]
    params = SamplingParams(temperature=0.0, stop_token_ids=[stop])
    (output,) = llm.generate([prompt], params)
    assert (output.outputs[0].token_ids, output.outputs[0].stop_reason) == (until_stop, stop)
    stream = llm.stream(prompt, SamplingParams(temperature=0.0))
    assert [next(stream).token_ids[0] for _ in range(40)] == list(expected[:40])
    stream.close()
    # What ran ahead of the closed stream leaves no trace, and several requests take turns.
    prompts = [[1, 2, 3], prompt, [30] * 9, [5, 5]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=50))
    assert [output.outputs[0].token_ids for output in outputs] == [
        _generated(each, 50) for each in prompts
    ]


def test_generation_in_threads_that_did_not_open_the_engine(llm):
    prompts = [[1, 2, 3], [30] * 9, [5, 5]]
    params = SamplingParams(temperature=0.0, max_tokens=50)
    with ThreadPoolExecutor(len(prompts)) as pool:
        outputs = list(pool.map(lambda prompt: llm.generate([prompt], params)[0], prompts))
    assert [output.outputs[0].token_ids for output in outputs] == [
        _generated(each, 50) for each in prompts
    ]


@pytest.mark.parametrize("ahead", [0, 9])
def test_error_word_is_raised(engine, ahead):
    state = engine.config.state.buffers[0]
    memory = engine.executor.memory
    region = memory.region(f"state/{state.name}")
    session = engine.session()
    session.step([1, 2, 3], Sampling())
    memory._set(memory.base + region.offset, 9, region.size)
    with pytest.raises(DeviceError, match="error word 0x5"):
        session.decode(4, Sampling(), num_more=9) if ahead else session.step([4], Sampling())
    memory._set(memory.error, 0, 4)
    session.close()


def test_steps_are_timed(engine):
    timer, step_input = Timer(engine.executor), StepInput([1], 0, 0, [0], Sampling())
    times = timer.step("decode", step_input, 20)
    assert len(times) == 20
    assert 0 < np.median(times) < 1000
    first = np.median(timer.step("decode", step_input, 40, until=1))
    assert 0 < first < 1.5 * np.median(times)


def test_chains_are_timed(engine):
    """With and without a flush a launch of the toy takes a few microseconds."""
    plan = engine.executor.plan("decode")
    one = msgspec.structs.replace(plan, launches=plan.launches[:1])
    chains = [Chain(one, 20, flush=True), Chain(one, 20, flush=False)]
    times = Timer(engine.executor).chains(
        "decode", StepInput([1], 0, 0, [0], Sampling()), 0, chains, 50
    )
    assert [len(of_chain) for of_chain in times] == [51, 51]
    assert all(0.5 < np.median(of_chain) < 50 for of_chain in times)
