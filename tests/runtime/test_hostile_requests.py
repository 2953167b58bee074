"""Requests that ban, repeat or scale what rounds do not expect, by both rules."""

import itertools
from typing import Any

import pytest
from fake import EOS, VOCAB, make_config
from test_hostile_rounds import PROMPT, RULES, Bench, NearDrafter, ScriptDrafter, SureExecutor

from inkrt.errors import RequestError
from inkrt.runtime.spec.drafter import NgramDrafter
from inkrt.runtime.spec.width import CostAware, RoundCosts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", RULES)
def test_what_a_request_makes_of_its_logits_holds_in_every_row(
    rule: Any, temperature: float
) -> None:
    allowed = list(range(100, 140))
    for seed in range(4):
        bench = Bench()
        generation = bench.start(
            rule=rule, temperature=temperature, seed=seed, max_tokens=40, min_tokens=25,
            allowed_token_ids=[*allowed, EOS], ignore_eos=False, presence_penalty=0.5,
            bad_words=[[token, token + 1] for token in allowed], logit_bias={EOS: 60},
            drafter=NearDrafter(bench.executor, 0.1),
        )  # fmt: skip
        tokens = bench.finish(generation).token_ids
        # The end token is by far the likeliest, but banned that long.
        assert len(tokens) == 26
        assert tokens[-1] == EOS
        assert set(tokens[:-1]) <= set(allowed)
        assert all(after != before + 1 for before, after in itertools.pairwise(tokens[:-1]))


@pytest.mark.parametrize("rule", RULES)
def test_a_request_that_bans_everything_is_told_so(rule: Any) -> None:
    # Behind 101 and 102 nothing may come; drafts do not know.
    executor = SureExecutor(make_config(), [101, 102, 103, 104], len(PROMPT))
    bench = Bench(executor)
    generation = bench.start(
        rule=rule, drafter=ScriptDrafter(executor), allowed_token_ids=[101, 102],
        bad_words=[[102, 101], [102, 102]],
    )  # fmt: skip
    with pytest.raises(RequestError, match="no token may come next"):
        list(generation)
    assert bench.states.num_free_slots == 3


@pytest.mark.parametrize("rule", RULES)
def test_an_end_behind_which_everything_is_banned_is_an_end(rule: Any) -> None:
    words = [100, 101, 102, EOS]
    executor = SureExecutor(make_config(), words, len(PROMPT))
    bench = Bench(executor)
    generation = bench.start(
        rule=rule, drafter=ScriptDrafter(executor), allowed_token_ids=words,
        bad_words=[[EOS, word] for word in words], ignore_eos=False,
    )  # fmt: skip
    output = bench.finish(generation)
    assert (list(output.token_ids), output.finish_reason) == (words, "stop")
    assert generation.stats.rounds == 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", RULES)
def test_drafts_without_a_logit_are_not_read(rule: Any, temperature: float) -> None:
    # The prompt holds a token that the model reads and cannot generate; n-grams repeat prompts.
    prompt, script = [7, 8, VOCAB + 5, 9, 30, 7, 8, 31, VOCAB + 9, 30, 7], [8, 31, 40, 7, 8, 31, 40]
    executor = SureExecutor(make_config(), script, len(prompt))
    bench = Bench(executor)
    drafter: Any = NgramDrafter()
    generation = bench.start(
        prompt, rule=rule, drafter=drafter, temperature=temperature, max_tokens=len(script)
    )
    assert list(bench.finish(generation).token_ids) == script
    assert max(executor.pages[..., 1].max(), 0) == VOCAB + 9
    assert generation.stats.accepted > 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("given", [{}, {"presence_penalty": 0.5}])
@pytest.mark.parametrize("temperature", [5e-324, 1e-50, 1e-40, 9.9e-6])
def test_temperatures_that_float32_cannot_hold_are_greedy(
    temperature: float, given: dict[str, float], rule: Any
) -> None:
    tokens = []
    for chosen in (0.0, temperature):
        bench = Bench()
        generation = bench.start(rule=rule, temperature=chosen, max_tokens=8, **given)
        tokens.append(bench.finish(generation).token_ids)
    assert tokens[0] == tokens[1]


def test_no_step_runs_ahead_of_the_last_token_where_drafting_does_not_pay() -> None:
    costs = RoundCosts(1.0, [9.0] * 8)
    for max_tokens in (3, 8, 20):
        bench = Bench()
        policy = CostAware(lambda _: costs, explore_every=50, num_first=0)
        generation = bench.start(policy=policy, max_tokens=max_tokens)
        bench.finish(generation)
        assert generation.stats.plain_steps == max_tokens - 1
        # The prompt's step gives the first token and the last one is read by none.
        assert [count for _, count in bench.executor.calls] == [len(PROMPT)] + [1] * (
            max_tokens - 1
        )
