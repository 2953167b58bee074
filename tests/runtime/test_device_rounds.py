"""Rounds that a device runs by itself and ahead: those of the host, whatever comes in between."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake import VOCAB, generate_plainly
from fake_rounds import BLOCK, PROMPT, Bench, cost_aware

from inkrt.errors import CapacityError
from inkrt.runtime.engine_file import StateLayout
from inkrt.runtime.executor import Sampling
from inkrt.runtime.executor.round_queue import (
    RoundRecord,
)
from inkrt.runtime.output import CompletionOutput
from inkrt.runtime.session import Session
from inkrt.runtime.spec.drafter import EngineDrafter, Proposal
from inkrt.runtime.spec.round import AcceptRule, Round, Speculator
from inkrt.runtime.spec.width import (
    ConfidenceThreshold,
    FixedWidth,
    WidthPolicy,
)

GREEDY = Sampling()
NOISY = Sampling(temperature=0.8, seed=5)
FILTERED = Sampling(temperature=0.9, top_k=20, top_p=0.9, seed=2**40)
LONG = {"max_seq_len": 1024, "state": StateLayout(3, 4, 768, 9, ())}
POLICIES: dict[str, Callable[[], WidthPolicy]] = {
    "fixed": FixedWidth,
    "threshold": lambda: ConfidenceThreshold(0.5),
    "never": lambda: ConfidenceThreshold(1.0),
    "cost": cost_aware,
    "cost explores": lambda: cost_aware(explore_every=5, num_first=1),
    "cost skips": lambda: cost_aware(plain=0.3, explore_every=6),
    "cost wavers": lambda: cost_aware(plain=0.6, scale=1.2, explore_every=9, num_first=0),
}


def rounds(
    bench: Bench,
    policy: WidthPolicy,
    sampling: Sampling,
    count: int,
    most: int = BLOCK,
    rule: AcceptRule = "coupled",
) -> list[Round]:
    """The rounds that give `count` tokens behind the prompt, on either side."""
    session = bench.session(PROMPT[:-1])
    speculator = Speculator(EngineDrafter(), policy, most, rule)
    tokens, found = list(PROMPT), []
    while (left := count + len(PROMPT) - len(tokens)) > 0:
        found.append(speculator.run(session, tokens, sampling, left))
        assert found[-1].on_device == (bench.executor.rounds is not None)
        tokens += found[-1].tokens
        assert session.tokens == tokens[:-1]
    session.close()
    assert bench.states.num_free_pages == bench.config.state.num_pages
    return [replace(one, on_device=False) for one in found]


@pytest.mark.parametrize("has_confidence", [True, False])
@pytest.mark.parametrize("sampling", [GREEDY, NOISY], ids=["greedy", "noisy"])
@pytest.mark.parametrize("name", POLICIES)
def test_rounds_are_those_of_the_host(name: str, sampling: Sampling, has_confidence: bool) -> None:
    """Tokens, widths, and what policies have learned, over many wraps of rings and windows."""
    if name in ("threshold", "never") and not has_confidence:
        pytest.skip("goes by confidences")
    policies = [POLICIES[name](), POLICIES[name]()]
    benches = [Bench(on_device=on, has_confidence=has_confidence, **LONG) for on in (False, True)]
    host, device = (
        rounds(bench, policy, sampling, 400)
        for bench, policy in zip(benches, policies, strict=True)
    )
    assert device == host
    assert [token for one in device for token in one.tokens][:400] == generate_plainly(
        PROMPT, sampling, 400
    )
    assert policies[0] == policies[1]
    assert (benches[1].device.num_begun, benches[1].device.longest_lead) == (1, 1)
    # Nothing ran but what was asked for and, at the end, what a stop would have left over.
    assert benches[1].device.num_run == len(device)


@pytest.mark.parametrize("sampling", [GREEDY, NOISY, FILTERED], ids=["greedy", "noisy", "top"])
@pytest.mark.parametrize("name", ["fixed", "threshold", "cost", "cost skips"])
def test_rounds_of_the_ratio_test(name: str, sampling: Sampling) -> None:
    """The same noise by seed and anchor: the same drafts and verdicts; greedy as coupled."""
    policies = [POLICIES[name](), POLICIES[name]()]
    benches = [Bench(on_device=on, **LONG) for on in (False, True)]
    host, device = (
        rounds(bench, policy, sampling, 250, rule="probabilistic")
        for bench, policy in zip(benches, policies, strict=True)
    )
    assert device == host
    assert policies[0] == policies[1]
    assert sum(len(one.tokens) - 1 for one in device) > 30
    plain = generate_plainly(PROMPT, sampling, 250)
    is_plain = [token for one in device for token in one.tokens][:250] == plain
    assert is_plain == (sampling.temperature == 0)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_fewer_drafts(most: int) -> None:
    benches = [Bench(on_device=on, **LONG) for on in (False, True)]
    host, device = (rounds(bench, FixedWidth(), NOISY, 150, most) for bench in benches)
    assert device == host
    assert max(one.drafted for one in device) == most


@pytest.mark.parametrize("count", range(1, 25))
def test_every_number_of_tokens(count: int) -> None:
    benches = [Bench(on_device=on) for on in (False, True)]
    host, device = (rounds(bench, FixedWidth(), NOISY, count) for bench in benches)
    assert device == host
    assert sum(len(one.tokens) for one in device) == count


@pytest.mark.parametrize("length", range(80, 96))
def test_the_end_of_the_context(length: int) -> None:
    prompt = [(3 * i) % VOCAB for i in range(length)]
    outputs, stats = [], []
    for on_device in (False, True):
        generation = Bench(on_device=on_device).generation(
            FixedWidth(), prompt=prompt, temperature=0.8, seed=5, ignore_eos=True, max_tokens=None
        )
        outputs.append(CompletionOutput.join(list(generation)))
        stats.append(replace(generation.stats, on_device=0))
    assert outputs[0] == outputs[1]
    assert stats[0] == stats[1]
    assert len(outputs[0].token_ids) == 96 - length


@pytest.mark.parametrize("place", range(1, 30))
def test_stop_ids_and_counts(place: int) -> None:
    """The stop comes at every place of a round, on the device and on the host alike."""
    plain = generate_plainly(PROMPT, NOISY, 30)
    outputs, stats = [], []
    for on_device in (False, True):
        bench = Bench(on_device=on_device)
        generation = bench.generation(
            FixedWidth(), temperature=0.8, seed=5, stop_token_ids=[plain[place]], max_tokens=60
        )
        outputs.append(CompletionOutput.join(list(generation)))
        stats.append(generation.stats)
        assert bench.states.num_free_slots == 3
    assert outputs[0] == outputs[1]
    assert outputs[0].token_ids == tuple(plain[: plain.index(plain[place]) + 1])
    assert replace(stats[1], on_device=0) == stats[0]
    assert stats[1].on_device == stats[1].rounds + stats[1].plain_steps
    # The device knew the stop: nothing ran behind it.
    assert bench.device.num_run == stats[1].on_device


def test_generations_in_turns_run_nothing_in_vain() -> None:
    bench = Bench(on_device=True)
    prompts = [[token, *PROMPT] for token in (1, 2, 3)]
    given = {"temperature": 0.8, "seed": 5, "ignore_eos": True, "max_tokens": 40}
    running = [bench.generation(cost_aware(), prompt=prompt, **given) for prompt in prompts]
    tokens: list[list[int]] = [[] for _ in running]
    while any(generation.state != "finished" for generation in running):
        for number, generation in enumerate(running):
            if generation.state != "finished":
                tokens[number] += generation.advance().token_ids
    assert tokens == [generate_plainly(prompt, NOISY, 40) for prompt in prompts]
    steps = sum(generation.stats.on_device for generation in running)
    assert steps <= bench.device.num_run <= steps + 3


class HostDrafter:
    """Drafts as the engine's drafter, but the host runs its rounds."""

    def draft(self, *args: Any, **options: Any) -> Proposal:
        return EngineDrafter().draft(*args, **options)


