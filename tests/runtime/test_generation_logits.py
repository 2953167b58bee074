"""Generations that change their logits: the same tokens with and without drafts, at every edge."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake import (
    EOS,
    NUM_EMBEDDINGS,
    VOCAB,
    FakeExecutor,
    expected_logits,
    generate_plainly,
    make_config,
    make_tokenizer,
    write_engine,
)
from logits_oracle import generate
from test_generation_loop import Run as PlainRun
from test_speculation_rounds import BLOCK, PROMPT, Blind, Noise, Oracle, in_every_order
from test_speculation_rounds import Run as SpeculatingRun

from inkrt.errors import RequestError
from inkrt.runtime.engine_file import EngineConfig
from inkrt.runtime.executor import Sampling, StepInput, StepOutput
from inkrt.runtime.generation import Generation
from inkrt.runtime.llm import LLM
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.session import Session
from inkrt.runtime.spec.config import SpeculativeConfig
from inkrt.runtime.spec.drafter import NgramDrafter
from inkrt.runtime.spec.round import Speculator
from inkrt.runtime.spec.width import FixedWidth
from inkrt.runtime.state import StateManager
from inkrt.runtime.tokenizer import Tokenizer

PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    {"frequency_penalty": -2.0},  # says the same again and again
    {"repetition_penalty": 0.5, "presence_penalty": -1.0, "bad_words": [[11, 12], [3, 3, 3]]},
    {"logit_bias": {5: 4.0, 7: 4.5, 9: 5.0}, "bad_words": [[5, 7], [9, 9], [7, 9, 5]]},
]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.0, "seed": 2**62 + 5, "top_k": 20, "top_p": 0.9},
]


class Forgetful(FakeExecutor):
    """Gives logits only to those who asked for them, and never a token of its own."""

    def run(self, step: str, step_input: StepInput, *, wants_logits: bool = True) -> StepOutput:
        output = super().run(step, step_input, wants_logits=wants_logits)
        return StepOutput(np.full_like(output.tokens, VOCAB - 1), output.logits)

    def decode(self, step_input: StepInput, num_ahead: int) -> int:  # noqa: ARG002
        raise AssertionError("a request with processing takes no token of the step")


def run(
    params: dict[str, Any],
    *,
    prompt: Sequence[int] = PROMPT,
    drafter: Any = None,
    width: int = BLOCK,
    config: EngineConfig | None = None,
) -> tuple[list[int], Generation, Forgetful]:
    """Tokens of one generation over an executor whose own tokens would be wrong."""
    config = config or make_config()
    executor = Forgetful(config)
    states = StateManager(config.state, config.max_seq_len, config.rebuild_command)
    speculator = Speculator(drafter, FixedWidth(), width) if drafter is not None else None
    generation = Generation(
        Session(executor, states, config, states.open()), list(prompt), SamplingParams(**params),
        None, speculator,
    )  # fmt: skip
    tokens = [token for delta in generation for token in delta.token_ids]
    assert states.num_free_slots == 3
    return tokens, generation, executor


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("penalties", PENALTIES, ids=["more", "again", "less", "biased"])
def test_plain_and_speculated_tokens_are_those_of_the_oracle(
    penalties: dict[str, Any], sampling: dict[str, Any]
) -> None:
    params = {**penalties, **sampling, "ignore_eos": True, "max_tokens": 60}
    expected = generate(PROMPT, params, 60)
    assert len(set(expected)) < 60 or "repetition_penalty" in penalties
    tokens, _, executor = run(params)
    assert tokens == expected
    assert executor.calls == [("verify5", 5), *[("decode", 1)] * 59]
    for drafter in (
        Oracle([*PROMPT, *expected], in_every_order(range(BLOCK + 1))),
        Noise(1),
    ):
        tokens, generation, _ = run(params, drafter=drafter)
        assert tokens == expected
        assert generation.stats.emitted == 59
        assert generation.stats.rounds > 0
        if isinstance(drafter, Oracle):
            assert generation.stats.accepted > 25


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_right_ngrams_under_penalties(temperature: float, seed: int) -> None:
    params = {
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "logit_bias": {4: 6.0, 8: 5.5},
        "bad_words": [[4, 4, 4, 4, 4]],
        "temperature": temperature,
        "seed": seed,
        "max_tokens": 80,
        "ignore_eos": True,
    }
    expected = generate([4, 4, 8], params, 80)
    tokens, generation, _ = run(params, prompt=[4, 4, 8], drafter=NgramDrafter(1))
    assert tokens == expected
    assert generation.stats.accepted > 20


def test_a_long_prompt_is_read_in_pieces_and_counted_whole() -> None:
    config = make_config(max_seq_len=200, state=make_config().state.__class__(3, 4, 150, 9, ()))
    prompt = [NUM_EMBEDDINGS - 1, *range(2, 150), NUM_EMBEDDINGS - 2]
    params = {"repetition_penalty": 100.0, "temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    expected = generate(prompt, params, 8)
    assert expected != generate_plainly(prompt, Sampling(), 8)
    assert run(params, prompt=prompt, config=config)[0] == expected
    # n-grams propose ids of the prompt that have no logit.
    loop = [1, NUM_EMBEDDINGS - 1, 2, NUM_EMBEDDINGS - 1] * 6
    params = {**params, "repetition_penalty": 1.1, "logit_bias": {2: 50.0}}
    tokens, generation, _ = run(params, prompt=loop, drafter=NgramDrafter(1))
    assert tokens == generate(loop, params, 8)
    assert generation.stats.drafted > 0


@pytest.mark.parametrize("token", [EOS, 333])
@pytest.mark.parametrize("min_tokens", range(10))
def test_a_likely_end_waits_for_min_tokens(token: int, min_tokens: int) -> None:
    params = {
        "logit_bias": {token: 100.0},
        "min_tokens": min_tokens,
        "stop_token_ids": [333],
        "temperature": 0.0,
    }
    plain = generate_plainly(PROMPT, Sampling(), min_tokens)
    # The most likely token of each row is an end; the oracle has the tokens that come after it.
    assert run(params)[0] == [*plain, token] if min_tokens else [token]
    for drafts in ([*plain, token], [token] * 12, [*plain[:3], token, *plain[4:], token]):
        blind = Blind(Oracle([*PROMPT, *drafts, *[token] * 9], [BLOCK]))
        assert run(params, drafter=blind)[0] == [*plain, token]
    endless = {**params, "ignore_eos": True, "stop_token_ids": [], "max_tokens": min_tokens + 3}
    assert run(endless)[0] == [token] * (min_tokens + 3)


def test_stop_strings_wait_for_min_tokens(tmp_path: Path) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    word = tokenizer.encode("x")
    assert len(word) == 1
    bias = {word[0]: 100.0}
    for min_tokens in range(6):
        params: dict[str, Any] = {
            "logit_bias": bias, "stop": "xx", "min_tokens": min_tokens, "temperature": 0.0,
        }  # fmt: skip
        output = PlainRun(tokenizer, **params).finish()
        assert (output.finish_reason, output.stop_reason) == ("stop", "xx")
        assert output.text == "x" * min_tokens
        assert len(output.token_ids) == min_tokens + 2
        drafted = SpeculatingRun(Blind(Oracle(word * 40, [BLOCK])), tokenizer=tokenizer, **params)
        assert drafted.finish() == output
    output = PlainRun(
        tokenizer, logit_bias=bias, stop="x", min_tokens=4, max_tokens=4, temperature=0.0
    ).finish()
    assert (output.finish_reason, output.text) == ("length", "xxxx")


@pytest.mark.parametrize("place", range(1, 9))
def test_a_bad_word_across_two_tokens_and_across_drafts(place: int) -> None:
    plain = generate_plainly(PROMPT, Sampling(), 20)
    pair = plain[place - 1 : place + 1]
    params = {"bad_words": [pair], "temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    expected = generate(PROMPT, params, 20)
    assert expected[:place] == plain[:place]
    second = np.argsort(expected_logits([*PROMPT, *plain[:place]]))[-2]
    assert expected[place] == second != plain[place]
    assert run(params)[0] == expected
    # What is drafted has the bad word, inside one block or across two.
    for width in range(1, BLOCK + 1):
        blind = Blind(Oracle([*PROMPT, *plain, *[0] * 9], [BLOCK]))
        assert run(params, drafter=blind, width=width)[0] == expected
    # The prompt's last token begins no bad word.
    first = {**params, "bad_words": [[PROMPT[-1], plain[0]]]}
    assert run(first)[0] == plain


def test_biases_force_and_forbid() -> None:
    plain = generate_plainly(PROMPT, Sampling(), 6)
    params = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    assert run({**params, "logit_bias": {77: 100}})[0] == [77] * 6
    sampled = {**params, "temperature": 1.0, "seed": 1, "logit_bias": {77: 100}}
    assert run(sampled)[0] == [77] * 6
    tokens = run({**params, "logit_bias": dict.fromkeys(plain, -100)})[0]
    assert not set(tokens) & set(plain)
    tokens = run({**params, "allowed_token_ids": [8, 9], "temperature": 1.0, "seed": 2})[0]
    assert set(tokens) == {8, 9}


def test_nothing_left_to_say_ends_the_generation_with_an_error() -> None:
    params = {"allowed_token_ids": [7], "bad_words": [[7] * 4], "temperature": 0.0}

    def take(drafter: Any) -> list[int]:
        speculator = Speculator(drafter, FixedWidth(), BLOCK) if drafter else None
        config = make_config()
        states = StateManager(config.state, config.max_seq_len, config.rebuild_command)
        session = Session(Forgetful(config), states, config, states.open())
        generation = Generation(session, PROMPT, SamplingParams(**params), None, speculator)
        got: list[int] = []
        with pytest.raises(RequestError, match="no token may come next"):
            collect(generation, got)
        assert (generation.state, states.num_free_slots) == ("finished", 3)
        return got

    def collect(generation: Iterable[Any], got: list[int]) -> None:
        for delta in generation:
            got.extend(delta.token_ids)

    assert take(None) == [7] * 3
    assert take(Blind(Oracle([7] * 99, [BLOCK]))) == [7] * 3


def test_an_end_before_the_impossible_token_is_an_end(tmp_path: Path) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    (word,) = tokenizer.encode("x")
    params = {
        "allowed_token_ids": [word], "bad_words": [[word] * 4], "stop": "xxx", "temperature": 0.0,
    }  # fmt: skip
    plain = PlainRun(tokenizer, **params).finish()
    assert (plain.text, len(plain.token_ids), plain.stop_reason) == ("", 3, "xxx")
    drafted = SpeculatingRun(Blind(Oracle([word] * 99, [BLOCK])), tokenizer=tokenizer, **params)
    assert drafted.finish() == plain


def test_a_bad_word_without_tokens_closes_the_session() -> None:
    class Empty:
        def encode(self, text: str) -> list[int]:  # noqa: ARG002
            return []

    config = make_config()
    states = StateManager(config.state, config.max_seq_len, config.rebuild_command)
    session = Session(FakeExecutor(config), states, config, states.open())
    with pytest.raises(RequestError) as caught:
        Generation(session, PROMPT, SamplingParams(bad_words=["\t"]), Empty())  # type: ignore
    assert str(caught.value) == (
        "the tokenizer has no tokens for the bad word '\\t'; give its token ids"
    )
    assert states.num_free_slots == 3


def test_an_llm_takes_them_from_the_call_and_from_the_model(
    tmp_path: Path, fake_executors: list[FakeExecutor]
) -> None:
    config = {"do_sample": False, "repetition_penalty": 1.5, "bad_words_ids": [[7]]}
    write_engine(tmp_path / "engine", generation_config=config)
    given = {"repetition_penalty": 1.5, "bad_words": [[7]], "temperature": 0.0}
    expected = generate(PROMPT, {**given}, 80)
    own = SamplingParams(frequency_penalty=2.0, temperature=0.0, max_tokens=9, ignore_eos=True)
    for speculative in (None, SpeculativeConfig("ngram", 4)):
        with LLM(tmp_path / "engine", speculative=speculative) as llm:
            assert llm.default_params == SamplingParams(**given)
            (output,) = llm.generate([PROMPT])
            assert list(output.outputs[0].token_ids)[:80] == expected
            outputs = llm.generate([PROMPT, [1, 2]], [own, SamplingParams(max_tokens=1)])
            assert list(outputs[0].outputs[0].token_ids) == generate(
                PROMPT, {"frequency_penalty": 2.0, "temperature": 0.0, "ignore_eos": True}, 9
            )
            with pytest.raises(RequestError) as caught:
                llm.generate([[1], [2]], [own, SamplingParams(logit_bias={400: 1.0})])
            assert str(caught.value) == (
                "prompts[1]: logit_bias has token id 400, this model generates ids 0..399"
            )
            assert caught.value.param == "logit_bias"
