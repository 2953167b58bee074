"""Sessions over a fake executor against plain token lists."""

from itertools import product

import numpy as np
import pytest
from fake import (
    NUM_EMBEDDINGS,
    ROLLBACK,
    FakeExecutor,
    expected_logits,
    expected_token,
    make_config,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inkrt.errors import CapacityError, RequestError
from inkrt.runtime.engine_file import StateLayout, StepSpec
from inkrt.runtime.executor import Sampling
from inkrt.runtime.session import MAX_AHEAD, Session
from inkrt.runtime.state import StateManager

GREEDY = Sampling()
NOISY = Sampling(temperature=0.8, seed=5)
CONFIG = make_config()
TOKENS = [(7 * i * i + 3 * i + 5) % 400 for i in range(96)]


class Bench:
    """An executor, its state manager and a way to open sessions."""

    def __init__(self, config=CONFIG) -> None:
        self.config = config
        self.executor = FakeExecutor(config)
        self.states = StateManager(config.state, config.max_seq_len, config.rebuild_command)

    def session(self) -> Session:
        return Session(self.executor, self.states, self.config, self.states.open())


class Machine(RuleBasedStateMachine):
    """Random histories of up to three sessions; every row is compared with the plain list's."""

    def __init__(self) -> None:
        super().__init__()
        # Fewer pages than three full sessions need, so that they run out too.
        state = StateLayout(3, 4, 40, ROLLBACK, ())
        self.bench = Bench(make_config(state=state))
        self.open: list[tuple[Session, list[int]]] = []
        self.high_water: dict[int, int] = {}

    def pick(self, data: st.DataObject) -> tuple[Session, list[int]]:
        return self.open[data.draw(st.integers(0, len(self.open) - 1))]

    def advance_high_water(self, session: Session, length: int) -> None:
        self.high_water[id(session)] = max(self.high_water[id(session)], length)

    def is_damaged(self, session: Session) -> bool:
        return self.high_water[id(session)] - session.length > ROLLBACK

    def assert_few_pages_are_free(self) -> None:
        # The widest step needs 16 pages and a copy of a shared one.
        assert self.bench.states.num_free_pages < 17

    @precondition(lambda self: len(self.open) < 3)
    @rule()
    def open_one(self) -> None:
        session = self.bench.session()
        self.open.append((session, []))
        self.high_water[id(session)] = 0

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        count=st.integers(1, 80),
        chunk=st.sampled_from([None, 1, 3, 4, 7, 64]),
        sampling=st.sampled_from([GREEDY, NOISY]),
    )
    def prefill(
        self, data: st.DataObject, count: int, chunk: int | None, sampling: Sampling
    ) -> None:
        session, tokens = self.pick(data)
        new = [(t + len(tokens) + count) % NUM_EMBEDDINGS for t in TOKENS[:count]]
        if self.is_damaged(session) or len(tokens) + count > 96:
            with pytest.raises(CapacityError, match=r"failed step|context"):
                session.prefill(new, sampling, chunk=chunk)
            return
        try:
            output = session.prefill(new, sampling, chunk=chunk)
        except CapacityError:  # out of pages: the pieces before stay
            self.assert_few_pages_are_free()
            tokens += new[: session.length - len(tokens)]
        else:
            tokens += new
            np.testing.assert_array_equal(output.logits, [expected_logits(tokens)])
            assert output.tokens.tolist() == [expected_token(tokens, sampling)]
        self.advance_high_water(session, len(tokens))

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        new=st.lists(st.integers(0, NUM_EMBEDDINGS - 1), min_size=1, max_size=8),
        sampling=st.sampled_from([GREEDY, NOISY]),
    )
    def step(self, data: st.DataObject, new: list[int], sampling: Sampling) -> None:
        session, tokens = self.pick(data)
        if self.is_damaged(session) or len(tokens) + len(new) > 96:
            with pytest.raises(CapacityError):
                session.step(new, sampling)
            return
        try:
            output = session.step(new, sampling)
        except CapacityError:
            self.assert_few_pages_are_free()
            return
        for i, row in enumerate(output.logits):
            history = tokens + new[: i + 1]
            np.testing.assert_array_equal(row, expected_logits(history))
            assert output.tokens[i] == expected_token(history, sampling)
        tokens += new
        self.advance_high_water(session, len(tokens))

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        token=st.integers(0, NUM_EMBEDDINGS - 1),
        count=st.integers(1, 12),
        num_unused=st.integers(0, 6),
        sampling=st.sampled_from([GREEDY, NOISY]),
    )
    def decode(
        self, data: st.DataObject, token: int, count: int, num_unused: int, sampling: Sampling
    ) -> None:
        """Calls in a row, of which more were announced than come."""
        session, tokens = self.pick(data)
        for num_left in reversed(range(num_unused, num_unused + count)):
            if self.is_damaged(session) or len(tokens) == 96:
                with pytest.raises(CapacityError):
                    session.decode(token, sampling, num_more=num_left)
                return
            try:
                drawn = session.decode(token, sampling, num_more=num_left)
            except CapacityError:
                assert self.bench.states.num_free_pages < 2
                return
            tokens.append(token)
            token = drawn
            assert token == expected_token(tokens, sampling)
            self.advance_high_water(session, len(tokens))
            furthest = session._sequence.high_water
            assert furthest <= max(
                self.high_water[id(session)], min(len(tokens) + min(num_left, MAX_AHEAD), 96)
            )
            self.high_water[id(session)] = furthest

    @precondition(lambda self: self.open)
    @rule(data=st.data(), count=st.integers(1, 64), rows=st.integers(0, 63))
    def failing_step(self, data: st.DataObject, count: int, rows: int) -> None:
        session, tokens = self.pick(data)
        if self.is_damaged(session) or len(tokens) + count > 96:
            return
        self.bench.executor.fail_after = rows % count
        try:
            session.prefill(TOKENS[:count], GREEDY)
        except OSError:
            if tokens:
                self.advance_high_water(session, len(tokens) + count)
        except CapacityError:
            self.bench.executor.fail_after = None

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        session, tokens = self.pick(data)
        back = data.draw(st.integers(0, min(len(tokens), 12)))
        length = 0 if back == 12 else len(tokens) - back
        if self.high_water[id(session)] - length > ROLLBACK and length > 0:
            with pytest.raises(CapacityError, match="cannot roll back"):
                session.rollback(length)
            return
        session.rollback(length)
        del tokens[length:]
        if length == 0:
            self.high_water[id(session)] = 0

    @precondition(lambda self: 0 < len(self.open) < 3)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        session, tokens = self.pick(data)
        twin = session.fork()
        self.open.append((twin, list(tokens)))
        self.high_water[id(twin)] = self.high_water[id(session)]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session, _ = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        session.close()
        session.close()

    @invariant()
    def timelines_agree(self) -> None:
        for session, tokens in self.open:
            assert session.tokens == tokens
            assert session.length == len(tokens)

    def teardown(self) -> None:
        for session, _ in self.open:
            session.close()
        assert self.bench.states.num_free_slots == 3
        assert self.bench.states.num_free_pages == 40