class Timeline:
    """A session, the tokens that it should have, and rounds of both kinds with one policy."""

    def __init__(self, session: Session, tokens: list[int], policy: WidthPolicy) -> None:
        self.session, self.tokens = session, tokens
        self.speculators = [
            Speculator(drafter, policy, BLOCK) for drafter in (EngineDrafter(), HostDrafter())
        ]

    def take(self, new: list[int], sampling: Sampling) -> None:
        assert new == generate_plainly(self.tokens, sampling, len(new))
        self.tokens += new
        assert self.session.tokens == self.tokens[:-1]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_in_between(seed: int) -> None:
    """Rounds of both kinds, plain steps, other tokens, going back, forks and other sessions."""
    rng = random.Random(seed)
    bench = Bench(on_device=True, **LONG)
    sampling = rng.choice([GREEDY, NOISY])
    make = rng.choice(list(POLICIES.values()))
    open_ones = [Timeline(bench.session(PROMPT[:-1]), list(PROMPT), make())]
    num_on_device = 0
    for _ in range(150):
        one = rng.choice(open_ones)
        session, tokens = one.session, one.tokens
        what = rng.choices(["rounds", "decode", "prefill", "back", "fork"], [8, 2, 1, 2, 1])[0]
        if session.length > 900:
            break
        if what == "rounds":
            for speculator in rng.choices(one.speculators, [5, 1], k=rng.randrange(1, 6)):
                most = rng.choice([30, 1000 - len(tokens)])
                found = speculator.run(session, tokens, sampling, most)
                num_on_device += found.on_device
                one.take(found.tokens, sampling)
        elif what == "decode":
            token = session.decode(tokens[-1], sampling, num_more=rng.randrange(5))
            one.take([token], sampling)
        elif what == "prefill":
            more = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
            session.prefill([tokens[-1], *more[:-1]], sampling)
            tokens += more
        elif what == "back":
            length = rng.randrange(max(session.length - 3, 0), session.length + 1)
            try:
                session.rollback(length)
            except CapacityError:
                session.rollback(0)
                session.prefill(tokens[:length], sampling)
            del tokens[length + 1 :]
        elif len(open_ones) < 3:
            open_ones.append(Timeline(session.fork(), list(tokens), make()))
        else:
            open_ones.remove(one)
            session.close()
    assert num_on_device > 50


