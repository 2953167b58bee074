"""Rounds of which a prescribed number of drafts is right, on whole engines: output and state.

0 to 7 accepted drafts stand behind each other in every order, across the ends of rings and pages
and up to the last position of the context. What a plain run says and keeps is the truth, bit for
bit; a verify step rounds as a decode step does on the CPU.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling
from inkrt.runtime.session import Session
from inkrt.runtime.spec.drafter import Proposal
from inkrt.runtime.spec.round import Speculator
from inkrt.runtime.spec.width import FixedWidth

BLOCK = 7
PROMPT_LENGTH = 21
States = list[dict[str, torch.Tensor]]
_OTHERS = ("flint", "with drafter", "mtp")


@pytest.fixture(
    scope="module", params=["inkling2", *(pytest.param(x, marks=pytest.mark.slow) for x in _OTHERS)]
)
def engine(
    request: pytest.FixtureRequest,
    make_engine: Any,
    make_speculating_engine: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    if request.param == "inkling2":
        folder = make_engine("float32", num_layers=6, max_batch_size=8)
    elif request.param == "with drafter":
        folder = make_speculating_engine("gated")
    else:
        model = "inkling" if request.param == "mtp" else "flint"
        base = tmp_path_factory.mktemp(model)
        write_checkpoint(base / "checkpoint", seed=2, dtype="float32", model=model)
        folder = base / "engine"
        build_engine(base / "checkpoint", folder, BuildOptions(max_seq_len=250, max_batch_size=3))
    with Engine.open(folder) as opened:
        yield opened


def state_at(engine: Engine, session: Session, position: int) -> dict[str, torch.Tensor]:
    """A copy of what every buffer of the state holds for a position."""
    sequence = session._sequence
    found = {}
    for spec in engine.config.state.buffers:
        rows = spec.shape[1]
        entry = sequence.slot if spec.kind == "ring" else sequence.pages[position // rows]
        found[spec.name] = engine.executor.state(spec.name)[entry, position % rows].clone()
    return found


class Oracle:
    """Proposes prescribed numbers of right tokens, each followed by wrong ones."""

    def __init__(self, text: Sequence[int], rights: Iterator[int]) -> None:
        self.text, self.rights, self.right = text, rights, 0

    def draft(
        self, session: Session, tokens: Sequence[int], sampling: Sampling, most: int, **_rule: Any
    ) -> Proposal:
        assert list(tokens) == list(self.text[: len(tokens)])
        assert session.length == len(tokens) - 1
        place = len(tokens)
        if session.config.draft is not None:  # drafting leaves no trace either
            session.draft(tokens[-1], sampling, coupled=True, wants_logits=False)
        self.right = min(next(self.rights), most)
        wrong = [token ^ 1 for token in self.text[place + self.right : place + most]]
        return Proposal([*self.text[place : place + self.right], *wrong])


def in_every_order(seed: int) -> Iterator[int]:
    """Numbers of 0 to BLOCK, every ordered pair of which are neighbors."""
    generator = random.Random(seed)
    while True:
        # A closed walk along all edges of the complete graph with loops (Hierholzer).
        left = {a: generator.sample(range(BLOCK + 1), BLOCK + 1) for a in range(BLOCK + 1)}
        stack, walk = [0], []
        while stack:
            if left[stack[-1]]:
                stack.append(left[stack[-1]].pop())
            else:
                walk.append(stack.pop())
        yield from reversed(walk[1:])


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_output_and_state_are_those_of_plain_decoding(engine: Engine, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=4)
    generator = random.Random(1)
    limit = engine.config.model.vocab_size
    prompt = [generator.randrange(limit) for _ in range(PROMPT_LENGTH)]
    end = engine.config.max_seq_len
    with engine.session() as session:
        text = [*prompt, int(session.prefill(prompt, sampling).tokens[-1])]
        states: States = [{}] * PROMPT_LENGTH
        while len(text) < end:
            text.append(session.decode(text[-1], sampling))
            states.append(state_at(engine, session, len(states)))

    rights, seen = in_every_order(3), set()
    for _ in range(2):  # the second run finds in the slot what the first one left
        oracle = Oracle(text, rights)
        speculator = Speculator(oracle, FixedWidth(), BLOCK)
        with engine.session() as session:
            tokens = [*prompt, int(session.prefill(prompt, sampling).tokens[-1])]
            before = None
            while len(tokens) < end:
                start = session.length
                step = speculator.run(session, tokens, sampling, end - len(tokens))
                tokens += step.tokens
                assert tokens == text[: len(tokens)]
                assert session.length == len(tokens) - 1
                if step.drafted == BLOCK:
                    assert len(step.tokens) == oracle.right + 1
                    seen.add((before, oracle.right))
                    before = oracle.right
                for position in range(start, session.length):
                    check_state(engine, session, states, position)
            # All that the next step could read: going back never loses more than these rows.
            keep = engine.config.state.rollback_tokens
            for position in range(PROMPT_LENGTH, session.length):
                check_state(engine, session, states, position, session.length + keep)
    pairs = {(a, b) for a in range(BLOCK + 1) for b in range(BLOCK + 1)}
    assert len(pairs & seen) > (0.8 if end > 200 else 0.3) * len(pairs)


def check_state(
    engine: Engine, session: Session, states: States, position: int, written: int = 0
) -> None:
    """Compare a position's state; a ring may have lost it if it was written up to `written`."""
    found = state_at(engine, session, position)
    for spec in engine.config.state.buffers:
        if spec.kind == "paged" or position > written - spec.shape[1]:
            expected = states[position][spec.name]
            assert torch.equal(found[spec.name], expected), (position, spec.name)