Machine.TestCase.settings = settings(max_examples=200, stateful_step_count=25, deadline=None)
TestStateMachine = Machine.TestCase


@pytest.mark.parametrize(
    ("count", "chunk", "calls"),
    [
        (1, None, [("decode", 1)]),
        (5, None, [("verify5", 5)]),
        (37, None, [("prefill64", 37)]),
        (70, None, [("prefill64", 64), ("verify6", 6)]),
        (7, 3, [("verify3", 3), ("verify3", 3), ("decode", 1)]),
        (3, 1, [("decode", 1)] * 3),
        (20, 9, [("prefill64", 9), ("prefill64", 9), ("verify2", 2)]),
        (65, 1000, [("prefill64", 64), ("decode", 1)]),
    ],
)
def test_prefill_takes_the_narrowest_step_for_each_piece(
    count: int, chunk: int | None, calls: list[tuple[str, int]]
) -> None:
    bench = Bench()
    output = bench.session().prefill(TOKENS[:count], GREEDY, chunk=chunk)
    assert bench.executor.calls == calls
    np.testing.assert_array_equal(output.logits, [expected_logits(TOKENS[:count])])


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 64])
def test_chunks_do_not_change_the_result(chunk: int) -> None:
    session = Bench().session()
    output = session.prefill(TOKENS[:90], NOISY, chunk=chunk)
    assert output.tokens.tolist() == [expected_token(TOKENS[:90], NOISY)]
    assert output.logits.shape == (1, 400)
    assert session.tokens == TOKENS[:90]


def test_speculation_is_a_verify_step_and_a_rollback() -> None:
    session = Bench().session()
    session.prefill(TOKENS[:30], GREEDY)
    for drafted, accepted in product(range(2, 9), (1, 2)):
        start = session.length
        output = session.step(TOKENS[:drafted], NOISY)
        assert output.logits.shape == (drafted, 400)
        session.rollback(start + accepted)
        row = output.tokens[accepted - 1]
        assert row == expected_token(session.tokens, NOISY)


