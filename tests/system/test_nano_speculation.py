"""The trained model with its trained drafter: coupled output is that of plain decoding.

These are 20 of the 500 prompts of `perf/speculation_equality.py`, with their numbers, which give
the seeds. Texts are Jane Austen's and of PostgreSQL's documentation.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling
from inkrt.runtime.generation import Generation
from inkrt.runtime.llm import LLM
from inkrt.runtime.output import CompletionOutput, RequestOutput
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.session import Session
from inkrt.runtime.spec.config import SpeculativeConfig
from inkrt.runtime.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
MAX_SEQ_LEN = 2009
WAYS = {
    "fixed": SpeculativeConfig("dspark", width="fixed"),
    "confidence": SpeculativeConfig("dspark", width="confidence"),
    "ngram": SpeculativeConfig("ngram", width="fixed"),
}
Request = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def folder(nano_engine: Path) -> Path:
    return nano_engine


@pytest.fixture(scope="module")
def requests(folder: Path) -> list[Request]:
    """Both temperatures of short prompts, one of long ones; the longest goes to the last position.

    The longest come first: slots are used again by shorter ones, beside others of any length.
    """
    tokenizer = Tokenizer(folder / "tokenizer.json")
    given = json.loads((Path(__file__).parent / "nano_prompts.json").read_text())
    made: list[Request] = []
    assert len(given["prompts"]) == 20
    for prompt in given["prompts"]:
        is_text = prompt["kind"] == "text"
        text = given["texts"][prompt["text"]] if is_text else prompt["text"]
        tokens = tokenizer.encode(text, parse_special=True)[: prompt.get("length")]
        number = prompt["number"]
        temperatures = [0.0, 1.0] if len(tokens) < 50 else [float(number % 2)]
        for temperature in temperatures:
            params = SamplingParams(
                temperature=temperature, seed=number, ignore_eos=is_text,
                max_tokens=None if len(tokens) >= 2000 else 6 if is_text else 14,
            )  # fmt: skip
            made.append((tokens, params))
    return sorted(made, key=lambda request: -len(request[0]))


def answer(llm: LLM, requests: list[Request]) -> list[RequestOutput]:
    prompts, params = zip(*requests, strict=True)
    return llm.generate(list(prompts), list(params))


@pytest.fixture(scope="module")
def plain(folder: Path, requests: list[Request]) -> list[Any]:
    with LLM(folder, speculative=SpeculativeConfig("none")) as llm:
        return [output.outputs for output in answer(llm, requests)]


class Counts:
    """Steps as sessions are asked for them, which know nothing of statistics."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.plain, self.rounds = 0, 0
        step, decode = Session.step, Session.decode

        def counted_step(session: Session, tokens: Any, *given: Any, **options: Any) -> Any:
            assert len(tokens) > 1
            self.rounds += 1
            return step(session, tokens, *given, **options)

        def counted_decode(*given: Any, **options: Any) -> Any:
            self.plain += 1
            return decode(*given, **options)

        patch.setattr(Session, "step", counted_step)
        patch.setattr(Session, "decode", counted_decode)


@pytest.mark.parametrize("way", WAYS)
def test_coupled_output_is_that_of_plain_decoding(
    folder: Path,
    requests: list[Request],
    plain: list[Any],
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = slice(list(WAYS).index(way), None, len(WAYS))
    with LLM(folder, speculative=WAYS[way]) as llm:
        counts = Counts(monkeypatch)
        outputs = answer(llm, requests[chosen])
        stats = llm.speculation
    assert [output.outputs for output in outputs] == plain[chosen]
    # Trained, not random: drafts are right more often than not where text is predictable.
    assert stats.accepted > stats.rounds / 2
    # The acceptance length, recomputed from the tokens that came out.
    emitted = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    assert (stats.rounds, stats.plain_steps) == (counts.rounds, counts.plain)
    assert stats.acceptance_length == (emitted - counts.plain) / counts.rounds
    if way == "fixed":
        (longest,) = outputs[0].outputs
        assert len(requests[0][0]) + len(longest.token_ids) == MAX_SEQ_LEN
        assert longest.finish_reason == "length"


def test_probabilistic_rounds_are_greedy_where_plain_decoding_is(
    folder: Path, requests: list[Request], plain: list[Any]
) -> None:
    greedy = [i for i, (_, params) in enumerate(requests) if params.temperature == 0][-5:]
    with LLM(folder, speculative=SpeculativeConfig(accept="probabilistic", width="fixed")) as llm:
        outputs = answer(llm, [requests[i] for i in greedy])
    assert [output.outputs for output in outputs] == [plain[i] for i in greedy]


def test_a_conversation_goes_on_as_if_it_were_read_anew(
    folder: Path, requests: list[Request]
) -> None:
    """Warm as cold: same tokens, same rounds, behind a beginning that another session has read."""
    tokens, params = next((t, p) for t, p in requests if len(t) < 300)
    with Engine.open(folder) as engine, engine.session() as base:
        speculation = WAYS["fixed"].resolve(folder, engine.config)
        assert speculation is not None
        whole = (len(tokens) - 1) // base.widest_step * base.widest_step
        assert whole >= 128
        base.prefill(tokens[:whole], Sampling(), wants_logits=False)
        generations = [
            Generation(session, tokens, replace(params, temperature=1.0), None, drafting)
            for session, drafting in (
                (base.fork(), speculation.speculator()),
                (engine.session(), speculation.speculator()),
            )
        ]
        warm, cold = (CompletionOutput.join(list(generation)) for generation in generations)
        assert warm == cold
        assert generations[0].stats == generations[1].stats
        assert generations[0].stats.rounds > 0
