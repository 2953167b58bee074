"""Speculation leaves no trace: any widths, any rejections, against a run that never drafted.

Because rows of narrow steps do not depend on the width, logits and state are compared bit for bit.
"""

import random

import numpy as np
import pytest
import torch

from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling

NUM_SCHEDULES = 200
# Across the end of the 48-position KV rings, the 16-position convolution rings and a page of 64.
STARTS = (1, 13, 30, 46, 62)
SPAN = 40


# What a rollback does to state has no dtype; that rows of bfloat16 are equal at other widths, too,
# test_parity shows.
@pytest.fixture(
    scope="module", params=[pytest.param("bfloat16", marks=pytest.mark.slow), "float32"]
)
def engine(request, make_engine):
    # Layers 0 to 5: five sliding ones and a full one.
    folder = make_engine(request.param, num_layers=6, max_batch_size=8)
    with Engine.open(folder) as opened:
        yield opened


def _row(engine: Engine, session, spec, position: int) -> torch.Tensor:
    """What a state buffer holds for a position of a session."""
    sequence = session._sequence
    rows = spec.shape[1]
    entry = sequence.slot if spec.kind == "ring" else sequence.pages[position // rows]
    return engine.executor.state(spec.name)[entry, position % rows]


@pytest.fixture(scope="module")
def truth(engine):
    """Of a plain run: its tokens, logits and state rows by position, and forks at STARTS."""
    generator = random.Random(5)
    vocab_size = engine.config.model.vocab_size
    tokens = [generator.randrange(vocab_size) for _ in range(max(STARTS) + SPAN)]
    logits, states, forks = [], [], {}
    session = engine.session()
    for position, token in enumerate(tokens):
        if position in STARTS:
            forks[position] = session.fork()
        logits.append(session.step([token], Sampling()).logits[0])
        states.append(
            {
                spec.name: _row(engine, session, spec, position).clone()
                for spec in engine.config.state.buffers
            }
        )
    yield tokens, logits, states, forks
    for open_session in (*forks.values(), session):
        open_session.close()


@pytest.mark.parametrize("start", STARTS)
def test_random_schedules_equal_a_plain_run(engine, truth, start):
    tokens, logits, states, forks = truth
    vocab_size = engine.config.model.vocab_size
    for seed in range(NUM_SCHEDULES // len(STARTS)):
        generator = random.Random(seed * 1000 + start)
        with forks[start].fork() as session:
            for _ in range(3):
                position = session.length
                width = generator.randint(1, 8)
                accepted = generator.randint(1, width)
                drafts = tokens[position : position + accepted] + [
                    generator.randrange(vocab_size) for _ in range(width - accepted)
                ]
                rows = session.step(drafts, Sampling()).logits
                session.rollback(position + accepted)
                np.testing.assert_array_equal(
                    rows[:accepted], logits[position : position + accepted]
                )
            assert session.tokens == tokens[: session.length]
            _require_state_of_plain_run(engine, session, states)


def _require_state_of_plain_run(engine: Engine, session, states) -> None:
    """Every row that a later step can read has the bits of the plain run."""
    for spec in engine.config.state.buffers:
        # Of a ring, only the rows that the furthest write has not replaced.
        first = session._sequence.high_water - spec.shape[1] if spec.kind == "ring" else 0
        for position in range(max(first, 0), session.length):
            row = _row(engine, session, spec, position)
            assert torch.equal(row, states[position][spec.name]), (spec.name, position)
