"""Why and where a generation ends, and what its deltas hold."""

from pathlib import Path
from typing import Any

import pytest
from fake import (
    EOS,
    FakeExecutor,
    expected_token,
    generate_plainly,
    make_config,
    make_tokenizer,
)

from inkrt.errors import RequestError
from inkrt.runtime.executor import Sampling
from inkrt.runtime.generation import Generation, check_request
from inkrt.runtime.output import CompletionOutput, Delta
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.session import Session
from inkrt.runtime.state import StateManager
from inkrt.runtime.tokenizer import Tokenizer

PROMPT = [10, 20, 30, 40, 50]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    make_tokenizer().save(str(path))
    return Tokenizer(path)


class ScriptedExecutor(FakeExecutor):
    """Draws given tokens instead of its own, by position."""

    def __init__(self, config: Any, script: list[int], start: int) -> None:
        super().__init__(config)
        self.script, self.start = script, start

    def draw(self, logits: Any, sampling: Sampling, position: int) -> int:
        place = position - self.start
        if 0 <= place < len(self.script):
            return self.script[place]
        return super().draw(logits, sampling, position)


class Run:
    """One generation, over a script or over what the fake executor draws itself."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        script: list[int] | None = None,
        prompt: list[int] = PROMPT,
        config: Any = None,
        **params: Any,
    ) -> None:
        config = config or make_config()
        self.executor = ScriptedExecutor(config, script or [], len(prompt))
        self.states = StateManager(config.state, config.max_seq_len, config.rebuild_command)
        session = Session(self.executor, self.states, config, self.states.open())
        self.generation = Generation(session, prompt, SamplingParams(**params), tokenizer)

    def finish(self) -> CompletionOutput:
        self.deltas = list(self.generation)
        assert self.generation.state == "finished"
        assert self.states.num_free_slots == 3
        assert all(delta.finish_reason is None for delta in self.deltas[:-1])
        return CompletionOutput.join(self.deltas)


def test_greedy_tokens_are_those_of_the_plain_loop(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, temperature=0.0, max_tokens=20, ignore_eos=True)
    output = run.finish()
    assert list(output.token_ids) == generate_plainly(PROMPT, Sampling(), 20)
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    assert output.text == tokenizer.decode(output.token_ids)
    # One step for the prompt, and none for the last token.
    assert run.executor.calls == [("verify5", 5), *[("decode", 1)] * 19]


def test_sampled_tokens_follow_seed_and_position(tokenizer: Tokenizer) -> None:
    params: dict[str, Any] = {"temperature": 1.3, "max_tokens": 12, "ignore_eos": True}
    expected = generate_plainly(PROMPT, Sampling(temperature=1.3, seed=9), 12)
    assert list(Run(tokenizer, seed=9, **params).finish().token_ids) == expected
    fresh = [Run(tokenizer, **params).finish().token_ids for _ in range(3)]
    assert len({*fresh, tuple(expected)}) == 4


def test_sampling_parameters_reach_the_executor(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=3, max_tokens=2)
    seen = []
    original = run.executor._run
    run.executor._run = lambda step, given: (seen.append(given.sampling), original(step, given))[1]  # type: ignore[method-assign]
    run.finish()
    assert seen == [Sampling(0.5, 7, 0.9, 0.1, 3)] * 2


def test_a_long_prompt_is_read_one_step_at_a_time(tokenizer: Tokenizer) -> None:
    prompt = [(3 * i) % 400 for i in range(70)]
    run = Run(tokenizer, prompt=prompt, temperature=0.0, max_tokens=1)
    assert run.generation.state == "prefill"
    assert run.generation.advance() == Delta("", ())
    assert run.generation.state == "prefill"
    last = run.generation.advance()
    assert last.token_ids == (expected_token(prompt, Sampling()),)
    assert last.finish_reason == "length"
    assert run.executor.calls == [("prefill64", 64), ("verify6", 6)]


def test_eos_is_a_token_but_no_text(tokenizer: Tokenizer) -> None:
    words = tokenizer.encode("hello world")
    output = Run(tokenizer, [*words, EOS, 5]).finish()
    assert output.token_ids == (*words, EOS)
    assert output.text == "hello world"
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_ignore_eos_goes_on(tokenizer: Tokenizer) -> None:
    words = tokenizer.encode("hello")
    script = [*words, EOS, *words]
    run = Run(tokenizer, script, ignore_eos=True, max_tokens=len(script))
    output = run.finish()
    assert output.text == "hellohello"
    assert output.finish_reason == "length"
    shown = Run(
        tokenizer, script, ignore_eos=True, max_tokens=len(script), skip_special_tokens=False
    )
    assert shown.finish().text == "hello<|eos|>hello"


def test_stop_token_ids(tokenizer: Tokenizer) -> None:
    words = tokenizer.encode("hello world")
    stop = words[-1]
    assert len(words) >= 2
    output = Run(tokenizer, words, stop_token_ids=[stop]).finish()
    assert output.token_ids == tuple(words)
    assert output.text == tokenizer.decode(words[:-1])
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    kept = Run(tokenizer, words, stop_token_ids=[stop], include_stop_str_in_output=True).finish()
    assert kept.text == "hello world"
    # A model's own end token stays without a reason, and stops even when ignored if asked for.
    output = Run(tokenizer, [EOS], stop_token_ids=[EOS]).finish()
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    output = Run(tokenizer, [EOS], stop_token_ids=[EOS], ignore_eos=True).finish()
    assert (output.finish_reason, output.stop_reason) == ("stop", EOS)


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(tokenizer: Tokenizer, include: bool) -> None:
    words = tokenizer.encode("the quick brown fox")
    run = Run(tokenizer, words, stop=["zebra", "wn f"], include_stop_str_in_output=include)
    output = run.finish()
    assert output.text == ("the quick brown f" if include else "the quick bro")
    assert (output.finish_reason, output.stop_reason) == ("stop", "wn f")
    used = len(output.token_ids)
    assert output.token_ids == tuple(words[:used])
    assert "wn f" in tokenizer.decode(words[:used])
    assert "wn f" not in tokenizer.decode(words[: used - 1])


def test_a_stop_string_in_the_last_token_beats_length(tokenizer: Tokenizer) -> None:
    words = tokenizer.encode("hello world")
    output = Run(tokenizer, words, stop="ld", max_tokens=len(words)).finish()
    assert (output.text, output.finish_reason, output.stop_reason) == ("hello wor", "stop", "ld")


def test_what_was_held_back_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    words = tokenizer.encode("hello wor")
    output = Run(tokenizer, [*words, EOS], stop="world").finish()
    assert (output.text, output.finish_reason) == ("hello wor", "stop")
    output = Run(tokenizer, words, stop="world", max_tokens=len(words)).finish()
    assert (output.text, output.finish_reason) == ("hello wor", "length")
    unfinished = tokenizer.encode("x𝄞")[:-1]
    output = Run(tokenizer, unfinished, max_tokens=len(unfinished)).finish()
    assert output.text == "x\ufffd"


def test_deltas_hold_whole_characters_and_one_token_each(tokenizer: Tokenizer) -> None:
    script = tokenizer.encode("a𝄞你b")
    run = Run(tokenizer, script, max_tokens=len(script))
    run.finish()
    assert [len(delta.token_ids) for delta in run.deltas] == [1] * len(script)
    assert [delta.text for delta in run.deltas if delta.text] == ["a", "𝄞", "你", "b"]


def test_the_end_of_the_context_is_length(tokenizer: Tokenizer) -> None:
    for max_tokens in (None, 1000):
        run = Run(tokenizer, temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        output = run.finish()
        assert output.finish_reason == "length"
        assert len(PROMPT) + len(output.token_ids) == 96
        assert list(output.token_ids) == generate_plainly(PROMPT, Sampling(), 91)


def test_without_a_tokenizer_there_are_tokens_only() -> None:
    output = Run(None, temperature=0.0, max_tokens=3, ignore_eos=True).finish()
    assert output.text == ""
    assert list(output.token_ids) == generate_plainly(PROMPT, Sampling(), 3)


def test_close_gives_back_the_slot(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, max_tokens=50, ignore_eos=True)
    for _ in range(3):
        run.generation.advance()
    assert run.states.num_free_slots == 2
    run.generation.close()
    run.generation.close()
    assert run.generation.state == "finished"
    assert (run.states.num_free_slots, run.states.num_free_pages) == (3, 72)


def test_a_failing_step_ends_the_generation(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, max_tokens=50, ignore_eos=True)
    run.generation.advance()
    run.executor.fail_after = 0
    with pytest.raises(OSError, match="the device failed"):
        run.generation.advance()
    assert run.generation.state == "finished"
    assert (run.states.num_free_slots, run.states.num_free_pages) == (3, 72)


def test_interleaving_equals_one_after_the_other(tokenizer: Tokenizer) -> None:
    config = make_config()
    executor = FakeExecutor(config)
    states = StateManager(config.state, config.max_seq_len, config.rebuild_command)
    prompts = [[i + 1, *range(30 * i, 35 * i)] for i in (1, 4, 7)]
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=15, ignore_eos=True)
    running = [
        Generation(Session(executor, states, config, states.open()), prompt, params, tokenizer)
        for prompt in prompts
    ]
    drawn: list[list[int]] = [[], [], []]
    while any(generation.state != "finished" for generation in running):
        for generation, tokens in zip(running, drawn, strict=True):
            if generation.state != "finished":
                tokens.extend(generation.advance().token_ids)
    sampling = Sampling(temperature=0.9, seed=4)
    assert drawn == [generate_plainly(prompt, sampling, 15) for prompt in prompts]


def test_check_request_messages(tmp_path: Path) -> None:
    config = make_config()
    params = SamplingParams(stop="x")
    with pytest.raises(RequestError) as caught:
        check_request([1] * 96, params, config, has_tokenizer=True)
    assert caught.value.param == "prompt"
    assert str(caught.value) == (
        "the prompt has 96 tokens, this engine holds 96 with the output; shorten it to at most 95 "
        "or rebuild with: ink-build CHECKPOINT -o ENGINE --target cpu --max-seq-len 97 "
        "--max-batch-size 3"
    )
    assert len(check_request([1] * 95, params, config, has_tokenizer=True)) == 95
    with pytest.raises(RequestError) as caught:
        check_request([1], params, config, has_tokenizer=False)
    assert caught.value.param == "stop"
    assert str(caught.value) == (
        "stop strings need text, but the engine has no tokenizer.json; use stop_token_ids"
    )
