"""Whole engines whose speculation is interrupted, left or forked midway, on one rank and two."""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from inkrt.commands import run
from inkrt.runtime.executor import Sampling
from inkrt.runtime.llm import LLM
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.session import Session
from inkrt.runtime.spec.config import SpeculativeConfig
from inkrt.runtime.spec.width import FixedWidth

pytestmark = pytest.mark.slow

VOCAB = 89
PROMPTS = [[random.Random(place).randrange(VOCAB) for _ in range(30)] for place in range(2)]
# So hot that a random drafter is sometimes right.
PARAMS = SamplingParams(temperature=3.0, seed=3, max_tokens=15, ignore_eos=True)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, id="one rank"),
        pytest.param(2, id="two ranks", marks=pytest.mark.slow),
    ],
)
def llm(request: pytest.FixtureRequest, make_speculating_engine: Any) -> Iterator[LLM]:
    with LLM(make_speculating_engine("rnn", tp_size=request.param)) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[tuple[int, ...]]:
    with LLM(llm.engine.folder, speculative=SpeculativeConfig("none")) as without:
        outputs = without.generate(PROMPTS, PARAMS)
    return [output.outputs[0].token_ids for output in outputs]


def require_untouched(llm: LLM, plain: list[tuple[int, ...]]) -> None:
    """All state is free, and what comes next is what would have come."""
    states, layout = llm.engine.states, llm.engine.config.state
    assert (states.num_free_slots, states.num_free_pages) == (layout.num_slots, layout.num_pages)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == plain


PLACES = [
    (Session, "draft", True),
    (Session, "step", False),
    (Session, "step", True),
    (Session, "rollback", True),
    (FixedWidth, "observe", False),
]


@pytest.mark.parametrize(("owner", "name", "is_behind"), PLACES)
def test_an_interrupt_within_a_round_ends_that_request_only(
    llm: LLM, plain: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch,
    owner: Any, name: str, is_behind: bool,
) -> None:  # fmt: skip
    sound: Callable[..., Any] = getattr(owner, name)
    calls = itertools.count()

    def interrupted(*given: Any, **options: Any) -> Any:
        is_now = next(calls) == 2
        if is_now and not is_behind:
            raise KeyboardInterrupt
        result = sound(*given, **options)
        if is_now:
            raise KeyboardInterrupt
        return result

    before = llm.speculation.copy()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        stream = llm.stream(PROMPTS[0], PARAMS)
        tokens: list[int] = []
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            for delta in stream:
                tokens += delta.token_ids
    # The first token comes of the prompt; of the broken round nothing was handed out or counted.
    assert tuple(tokens) == plain[0][: len(tokens)]
    assert llm.speculation.since(before).emitted == len(tokens) - 1
    require_untouched(llm, plain)


def test_a_stream_may_be_left_behind_any_round(llm: LLM, plain: list[tuple[int, ...]]) -> None:
    for num_deltas in itertools.count():
        stream = llm.stream(PROMPTS[0], PARAMS)
        deltas = list(itertools.islice(stream, num_deltas))
        beside = llm.stream(PROMPTS[1], PARAMS)  # goes on while the first is left
        tokens = list(next(beside).token_ids)
        stream.close()
        tokens += [token for delta in beside for token in delta.token_ids]
        assert tuple(tokens) == plain[1]
        if deltas and deltas[-1].finish_reason is not None:
            break
    assert num_deltas > 5
    require_untouched(llm, plain)


@pytest.mark.parametrize("accept", ["coupled", "probabilistic"])
def test_forks_of_a_session_that_speculates(llm: LLM, accept: Any) -> None:
    """Behind every round, rejected drafts and all, a fork goes on as its origin does."""
    chosen = SpeculativeConfig(accept=accept).resolve(llm.engine.folder, llm.engine.config)
    assert chosen is not None
    sampling = Sampling(temperature=3.0, seed=8)

    def go_on(session: Session, tokens: list[int], count: int) -> list[int]:
        speculator, tokens = chosen.speculator(), list(tokens)
        while len(tokens) < count:
            tokens += speculator.run(session, tokens, sampling, 100).tokens
        return tokens[:count]

    engine = llm.engine
    with engine.session() as session:
        tokens = [*PROMPTS[0], int(session.prefill(PROMPTS[0], sampling).tokens[-1])]
        speculator, ends = chosen.speculator(), []
        for _ in range(6):
            tokens += speculator.run(session, tokens, sampling, 100).tokens
            with session.fork() as fork, fork.fork() as other:
                other.rollback(other.length - 2)
                other.step([1, 2, 3], sampling)  # writes where the others go on
                ends.append((len(tokens), go_on(fork, tokens, len(tokens) + 9)))
        tokens = go_on(session, tokens, len(tokens) + 9)
    for length, end in ends:
        assert end == tokens[: length + 9]
    assert engine.states.num_free_slots == engine.config.state.num_slots


def test_ctrl_c_in_a_dialog_with_drafts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(VOCAB)}, "t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    path = llm.engine.folder / "tokenizer.json"
    words.save(str(path))
    options = ["--temperature", "3", "--seed", "3", "--max-tokens", "20", "--raw", "-i"]
    arguments = [str(llm.engine.folder), *options]
    step, calls = Session.step, itertools.count()

    def interrupted(*given: Any, **further: Any) -> Any:
        output = step(*given, **further)
        if next(calls) == 1:
            raise KeyboardInterrupt
        return output

    try:
        alone = CliRunner().invoke(run.make_app(), arguments, input="t1 t2\n")
        monkeypatch.setattr(Session, "step", interrupted)
        result = CliRunner().invoke(run.make_app(), arguments, input="t5 t6\nt1 t2\n")
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
    assert (alone.exit_code, result.exit_code) == (0, 0), result.output
    cut, answer = result.stdout.splitlines()
    assert len(cut.split()) < len(answer.split()) == 20
    assert answer + "\n" == alone.stdout
