"""Speculation changes when tokens are known, never which: rounds, drafters, counts, endings."""

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake import (
    EOS,
    VOCAB,
    CertainDrafter,
    FakeExecutor,
    generate_plainly,
    make_config,
    make_tokenizer,
    write_engine,
)
from test_generation_loop import ScriptedExecutor

from inkrt.errors import CapacityError, RequestError
from inkrt.runtime.executor import Sampling
from inkrt.runtime.generation import Generation
from inkrt.runtime.llm import LLM
from inkrt.runtime.output import CompletionOutput
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.session import Session
from inkrt.runtime.spec import config as config_module
from inkrt.runtime.spec.config import SpeculativeConfig
from inkrt.runtime.spec.drafter import Drafter, NgramDrafter
from inkrt.runtime.spec.round import Speculator
from inkrt.runtime.spec.stats import SpeculationStats
from inkrt.runtime.spec.width import FixedWidth
from inkrt.runtime.state import StateManager
from inkrt.runtime.tokenizer import Tokenizer

PROMPT = [10, 20, 30, 40, 50]
BLOCK = 7


class Oracle(CertainDrafter):
    """Knows the plain output and proposes a prescribed number of right tokens, then wrong ones.

    Args:
        text: prompt and plain output.
        rights: right tokens of each round, the last one for ever.
    """

    def __init__(self, text: Sequence[int], rights: Iterable[int]) -> None:
        self.text, self.rights, self.right = text, iter(rights), 0
        self.given: list[int] = []

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        assert list(tokens) == list(self.text[: len(tokens)])
        self.right = next(self.rights, self.right)
        place = len(tokens)
        right = list(self.text[place : place + min(self.right, most)])
        wrong = [(token + 1) % VOCAB for token in self.text[place + len(right) : place + most]]
        self.given.append(most)
        return [*right, *wrong]


class Noise(CertainDrafter):
    """Proposes anything, and more than it was asked for."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:  # noqa: ARG002
        return [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(most + 5))]


class Run:
    """One speculating generation over the fake executor, or over a script of what it draws."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        width: int = BLOCK,
        prompt: Sequence[int] = PROMPT,
        script: Sequence[int] | None = None,
        tokenizer: Tokenizer | None = None,
        config: Any = None,
        **params: Any,
    ) -> None:
        config = config or make_config()
        self.executor = (
            FakeExecutor(config)
            if script is None
            else ScriptedExecutor(config, list(script), len(prompt))
        )
        self.states = StateManager(config.state, config.max_seq_len, config.rebuild_command)
        self.session = Session(self.executor, self.states, config, self.states.open())
        self.generation = Generation(
            self.session, list(prompt), SamplingParams(**params), tokenizer,
            Speculator(drafter, FixedWidth(), width),
        )  # fmt: skip

    def finish(self) -> CompletionOutput:
        output = CompletionOutput.join(list(self.generation))
        assert self.states.num_free_slots == 3
        stats = self.generation.stats
        # Every token but the prompt's own comes of a step that was counted.
        assert stats.emitted == len(output.token_ids) - 1
        assert sum(stats.drafted_at) == stats.drafted
        assert sum(stats.accepted_at) == stats.accepted
        assert all(a <= d for a, d in zip(stats.accepted_at, stats.drafted_at, strict=True))
        assert stats.accepted_at == sorted(stats.accepted_at, reverse=True)
        return output


def in_every_order(values: Sequence[int]) -> Iterator[int]:
    """Every ordered pair of values stands next to each other."""
    for first in values:
        for second in values:
            yield first
            yield second


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_all_numbers_of_accepted_drafts_in_every_order(temperature: float) -> None:
    # Rings and windows of the fake engine wrap many times, and it checks every position it reads.
    config = make_config(max_seq_len=1024, state=make_config().state.__class__(3, 4, 768, 9, ()))
    sampling = Sampling(temperature=temperature, seed=5)
    plain = generate_plainly(PROMPT, sampling, 700)
    oracle = Oracle([*PROMPT, *plain], in_every_order(range(BLOCK + 1)))
    run = Run(
        oracle, config=config, temperature=temperature, seed=5, max_tokens=700, ignore_eos=True
    )
    assert list(run.finish().token_ids) == plain
    stats = run.generation.stats
    rights = list(in_every_order(range(BLOCK + 1)))
    assert stats.rounds >= len(rights)
    # The first rounds have their full width, so what was prescribed is what was accepted.
    assert stats.drafted_at[0] == stats.rounds
    assert sum(steps == ("verify8", 8) for steps in run.executor.calls) >= len(rights)