def test_going_back_reaches_a_round_less_far() -> None:
    bench = Bench(on_device=True, **LONG)
    session, speculator = bench.session(PROMPT[:-1]), Speculator(EngineDrafter(), FixedWidth(), 4)
    tokens = list(PROMPT)
    for _ in range(3):
        tokens += speculator.run(session, tokens, NOISY, 100).tokens
    lowest = session.length + 5 - 9  # a round of an anchor and four drafts, of nine positions
    with pytest.raises(CapacityError, match=f"go back to at least {lowest}"):
        session.rollback(lowest - 1)
    session.rollback(lowest)
    del tokens[lowest + 1 :]
    tokens += speculator.run(session, tokens, NOISY, 100).tokens
    assert tokens == [*PROMPT, *generate_plainly(PROMPT, NOISY, len(tokens) - len(PROMPT))]


def test_the_last_page() -> None:
    """Pages end inside the round that would run ahead; it goes on when there are more."""
    for on_device in (False, True):
        bench = Bench(on_device=on_device, state=StateLayout(2, 4, 9, 9, ()))  # of 36 positions
        session = bench.session(PROMPT[:-1])
        blocker = bench.session([1] * 5)
        speculator = Speculator(EngineDrafter(), FixedWidth(), BLOCK)
        tokens = list(PROMPT)
        while session.length < 28:
            tokens += speculator.run(session, tokens, NOISY, 100).tokens
        with pytest.raises(CapacityError, match="1 more pages are needed, 0 of 9 are free"):
            speculator.run(session, tokens, NOISY, 100)
        blocker.close()
        tokens += speculator.run(session, tokens, NOISY, 100).tokens
        assert tokens == [*PROMPT, *generate_plainly(PROMPT, NOISY, len(tokens) - len(PROMPT))]


def test_a_failing_step_ends_the_generation_and_gives_back_its_state() -> None:
    bench = Bench(on_device=True)
    generation = bench.generation(FixedWidth(), temperature=0.0, max_tokens=60, ignore_eos=True)
    generation.advance()
    bench.executor.fail_after = 30
    with pytest.raises(OSError, match="the device failed"):
        list(generation)
    assert bench.states.num_free_slots == 3
    again = bench.generation(FixedWidth(), temperature=0.0, max_tokens=60, ignore_eos=True)
    output = CompletionOutput.join(list(again))
    assert output.token_ids == tuple(generate_plainly(PROMPT, GREEDY, 60))


@pytest.mark.parametrize("number", [0, 1, 4])
def test_interrupted_while_waiting(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(on_device=True)
    session = bench.session(PROMPT[:-1])
    speculator = Speculator(EngineDrafter(), FixedWidth(), BLOCK)
    tokens = list(PROMPT)
    for _ in range(number):
        tokens += speculator.run(session, tokens, GREEDY, 60).tokens

    def interrupt(_number: int) -> RoundRecord:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bench.device, "await_record", interrupt)
        with pytest.raises(KeyboardInterrupt):
            speculator.run(session, tokens, GREEDY, 60)
    assert session.tokens == tokens[:-1]
    # Two rounds may be on their way, which write further than can be undone.
    with pytest.raises(CapacityError, match="roll back to 0 and prefill the session again"):
        speculator.run(session, tokens, GREEDY, 60)
    session.rollback(0)
    session.prefill(tokens[:-1], GREEDY)
    tokens += speculator.run(session, tokens, GREEDY, 60).tokens
    assert tokens == [*PROMPT, *generate_plainly(PROMPT, GREEDY, len(tokens) - len(PROMPT))]


def test_what_the_host_runs_where_the_device_could() -> None:
    """Requests whose logits are changed, other drafters, more stop ids than the device holds."""
    bench = Bench(on_device=True)
    given = {"max_tokens": 20, "ignore_eos": True, "seed": 1}  # which starts with no stop id
    for params in (
        {"frequency_penalty": 0.5}, {"stop_token_ids": list(range(300, 365))}, {"min_tokens": 5}
    ):  # fmt: skip
        generation = bench.generation(FixedWidth(), **given, **params)
        list(generation)
        assert generation.stats.on_device == 0
        assert generation.stats.emitted > 0
    generation = bench.generation(FixedWidth(), **given)
    list(generation)
    assert generation.stats.on_device > 0