def test_a_failing_step_changes_nothing() -> None:
    bench = Bench()
    session = bench.session()
    session.prefill(TOKENS[:10], GREEDY)
    twin = session.fork()
    before = bench.states.num_free_pages
    bench.executor.fail_after = 2
    with pytest.raises(OSError, match="the device failed"):
        twin.step([1, 2, 3], GREEDY)
    assert twin.tokens == TOKENS[:10]
    assert bench.states.num_free_pages == before
    for one in (twin, session):
        output = one.step([8], GREEDY)
        np.testing.assert_array_equal(output.logits, [expected_logits([*TOKENS[:10], 8])])


def test_pieces_before_a_failing_one_stay() -> None:
    bench = Bench()
    session = bench.session()
    bench.executor.fail_after = 10
    with pytest.raises(OSError, match="the device failed"):
        session.prefill(TOKENS[:14], GREEDY, chunk=8)
    assert session.tokens == TOKENS[:8]
    output = session.prefill(TOKENS[8:14], GREEDY)
    np.testing.assert_array_equal(output.logits, [expected_logits(TOKENS[:14])])


def test_an_empty_session_survives_a_failing_wide_step() -> None:
    bench = Bench()
    session = bench.session()
    bench.executor.fail_after = 30
    with pytest.raises(OSError, match="the device failed"):
        session.prefill(TOKENS[:60], GREEDY)
    assert bench.states.num_free_pages == 72
    output = session.prefill(TOKENS[:60], GREEDY)
    np.testing.assert_array_equal(output.logits, [expected_logits(TOKENS[:60])])


def test_a_failing_fork_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    session = bench.session()
    session.prefill(TOKENS[:10], GREEDY)

    def fail(source: int, target: int) -> None:
        raise OSError("no copy")

    monkeypatch.setattr(bench.executor, "copy_slot", fail)
    with pytest.raises(OSError, match="no copy"):
        session.fork()
    assert bench.states.num_free_slots == 2


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "the prompt has no tokens; give at least one"),
        (
            [5, 410],
            "token 1 of the prompt has id 410, ids of this model are 0..409; "
            "encode text with the engine's own tokenizer",
        ),
        (
            [-1],
            "token 0 of the prompt has id -1, ids of this model are 0..409; "
            "encode text with the engine's own tokenizer",
        ),
        (
            [1.5],
            "token ids must be integers: 'float' object cannot be interpreted as an integer",
        ),
    ],
)
def test_invalid_tokens(tokens: list[int], message: str) -> None:
    session = Bench().session()
    for call in (session.prefill, session.step):
        with pytest.raises(RequestError) as caught:
            call(tokens, GREEDY)
        assert str(caught.value) == message
        assert caught.value.param == "prompt"


def test_numpy_tokens_are_fine() -> None:
    session = Bench().session()
    output = session.prefill(np.array(TOKENS[:5], np.int32), GREEDY)
    session.step(output.tokens, GREEDY)
    assert all(type(token) is int for token in session.tokens)


def test_a_prompt_over_the_context_runs_nothing() -> None:
    bench = Bench()
    session = bench.session()
    session.prefill([1], GREEDY)
    with pytest.raises(CapacityError) as caught:
        session.prefill(TOKENS[:96], GREEDY)
    assert str(caught.value) == (
        "1 + 96 tokens do not fit into the engine's context of 96; send fewer tokens or rebuild "
        "with: ink-build CHECKPOINT -o ENGINE --target cpu --max-seq-len 97 --max-batch-size 3"
    )
    assert session.tokens == [1]
    session.prefill(TOKENS[:95], GREEDY)


def test_a_step_wider_than_the_engine_has() -> None:
    session = Bench().session()
    with pytest.raises(RequestError) as caught:
        session.step(TOKENS[:9], GREEDY)
    assert str(caught.value) == (
        "9 tokens in one step, the widest decode or verify step of this engine takes 8; use prefill"
    )


def test_steps_that_are_missing_are_served_by_wider_ones() -> None:
    steps = (StepSpec("decode", 1, 1), StepSpec("verify4", 4, 4))
    bench = Bench(make_config(steps=steps))
    session = bench.session()
    session.prefill(TOKENS[:6], GREEDY)
    output = session.step(TOKENS[:3], GREEDY)
    assert bench.executor.calls == [("verify4", 4), ("verify4", 2), ("verify4", 3)]
    assert len(output.tokens) == 3


def test_a_closed_session_says_so() -> None:
    with Bench().session() as session:
        pass
    for call in (
        lambda: session.prefill([1], GREEDY),
        lambda: session.step([1], GREEDY),
        lambda: session.rollback(0),
        session.fork,
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert str(caught.value) == "the session is closed; open another with engine.session()"
