"""What a session asks of an executor when it drafts, and what it refuses."""

import numpy as np
import pytest
from fake import NUM_EMBEDDINGS, VOCAB, FakeExecutor, make_config

from inkrt.errors import CapacityError, RequestError
from inkrt.runtime.engine_file import DRAFT_STEP, DraftSpec
from inkrt.runtime.executor import Sampling, StepInput, StepOutput
from inkrt.runtime.session import Session
from inkrt.runtime.state import StateManager

SPEC = DraftSpec("dspark", 5, "rnn", True)
CONFIG = make_config(draft=SPEC)
HOT = Sampling(temperature=0.7, seed=9)
TOKENS = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(96)]


class DraftingExecutor(FakeExecutor):
    """Keeps the inputs of draft steps and answers with numbers made of them."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.drafts: list[StepInput] = []

    def run(self, step: str, step_input: StepInput, *, wants_logits: bool = True) -> StepOutput:
        if step != DRAFT_STEP:
            return super().run(step, step_input, wants_logits=wants_logits)
        self.drafts.append(step_input)
        tokens = np.arange(SPEC.block_size, dtype=np.int32) + step_input.tokens[0]
        logits = np.zeros((SPEC.block_size if wants_logits else 0, VOCAB), np.float32)
        return StepOutput(tokens, logits, np.full(SPEC.block_size, 0.5, np.float32))


@pytest.fixture
def states() -> StateManager:
    return StateManager(CONFIG.state, CONFIG.max_seq_len, CONFIG.rebuild_command)


@pytest.fixture
def executor() -> DraftingExecutor:
    return DraftingExecutor()


@pytest.fixture
def session(executor: DraftingExecutor, states: StateManager) -> Session:
    return Session(executor, states, CONFIG, states.open())


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("length", [0, 1, 4, 9, 95])
def test_a_draft_stands_behind_the_session(session, executor, states, length, coupled):
    """The anchor is at the next position; neither pages nor tokens change."""
    if length:
        session.prefill(TOKENS[:length], HOT)
    free = states.num_free_pages
    output = session.draft(TOKENS[length], HOT, coupled=coupled, wants_logits=not coupled)
    (asked,) = executor.drafts
    assert (asked.tokens, asked.position) == ([TOKENS[length]], length)
    assert (asked.sampling, asked.is_coupled) == (HOT, coupled)
    assert len(asked.pages) == -(-length // 4)
    assert output.tokens.tolist() == [TOKENS[length] + i for i in range(5)]
    assert output.logits.shape == ((0 if coupled else 5), VOCAB)
    assert output.confidences is not None
    assert output.confidences.tolist() == [0.5] * 5
    assert session.tokens == TOKENS[:length]
    assert states.num_free_pages == free


def test_a_draft_does_not_disturb_what_follows(session):
    session.prefill(TOKENS[:10], HOT)
    session.draft(3, HOT, coupled=True, wants_logits=False)
    session.step(TOKENS[10:14], HOT)
    session.rollback(11)
    session.draft(3, HOT, coupled=True, wants_logits=False)
    assert session.tokens == TOKENS[:11]


@pytest.mark.parametrize("token", [-1, NUM_EMBEDDINGS, 1.5])
def test_invalid_tokens_are_refused(session, executor, token):
    with pytest.raises(RequestError):
        session.draft(token, HOT, coupled=True, wants_logits=False)
    assert executor.drafts == []


def test_full_closed_and_drafterless_sessions_are_refused(session, executor, states):
    session.prefill(TOKENS, HOT)
    with pytest.raises(CapacityError, match="96 \\+ 1 tokens do not fit"):
        session.draft(3, HOT, coupled=True, wants_logits=False)
    session.close()
    with pytest.raises(RequestError, match="the session is closed"):
        session.draft(3, HOT, coupled=True, wants_logits=False)
    bare = Session(executor, states, make_config(), states.open())
    with pytest.raises(RequestError, match=r"this engine has no drafter.*ink-build CHECKPOINT"):
        bare.draft(3, HOT, coupled=True, wants_logits=False)
    last = Session(executor, states, CONFIG, states.open())
    states.is_closed = True
    with pytest.raises(RequestError, match="the engine is closed"):
        last.draft(3, HOT, coupled=True, wants_logits=False)
    assert executor.drafts == []
