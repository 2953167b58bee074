"""Decode steps that run ahead: tokens of plain steps, whatever is asked for instead of the next."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake import (
    VOCAB,
    FakeExecutor,
    expected_logits,
    expected_token,
    generate_plainly,
    make_config,
)

from inkrt.errors import CapacityError, RequestError
from inkrt.runtime.engine_file import StateLayout
from inkrt.runtime.executor import Sampling, StepInput
from inkrt.runtime.executor.decode_queue import DecodeQueue
from inkrt.runtime.session import MAX_AHEAD, Session
from inkrt.runtime.spec.drafter import NgramDrafter
from inkrt.runtime.spec.round import Speculator
from inkrt.runtime.spec.width import CostAware, RoundCosts
from inkrt.runtime.state import StateManager

GREEDY = Sampling()
NOISY = Sampling(temperature=0.8, seed=5)
PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(10)]


class Bench:
    """A fake executor with sessions."""

    def __init__(self, **changes: object) -> None:
        self.config = make_config(**changes)
        self.executor = FakeExecutor(self.config)
        config = self.config
        self.states = StateManager(config.state, config.max_seq_len, config.rebuild_command)

    def session(self, tokens: list[int]) -> Session:
        session = Session(self.executor, self.states, self.config, self.states.open())
        session.prefill(tokens, GREEDY)
        return session

    @property
    def num_decoded(self) -> int:
        """Decode steps that ran, asked for or not."""
        return self.executor.calls.count(("decode", 1))


def decode(
    session: Session, token: int, sampling: Sampling, count: int, num_unused: int = 0
) -> Iterator[int]:
    """Tokens drawn by `count` calls, behind which `num_unused` more were announced."""
    for num_more in reversed(range(num_unused, num_unused + count)):
        token = session.decode(token, sampling, num_more=num_more)
        yield token


@pytest.mark.parametrize("sampling", [GREEDY, NOISY])
def test_tokens_of_plain_steps_across_pages_and_rings(sampling: Sampling) -> None:
    bench = Bench()
    session = bench.session(PROMPT)
    drawn = list(decode(session, 7, sampling, 70))
    assert drawn == generate_plainly([*PROMPT, 7], sampling, 70)
    assert session.tokens == [*PROMPT, 7, *drawn[:-1]]
    # Pages of 4 were added on the way, and the device was never waited for.
    assert (bench.executor.num_begun, bench.num_decoded) == (1, 70)


def test_pages_that_are_taken_again_are_the_same() -> None:
    bench = Bench(state=StateLayout(3, 2, 144, 9, ()))  # steps ahead take two pages and more
    session = bench.session(PROMPT)
    drawn = list(decode(session, 7, NOISY, 70))
    assert drawn == generate_plainly([*PROMPT, 7], NOISY, 70)
    assert bench.executor.num_begun == 1


def test_it_runs_ahead_step_by_step_further() -> None:
    bench = Bench()
    session = bench.session(PROMPT)
    ahead = [
        bench.num_decoded - session.length + len(PROMPT) for _ in decode(session, 7, GREEDY, 12)
    ]
    assert ahead == [0, 1, 2, 3, 4, 4, 4, 4, 3, 2, 1, 0]
    assert MAX_AHEAD == 4


def test_sessions_in_turn_run_nothing_in_vain() -> None:
    bench = Bench()
    prompts = [[token, *PROMPT] for token in (1, 2, 3)]
    turns = zip(
        *(decode(bench.session(prompt), 7, NOISY, 9, num_unused=50) for prompt in prompts),
        strict=True,
    )
    drawn = [list(tokens) for tokens in zip(*turns, strict=True)]
    assert drawn == [generate_plainly([*prompt, 7], NOISY, 9) for prompt in prompts]
    assert bench.num_decoded == 27


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("width", [1, 3, 8, 30])
def test_other_tokens_after_an_early_stop(count: int, width: int) -> None:
    bench = Bench()
    session = bench.session(PROMPT)
    list(decode(session, 7, NOISY, count, num_unused=40))
    other = [(token + 1) % VOCAB for token in range(width)]
    history = [*session.tokens, *other]
    output = session.prefill(other, GREEDY)
    np.testing.assert_array_equal(output.logits, [expected_logits(history)])
    assert list(decode(session, 9, NOISY, 6)) == generate_plainly([*history, 9], NOISY, 6)


def test_another_token_or_sampling_than_expected() -> None:
    bench = Bench()
    session = bench.session(PROMPT)
    tokens, token = list(PROMPT), 7
    for number in range(30):
        sampling = (GREEDY, NOISY, Sampling(temperature=0.8, seed=6))[number // 3 % 3]
        drawn = session.decode(token, sampling, num_more=9)
        tokens.append(token)
        assert drawn == expected_token(tokens, sampling)
        token = drawn if number % 5 else (drawn + 1) % VOCAB
    assert session.tokens == tokens


def test_a_fork_after_an_early_stop() -> None:
    bench = Bench()
    session = bench.session(PROMPT)
    token = list(decode(session, 7, NOISY, 6, num_unused=20))[-1]
    tokens = session.tokens
    twin = session.fork()
    expected = generate_plainly([*tokens, token], NOISY, 20)
    # The original goes on first: the page that both share is copied, and decoding begins anew.
    assert list(decode(session, token, NOISY, 10, num_unused=9)) == expected[:10]
    assert list(decode(twin, token, NOISY, 20)) == expected
    assert list(decode(twin.fork(), expected[-1], GREEDY, 3)) == generate_plainly(
        [*tokens, token, *expected], GREEDY, 3
    )
    assert list(decode(session, expected[9], NOISY, 10)) == expected[10:]


def test_going_back_after_an_early_stop() -> None:
    bench = Bench()
    session = bench.session(PROMPT)
    list(decode(session, 7, GREEDY, 20, num_unused=20))
    furthest = session.length + MAX_AHEAD
    lowest = furthest - bench.config.state.rollback_tokens
    with pytest.raises(CapacityError, match=f"go back to at least {lowest}"):
        session.rollback(lowest - 1)
    session.rollback(lowest)
    history = session.tokens
    assert list(decode(session, 3, NOISY, 9)) == generate_plainly([*history, 3], NOISY, 9)


def test_a_slot_in_other_hands_while_steps_are_queued() -> None:
    bench = Bench()
    session = bench.session(PROMPT)
    list(decode(session, 7, GREEDY, 6, num_unused=20))
    position, slot = session.length, session._sequence.slot
    session.close()
    assert (bench.states.num_free_slots, bench.states.num_free_pages) == (3, 72)
    prompt = [11] * position
    other = bench.session(prompt)
    assert other._sequence.slot == slot
    assert list(decode(other, 5, GREEDY, 9)) == generate_plainly([*prompt, 5], GREEDY, 9)


@pytest.mark.parametrize("length", range(85, 96))
def test_the_end_of_the_context(length: int) -> None:
    bench = Bench()
    prompt = [(3 * i) % VOCAB for i in range(length)]
    session = bench.session(prompt)
    drawn = list(decode(session, 7, NOISY, 96 - length, num_unused=9))
    assert drawn == generate_plainly([*prompt, 7], NOISY, 96 - length)
    assert bench.num_decoded == 96 - length
    with pytest.raises(CapacityError, match="96 \\+ 1 tokens do not fit"):
        session.decode(drawn[-1], NOISY, num_more=3)
    assert session.length == 96


def test_the_last_page() -> None:
    bench = Bench(state=StateLayout(2, 4, 7, 9, ()))  # 28 positions for both
    session = bench.session(PROMPT)  # three pages
    blocker = bench.session([1] * 9)  # three more
    drawn = list(decode(session, 7, NOISY, 6, num_unused=9))
    assert drawn == generate_plainly([*PROMPT, 7], NOISY, 6)
    with pytest.raises(CapacityError, match="1 more pages are needed, 0 of 7 are free"):
        session.decode(drawn[-1], NOISY, num_more=9)
    assert session.length == 16
    blocker.close()
    again = list(decode(session, drawn[-1], NOISY, 5, num_unused=9))
    assert again == generate_plainly([*PROMPT, 7, *drawn], NOISY, 5)


def test_pages_given_back_by_steps_that_ran_ahead() -> None:
    """The queued steps write in a page that another session has taken meanwhile."""
    bench = Bench()
    session = bench.session(PROMPT)
    token = list(decode(session, 7, NOISY, 5, num_unused=20))[-1]  # 15 positions, 19 written
    assert session.length == 15
    other = bench.session([2] * 5)
    expected = generate_plainly([*PROMPT, 7, *session.tokens[11:], token], NOISY, 9)
    assert list(decode(session, token, NOISY, 9)) == expected
    assert list(decode(other, 4, GREEDY, 9)) == generate_plainly([*[2] * 5, 4], GREEDY, 9)


def test_pages_change_while_steps_are_queued() -> None:
    """The next reservation gets other pages than those in which queued steps write."""
    bench = Bench()
    session, other = bench.session(PROMPT), bench.session([2] * 5)
    token = list(decode(session, 7, NOISY, 5, num_unused=20))[-1]  # 15 positions, 19 written
    expected = generate_plainly([*session.tokens, token], NOISY, 9)
    other.close()
    assert list(decode(session, token, NOISY, 9)) == expected
    assert bench.executor.num_begun == 2


def test_a_failure_is_raised_by_the_call_whose_step_failed() -> None:
    bench = Bench()
    session = bench.session(PROMPT)
    bench.executor.fail_after = 8
    drawn = decode(session, 7, GREEDY, 20)
    assert [next(drawn) for _ in range(8)] == generate_plainly([*PROMPT, 7], GREEDY, 8)
    tokens = session.tokens
    with pytest.raises(OSError, match="the device failed"):
        next(drawn)
    assert session.tokens == tokens
    token = generate_plainly(tokens, GREEDY, 1)[0]
    assert list(decode(session, token, GREEDY, 5)) == generate_plainly([*tokens, token], GREEDY, 5)


def test_interrupted_while_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    session = bench.session(PROMPT)
    token = list(decode(session, 7, GREEDY, 6, num_unused=9))[-1]

    def interrupt(_position: int) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bench.executor, "await_token", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.decode(token, GREEDY, num_more=9)
    tokens = session.tokens
    assert list(decode(session, token, GREEDY, 5)) == generate_plainly([*tokens, token], GREEDY, 5)
    assert bench.executor.num_begun == 2


def test_a_token_that_is_none() -> None:
    session = Bench().session(PROMPT)
    with pytest.raises(RequestError, match="has id 410"):
        session.decode(410, GREEDY)
    session.close()
    with pytest.raises(RequestError, match="the session is closed"):
        session.decode(1, GREEDY)


def test_logits_only_where_wanted() -> None:
    session = Bench().session(PROMPT)
    output = session.prefill([3] * 70, GREEDY, wants_logits=False)
    assert output.logits.shape == (0, VOCAB)
    assert output.tokens.tolist() == [expected_token([*PROMPT, *[3] * 70], GREEDY)]


class Recorder:
    """A device that draws 100 + position and notes what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def begin(self, step_input: StepInput) -> None:
        self.told.append(("begin", step_input.position))

    def extend_pages(self, first: int, pages: Sequence[int]) -> None:
        self.told.append(("pages", first, pages))

    def queue_step(self) -> None:
        self.told.append("step")

    def await_token(self, position: int) -> int:
        return 100 + position


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ["step"]),
        ({"pages": [8, 9, 4, 5]}, [("pages", 2, [4, 5]), "step"]),
        ({"pages": [8]}, ["step"]),
        ({"pages": [8, 7]}, [("begin", 3), "step"]),
        ({"slot": 2}, [("begin", 3), "step"]),
        ({"tokens": [102]}, [("begin", 3), "step"]),
        ({"sampling": NOISY}, [("begin", 3), "step"]),
        ({"position": 4}, [("begin", 4), "step"]),
    ],
)
def test_only_the_step_that_was_foreseen_is_taken_from_the_queue(
    changes: dict[str, Any], told: list[object]
) -> None:
    device = Recorder()
    queue = DecodeQueue(device)
    assert queue.decode(StepInput([5], 1, 1, [8, 9], GREEDY), 4) == 102
    assert queue.decode(StepInput([102], 2, 1, [8, 9], GREEDY), 4) == 103
    assert device.told == [("begin", 1), "step", "step", "step"]
    device.told.clear()
    step_input = replace(StepInput([103], 3, 1, [8, 9], GREEDY), **changes)
    assert queue.decode(step_input, 1) == 101 + step_input.position
    assert device.told == told


