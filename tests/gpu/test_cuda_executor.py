"""The CUDA executor on a toy engine: steps, sessions, self-feeding decode, errors."""

import random

import msgspec
import numpy as np
import pytest
import toy

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
    executor = engine.executor
    tokens = [5]
    step_input = StepInput([5], 0, 1, [3, 0, 7, 2], Sampling())
    for token in executor.decode(step_input, 200):
        assert token == toy.next_token(tokens)
        tokens.append(token)
    assert len(tokens) == 201


def test_error_word_is_raised(engine):
    from inkrt.errors import DeviceError

    state = engine.config.state.buffers[0]
    memory = engine.executor.memory
    region = memory.region(f"state/{state.name}")
    session = engine.session()
    session.step([1, 2, 3], Sampling())
    engine.executor._driver.cuMemsetD8(memory.base + region.offset, 9, region.size)
    with pytest.raises(DeviceError, match="error word 0x5"):
        session.step([4], Sampling())
    engine.executor._driver.cuMemsetD8(memory.error, 0, 4)
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