@pytest.mark.parametrize("width", range(1, BLOCK + 1))
@pytest.mark.parametrize("right", [0, 1, BLOCK])
def test_every_width_ends_where_plain_decoding_ends(width: int, right: int) -> None:
    for max_tokens in range(1, 20):
        plain = generate_plainly(PROMPT, Sampling(), max_tokens)
        oracle = Oracle([*PROMPT, *plain, *[0] * 9], [right])
        run = Run(oracle, width=width, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        output = run.finish()
        assert list(output.token_ids) == plain
        assert output.finish_reason == "length"
        # Drafts that could not become output were not even asked for.
        assert all(1 <= most <= width for most in oracle.given)
        assert all(count <= width + 1 for _, count in run.executor.calls[1:])


def test_the_context_is_used_to_its_last_position() -> None:
    plain = generate_plainly(PROMPT, Sampling(), 91)
    for right in range(BLOCK + 1):
        run = Run(Oracle([*PROMPT, *plain], [right]), temperature=0.0, ignore_eos=True)
        output = run.finish()
        assert (len(output.token_ids), output.finish_reason) == (91, "length")
        assert list(output.token_ids) == plain


@pytest.mark.parametrize("seed", range(5))
def test_adversarial_drafts_change_nothing(seed: int) -> None:
    sampling = Sampling(temperature=0.7, seed=seed)
    plain = generate_plainly(PROMPT, sampling, 60)
    run = Run(Noise(seed), temperature=0.7, seed=seed, max_tokens=60, ignore_eos=True)
    assert list(run.finish().token_ids) == plain


def test_repeated_text_is_taken_in_blocks() -> None:
    # The engine repeats a cycle of nine tokens, which stands in the prompt once.
    cycle = [7, 3, 9, 200, 11, 5, 77, 81, 13]
    script = cycle * 5
    run = Run(NgramDrafter(), prompt=cycle, script=script, max_tokens=40, temperature=0.0)
    assert list(run.finish().token_ids) == script[:40]
    stats = run.generation.stats
    assert stats.accepted == stats.drafted
    assert len(run.executor.calls) < 10  # for 40 tokens
    assert stats.tokens_per_step == 39 / (len(run.executor.calls) - 1)


@pytest.mark.parametrize("place", range(BLOCK + 1))
def test_a_stop_token_at_each_place_of_a_block(place: int) -> None:
    words = [100 + i for i in range(12)]
    script = [words[0], *words[1 : 1 + place], EOS, *words[1 + place :]]
    for drafts in (script, [*script[:3], 1, *script[4:]]):  # drafted, and drafted wrongly before
        oracle = Oracle([*PROMPT, *drafts, *[0] * 9], [BLOCK])
        oracle.text = [*PROMPT, *drafts, *[0] * 9]
        run = Run(Blind(oracle), script=script, temperature=0.0)
        output = run.finish()
        assert list(output.token_ids) == script[: place + 2]
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        also = Run(
            Blind(oracle), script=[*script[: place + 1], 333, 5], stop_token_ids=[333],
            temperature=0.0,
        ).finish()  # fmt: skip
        assert (also.token_ids[-1], also.stop_reason) == (333, 333)


class Blind(CertainDrafter):
    """Proposes a text by position, whatever has become of it."""

    def __init__(self, oracle: Oracle) -> None:
        self.text = oracle.text

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        return list(self.text[len(tokens) : len(tokens) + most])


def test_a_stop_string_across_tokens_of_one_block(tmp_path: Path) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    script = tokenizer.encode("the quick brown fox jumps over the lazy dog")
    for stop in ("n f", "x", " over", "the lazy"):
        plain = Generation(
            *_plain(script), PROMPT, SamplingParams(temperature=0.0, stop=[stop]), tokenizer
        )
        expected = CompletionOutput.join(list(plain))
        oracle = Oracle([*PROMPT, *script, *[0] * 9], [BLOCK])
        run = Run(Blind(oracle), script=script, tokenizer=tokenizer, temperature=0.0, stop=[stop])
        assert run.finish() == expected
        assert expected.stop_reason == stop


def _plain(script: Sequence[int]) -> tuple[Session]:
    config = make_config()
    executor = ScriptedExecutor(config, list(script), len(PROMPT))
    states = StateManager(config.state, config.max_seq_len, config.rebuild_command)
    return (Session(executor, states, config, states.open()),)


def test_sessions_of_very_different_lengths_take_turns_and_reuse_slots() -> None:
    config = make_config()
    executor = FakeExecutor(config)
    states = StateManager(config.state, config.max_seq_len, config.rebuild_command)

    def start(prompt: list[int], right: int) -> tuple[Generation, list[int]]:
        plain = generate_plainly(prompt, Sampling(), 12)
        session = Session(executor, states, config, states.open())
        speculator = Speculator(Oracle([*prompt, *plain, *[0] * 9], [right]), FixedWidth(), BLOCK)
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        return Generation(session, prompt, params, None, speculator), plain

    for round_ in range(4):  # the second request of a slot is shorter than its first
        prompts = [[3] * 1, [(5 * i) % VOCAB for i in range(70 - 20 * round_)], [9] * 20]
        running = [start(prompt, right) for prompt, right in zip(prompts, (0, 7, 3), strict=True)]
        deltas: list[list[int]] = [[], [], []]
        while any(generation.state != "finished" for generation, _ in running):
            for index, (generation, _) in enumerate(running):
                if generation.state != "finished":
                    deltas[index] += generation.advance().token_ids
        assert deltas == [plain for _, plain in running]


def test_rounds_shrink_to_the_pages_that_are_left() -> None:
    state = make_config().state.__class__(3, 4, 7, 9, ())  # 28 positions for all
    plain = generate_plainly(PROMPT, Sampling(), 40)
    run = Run(
        Oracle([*PROMPT, *plain], [BLOCK]), config=make_config(state=state), temperature=0.0,
        max_tokens=40, ignore_eos=True,
    )  # fmt: skip
    got: list[int] = []
    deltas = iter(run.generation)

    def take_all() -> None:
        for delta in deltas:
            got.extend(delta.token_ids)

    with pytest.raises(CapacityError, match="pages"):
        take_all()
    # 28 positions are written; the token behind the last one is known too.
    assert [*PROMPT, *got] == [*PROMPT, *plain][:29]
    assert run.states.num_free_slots == 3


def test_a_failing_step_ends_the_generation_and_gives_back_its_state() -> None:
    plain = generate_plainly(PROMPT, Sampling(), 40)
    run = Run(Oracle([*PROMPT, *plain], [3]), temperature=0.0, ignore_eos=True)
    run.generation.advance()
    run.executor.fail_after = 9
    with pytest.raises(OSError, match="device"):
        list(run.generation)
    assert (run.generation.state, run.states.num_free_slots) == ("finished", 3)


def test_ngrams_against_a_search_of_the_whole_text() -> None:
    rng = random.Random(7)
    text = [rng.randrange(4) for _ in range(300)]
    for shortest, longest in ((1, 1), (2, 4), (3, 5)):
        drafter = NgramDrafter(shortest, longest)
        end = 0
        while end < len(text):
            end += rng.randrange(1, 9)
            tokens, most = text[:end], rng.randrange(1, 9)
            assert drafter.find(tokens, most) == _search(tokens, most, shortest, longest)


def _search(tokens: list[int], most: int, shortest: int, longest: int) -> list[int]:
    for size in range(longest, shortest - 1, -1):
        places = [
            place
            for place in range(len(tokens) - size)
            if len(tokens) >= size and tokens[place : place + size] == tokens[-size:]
        ]
        if places:
            return tokens[places[-1] + size :][:most]
    return []


def test_counts_of_many_generations_add_up_and_can_be_taken_apart() -> None:
    one, two = SpeculationStats(), SpeculationStats()
    for drafted, accepted in ((7, 3), (2, 2), (0, 0)):
        one.count(drafted, accepted, accepted + 1)
    two.count(3, 2, 2)  # ended with its second draft
    whole = one.copy()
    whole.add(two)
    assert (whole.rounds, whole.plain_steps, whole.drafted, whole.accepted) == (3, 1, 12, 7)
    assert whole.emitted == 4 + 3 + 1 + 2
    assert whole.drafted_at == [3, 3, 2, 1, 1, 1, 1]
    assert whole.accepted_at == [3, 3, 1, 0, 0, 0, 0]
    assert whole.acceptance_length == pytest.approx(9 / 3)
    assert whole.tokens_per_step == pytest.approx(10 / 4)
    assert whole.since(one).accepted == two.accepted
    assert whole.since(one).drafted_at[:3] == two.drafted_at
    assert (SpeculationStats().acceptance_length, SpeculationStats().tokens_per_step) == (0, 0)


def test_an_llm_speculates_and_says_so(
    tmp_path: Path,
    fake_executors: list[FakeExecutor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What the fake engine says repeats nothing.
    monkeypatch.setattr(config_module, "NgramDrafter", lambda: Noise(3))
    write_engine(tmp_path / "engine")
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=30, ignore_eos=True)
    prompts = [[5, 6, 7, 8] * 4, [1, 2, 3], [9] * 30]
    with LLM(tmp_path / "engine") as llm:
        plain = llm.generate(prompts, params)
        assert llm.speculation == SpeculationStats()
    with LLM(tmp_path / "engine", speculative=SpeculativeConfig("ngram", 4)) as llm:
        outputs = llm.generate(prompts, params)
        streamed = [token for delta in llm.stream(prompts[0], params) for token in delta.token_ids]
        total = llm.speculation
    assert [output.outputs for output in outputs] == [output.outputs for output in plain]
    assert streamed == list(plain[0].outputs[0].token_ids)
    assert total.emitted == 4 * 29
    assert total.rounds > 0
    assert len(total.drafted_at) <= 4
    assert sum(output.speculation.emitted for output in outputs) == 3 * 29
    assert len(fake_executors) == 2


def test_what_an_engine_cannot_verify_is_refused(
    tmp_path: Path, fake_executors: list[FakeExecutor]
) -> None:
    write_engine(tmp_path / "wide")
    with pytest.raises(RequestError, match=r"step of 9, the widest .* 8; draft at most 7$"):
        LLM(tmp_path / "wide", speculative=SpeculativeConfig("ngram", 8))
    decode, *verify, prefill = make_config().steps
    write_engine(tmp_path / "narrow", steps=(decode, *verify[:2], prefill))
    with pytest.raises(RequestError, match=r"takes 3; draft at most 2 or .*--max-verify-tokens 6$"):
        LLM(tmp_path / "narrow", speculative=SpeculativeConfig("ngram", 5))
    write_engine(tmp_path / "none", steps=(decode, prefill))
    with pytest.raises(RequestError, match=r"^1 draft tokens .* 1; leave .* off or rebuild"):
        LLM(tmp_path / "none", speculative=SpeculativeConfig("ngram"))
    assert all(executor.is_closed for executor in fake_executors)
    LLM(tmp_path / "none").close()
    for number in (0, -1, 2.0, True):
        with pytest.raises(RequestError, match="num_draft_tokens"):
            SpeculativeConfig("ngram", number)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"'eagle'.*none, ngram"):
        SpeculativeConfig("eagle")  # type: ignore[arg-type]


def test_deltas_tell_which_tokens_and_text_were_drafted(tmp_path: Path) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    script = tokenizer.encode("the quick brown fox jumps over the lazy dog")
    oracle = Oracle([*PROMPT, *script, *[0] * 9], [2, 0, 5])
    run = Run(oracle, script=script, tokenizer=tokenizer, temperature=0.0, max_tokens=len(script))
    prefill, *rounds = list(run.generation)
    assert (prefill.num_accepted, prefill.num_accepted_chars) == (0, 0)
    assert [delta.num_accepted for delta in rounds[:3]] == [2, 0, 5]
    for delta in rounds:
        drafted = tokenizer.decode(delta.token_ids[: delta.num_accepted])
        assert delta.text[: delta.num_accepted_chars] == drafted
        assert len(delta.token_ids) == delta.num_accepted + 1
