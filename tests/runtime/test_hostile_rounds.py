"""Rounds of a drafter with logits and confidences where things go wrong or end, by both rules.

The drafter is near the fake engine's own logits, so that any number of drafts may be accepted. The
fake engine checks each position that it reads.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake import (
    EOS,
    VOCAB,
    FakeExecutor,
    expected_logits,
    generate_plainly,
    make_config,
    make_tokenizer,
    write_engine,
)
from numpy.typing import NDArray

from inkrt.runtime.executor import Sampling, StepInput, StepOutput
from inkrt.runtime.generation import Generation
from inkrt.runtime.llm import LLM
from inkrt.runtime.noise import Purpose
from inkrt.runtime.output import CompletionOutput
from inkrt.runtime.sampling import draw
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.session import Session
from inkrt.runtime.spec import config as config_module
from inkrt.runtime.spec.config import SpeculativeConfig
from inkrt.runtime.spec.drafter import Proposal
from inkrt.runtime.spec.round import AcceptRule, Speculator
from inkrt.runtime.spec.stats import SpeculationStats
from inkrt.runtime.spec.width import (
    ConfidenceThreshold,
    CostAware,
    FixedWidth,
    RoundCosts,
    WidthPolicy,
)
from inkrt.runtime.state import StateManager
from inkrt.runtime.tokenizer import Tokenizer

PROMPT = [10, 20, 30, 40, 50]
BLOCK = 7
RULES = ["coupled", "probabilistic"]
COSTS = RoundCosts(1.0, [1.2, 1.3, 1.4, 1.6, 1.7, 1.9, 2.0, 2.2])
POLICIES: dict[str, Any] = {
    "fixed": FixedWidth,
    "confidence": lambda: ConfidenceThreshold(0.5),
    "cost": lambda: CostAware(lambda _: COSTS, explore_every=5),
}


class NearDrafter:
    """Draws each draft from the engine's logits plus noise of its own.

    Args:
        executor: whose logits and random numbers these are.
        error: scale of the noise.
        fail_after: calls after which it raises.
    """

    def __init__(
        self, executor: FakeExecutor, error: float = 0.7, fail_after: int | None = None
    ) -> None:
        self.executor, self.error, self.fail_after = executor, error, fail_after
        self.num_calls = 0

    def draft(
        self,
        session: Session,
        tokens: Sequence[int],
        sampling: Sampling,
        most: int,
        *,
        coupled: bool,
    ) -> Proposal:
        assert most >= 1
        assert session.length == len(tokens) - 1
        assert session.tokens == list(tokens[:-1])
        if self.num_calls == self.fail_after:
            raise OSError("the drafter failed")
        self.num_calls += 1
        text, rows, anchor = list(tokens), [], len(tokens) - 1
        for _ in range(BLOCK):
            row = self.logits(text)
            position = len(text)
            if coupled:
                token = self.executor.draw(row, sampling, position)
            else:
                options: Any = {"purpose": Purpose.DRAFT, "anchors": anchor}
                token = int(draw(row, sampling, position, **options))
            rows.append(row)
            text.append(token)
        confidences = [(31 * before % 100) / 100 for before in text[anchor : anchor + BLOCK]]
        return Proposal(text[anchor + 1 :], None if coupled else np.stack(rows), confidences)

    def logits(self, text: Sequence[int]) -> NDArray[np.float32]:
        noise = np.random.default_rng([len(text), text[-1]]).standard_normal(VOCAB)
        return (expected_logits(text) * 3 + self.error * noise).astype(np.float32)


class SureExecutor(FakeExecutor):
    """Its logits are three times those of the fake one, and a script's tokens are all but certain.

    Args:
        script: tokens behind the prompt.
        start: length of the prompt.
    """

    def __init__(self, config: Any, script: Sequence[int] = (), start: int = 0) -> None:
        super().__init__(config)
        self.script, self.start = script, start

    def _read(self, step_input: StepInput, position: int) -> NDArray[np.float32]:
        logits = super()._read(step_input, position) * 3
        place = position + 1 - self.start
        if 0 <= place < len(self.script):
            logits[self.script[place]] += 90
        return logits


class ScriptDrafter(NearDrafter):
    """Knows the script as well."""

    def logits(self, text: Sequence[int]) -> NDArray[np.float32]:
        logits = super().logits(text)
        executor: Any = self.executor
        place = len(text) - executor.start
        if 0 <= place < len(executor.script):
            logits[executor.script[place]] += 90
        return logits


class Bench:
    """A fake engine and generations on it."""

    def __init__(self, executor: FakeExecutor | None = None, config: Any = None) -> None:
        self.config = config or make_config()
        self.executor = executor or SureExecutor(self.config)
        self.states = StateManager(
            self.config.state, self.config.max_seq_len, self.config.rebuild_command
        )

    def start(
        self,
        prompt: Sequence[int] = PROMPT,
        *,
        rule: AcceptRule = "coupled",
        policy: WidthPolicy | None = None,
        drafter: NearDrafter | None = None,
        width: int = BLOCK,
        tokenizer: Tokenizer | None = None,
        **params: Any,
    ) -> Generation:
        speculator = Speculator(
            drafter or NearDrafter(self.executor), policy or FixedWidth(), width, rule
        )
        session = Session(self.executor, self.states, self.config, self.states.open())
        given = {"temperature": 0.8, "seed": 3, "ignore_eos": True, **params}
        return Generation(session, list(prompt), SamplingParams(**given), tokenizer, speculator)

    def finish(self, generation: Generation) -> CompletionOutput:
        output = CompletionOutput.join(list(generation))
        check_counts(generation.stats, len(output.token_ids) - 1)
        assert self.states.num_free_slots == 3
        return output


def check_counts(stats: SpeculationStats, num_emitted: int) -> None:
    assert stats.emitted == num_emitted
    assert stats.emitted == stats.rounds + stats.accepted + stats.plain_steps - stats.cut
    assert stats.proposed >= stats.drafted >= stats.accepted
    assert stats.cut in (0, 1)
    assert sum(stats.drafted_at) == stats.drafted
    assert sum(stats.accepted_at) == stats.accepted
    assert sum(stats.rounds_of_length) == stats.rounds
    assert sum(n * count for n, count in enumerate(stats.rounds_of_length)) == stats.accepted
    # A place is reached by a round that has accepted all before it and goes on.
    before = [stats.rounds, *stats.accepted_at[:-1]]
    for place, (drafted, reached, accepted) in enumerate(
        zip(stats.drafted_at, stats.reached_at, stats.accepted_at, strict=True)
    ):
        assert accepted <= reached <= min(drafted, before[place])
    if stats.rounds:
        length = (stats.emitted - stats.plain_steps) / stats.rounds
        assert stats.acceptance_length == pytest.approx(length)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", RULES)
def test_every_width_and_length_ends_where_it_must(rule: Any, policy: str) -> None:
    accepted = set()
    for width, max_tokens in itertools.product(range(1, BLOCK + 1), (1, 2, 3, 7, 8, 9, 20)):
        bench = Bench()
        generation = bench.start(
            rule=rule, policy=POLICIES[policy](), width=width, max_tokens=max_tokens
        )
        output = bench.finish(generation)
        assert (len(output.token_ids), output.finish_reason) == (max_tokens, "length")
        assert all(count <= width + 1 for _, count in bench.executor.calls[1:])
        # No position is written that the output cannot reach.
        assert bench.executor.pages[..., 0].max() <= len(PROMPT) + max_tokens - 2
        accepted |= set(generation.stats.accepted_at)
    assert len(accepted) > 1


@pytest.mark.parametrize("rule", RULES)
def test_the_context_is_used_to_its_last_position(rule: Any) -> None:
    for seed in range(6):
        bench = Bench()
        output = bench.finish(bench.start(rule=rule, seed=seed))
        assert (len(output.token_ids), output.finish_reason) == (91, "length")
        assert bench.executor.pages[..., 0].max() == 94  # the last token is read by no step


@pytest.mark.parametrize("policy", POLICIES)
def test_coupled_output_is_that_of_plain_decoding(policy: str) -> None:
    config = make_config()
    plain_bench = Bench(config=config)
    session = Session(plain_bench.executor, plain_bench.states, config, plain_bench.states.open())
    params = SamplingParams(temperature=0.8, seed=3, ignore_eos=True)
    plain = CompletionOutput.join(list(Generation(session, PROMPT, params, None)))
    bench = Bench()
    generation = bench.start(policy=POLICIES[policy]())
    assert bench.finish(generation) == plain
    assert generation.stats.accepted > 10


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("place", range(BLOCK + 2))
def test_a_stop_token_at_each_place_of_a_block(place: int, rule: Any) -> None:
    words = [100 + i for i in range(30)]
    for stop, given in ((EOS, {"ignore_eos": False}), (333, {"stop_token_ids": [333]})):
        script = [*words[: 1 + place], stop, *words[1 + place :]]
        executor = SureExecutor(make_config(), script, len(PROMPT))
        bench = Bench(executor)
        generation = bench.start(rule=rule, drafter=ScriptDrafter(executor), **given)
        output = bench.finish(generation)
        assert list(output.token_ids) == script[: place + 2]
        assert output.stop_reason == (None if stop == EOS else stop)
        stats = generation.stats
        # One round has all of it, unless the stop token is the first of the next one.
        assert stats.rounds == (1 if place <= BLOCK else 2)
        assert stats.cut == (place != BLOCK)
        # Drafts behind the end count neither as right nor as wrong.
        assert stats.accepted == min(place + 1, BLOCK) + (place > BLOCK)
        assert stats.reached_at == stats.accepted_at


@pytest.mark.parametrize("rule", RULES)
def test_a_stop_string_across_two_tokens_of_a_block(tmp_path: Path, rule: Any) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    script = tokenizer.encode("the quick brown fox jumps over the lazy dog")
    pieces = [tokenizer.decode([token]) for token in script]
    text = "".join(pieces)
    for last in range(2, BLOCK + 1):
        stop = pieces[last - 1][-1] + pieces[last][0]
        first = text.index(stop)
        executor = SureExecutor(make_config(), script, len(PROMPT))
        bench = Bench(executor)
        generation = bench.start(
            rule=rule, drafter=ScriptDrafter(executor), tokenizer=tokenizer, stop=[stop]
        )
        output = bench.finish(generation)
        assert (output.text, output.stop_reason) == (text[:first], stop)
        # The token that completes it is the last one.
        end = next(n for n in range(1, 40) if len("".join(pieces[:n])) >= first + len(stop))
        assert list(output.token_ids) == script[:end]


@pytest.mark.parametrize("rule", RULES)
def test_sessions_that_take_turns_and_reuse_slots_are_as_alone(rule: Any) -> None:
    prompts = [[3], [(5 * i) % VOCAB for i in range(70)], [9] * 20, [8, 7], [6] * 33]
    alone = []
    for prompt in prompts:
        bench = Bench()
        alone.append(list(bench.finish(bench.start(prompt, rule=rule, max_tokens=14)).token_ids))
    bench = Bench()
    waiting = list(enumerate(prompts))
    running: list[tuple[int, Generation]] = []
    got: list[list[int]] = [[] for _ in prompts]
    while waiting or running:
        while waiting and bench.states.num_free_slots:
            index, prompt = waiting.pop(0)
            running.append((index, bench.start(prompt, rule=rule, max_tokens=14)))
        for index, generation in list(running):
            got[index] += generation.advance().token_ids
            if generation.state == "finished":
                running.remove((index, generation))
    assert got == alone


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_that_fails_ends_its_generation_only(rule: Any) -> None:
    bench = Bench()
    expected = bench.finish(bench.start([1, 2, 3], rule=rule, max_tokens=12))
    other = bench.start(rule=rule, max_tokens=40)
    other.advance()
    failing = bench.start(rule=rule, drafter=NearDrafter(bench.executor, fail_after=2))
    with pytest.raises(OSError, match="the drafter failed"):
        list(failing)
    assert (failing.state, bench.states.num_free_slots) == ("finished", 2)
    again = bench.start([1, 2, 3], rule=rule, max_tokens=12)
    assert CompletionOutput.join(list(again)) == expected
    list(other)
    assert bench.states.num_free_slots == 3


@pytest.mark.parametrize("rule", RULES)
def test_a_cancelled_stream_counts_and_frees_what_it_had(
    tmp_path: Path, fake_executors: list[FakeExecutor], monkeypatch: pytest.MonkeyPatch, rule: Any
) -> None:
    write_engine(tmp_path / "engine")
    monkeypatch.setattr(config_module, "NgramDrafter", lambda: NearDrafter(fake_executors[0]))
    params = SamplingParams(temperature=0.8, seed=3, ignore_eos=True, max_tokens=30)
    with LLM(tmp_path / "engine", speculative=SpeculativeConfig("ngram", accept=rule)) as llm:
        whole = llm.generate([PROMPT], params)[0]
        counts = llm.speculation.copy()
        check_counts(whole.speculation, 29)
        stream = llm.stream(PROMPT, params)
        first, second = next(stream), next(stream)
        stream.close()
        assert llm.engine.states.num_free_slots == 3
        tokens = whole.outputs[0].token_ids
        assert first.token_ids + second.token_ids == tokens[: 1 + len(second.token_ids)]
        # The first token comes of the prompt; one step gave the second delta.
        check_counts(llm.speculation.since(counts), len(second.token_ids))
        assert second.num_accepted == len(second.token_ids) - 1
        assert llm.generate([PROMPT], params)[0].outputs == whole.outputs


def test_greedy_rounds_of_either_rule_need_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    run, wanted = bench.executor.run, []

    def watched(step: str, given: StepInput, *, wants_logits: bool = True) -> StepOutput:
        wanted.append(wants_logits)
        return run(step, given, wants_logits=wants_logits)

    monkeypatch.setattr(bench.executor, "run", watched)
    generation = bench.start(rule="probabilistic", temperature=0.0, max_tokens=20)
    output = bench.finish(generation)
    assert list(output.token_ids) == generate_plainly(PROMPT, Sampling(), 20)
    assert len(wanted) > 3
    assert not any(wanted)