def test_nothing_is_taken_from_a_queue_that_was_cleared() -> None:
    device = Recorder()
    queue = DecodeQueue(device)
    queue.decode(StepInput([5], 1, 1, [8], GREEDY), 4)
    queue.clear()
    queue.decode(StepInput([102], 2, 1, [8], GREEDY), 4)
    assert device.told == [("begin", 1), "step", ("begin", 2), "step"]


def test_plain_steps_run_ahead_where_drafting_does_not_pay() -> None:
    bench = Bench()
    costs = RoundCosts(1.0, [1.1, 9.0, 9.0])
    drafter = NgramDrafter(1)
    policy = CostAware(lambda _: costs, explore_every=16, num_first=0)
    speculator = Speculator(drafter, policy, 2)
    session = bench.session(PROMPT)
    tokens = [*PROMPT, expected_token(PROMPT, GREEDY)]
    begun = bench.executor.num_begun
    while len(tokens) < len(PROMPT) + 33:
        tokens += speculator.run(session, tokens, GREEDY, len(PROMPT) + 33 - len(tokens)).tokens
    assert tokens[len(PROMPT) :] == generate_plainly(PROMPT, GREEDY, 33)
    assert bench.executor.num_taken > 25
    # Two stretches of 16 and what a round in between may leave: not one beginning for each step.
    assert bench.executor.num_begun - begun <= 4
