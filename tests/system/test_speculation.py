"""Whole engines: the same output with and without speculation, across rings and pages."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.runtime.llm import LLM
from inkrt.runtime.logits import needs_processing
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.spec import config
from inkrt.runtime.spec.config import SpeculativeConfig
from inkrt.runtime.spec.drafter import Proposal

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.3, top_k=5, seed=3, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.8, min_p=0.02, seed=4, max_tokens=40, ignore_eos=True),
]


@pytest.fixture(scope="module", params=["inkling2", "flint"])
def folder(request, make_engine, tmp_path_factory) -> Path:
    if request.param == "inkling2":
        return make_engine("float32", num_layers=6, max_batch_size=8)
    base = tmp_path_factory.mktemp("flint")
    write_checkpoint(base / "checkpoint", seed=2, dtype="float32", model="flint")
    options = BuildOptions(max_seq_len=250, max_batch_size=3)
    build_engine(base / "checkpoint", base / "engine", options)
    return base / "engine"


# Logits are processed on the host, whatever model they come from.
ONE_MODEL_IS_QUICK = pytest.mark.parametrize(
    "folder", ["inkling2", pytest.param("flint", marks=pytest.mark.slow)], indirect=True
)


def prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(11)
    piece = [rng.randrange(vocab_size) for _ in range(20)]
    return [piece, piece[:3] * 15]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "cool", "filtered"])
def test_output_is_that_of_plain_decoding(folder: Path, params: SamplingParams) -> None:
    with LLM(folder) as llm:
        tokens = prompts(llm.engine.config.model.vocab_size)
        plain = [output.outputs for output in llm.generate(tokens, params)]
    speculative = SpeculativeConfig("ngram")
    with LLM(folder, speculative=speculative) as llm:
        outputs = llm.generate(tokens, params)
        stats = llm.speculation
    assert [output.outputs for output in outputs] == plain
    assert stats.emitted == len(tokens) * (params.max_tokens - 1)
    assert stats.rounds > 0
    assert stats.accepted > 0 or params.temperature == 1.0


WORDS = [5, 7, 11]  # random weights that may say anything repeat nothing
PENALTIES = [
    {"repetition_penalty": 3.0, "presence_penalty": 0.2, "frequency_penalty": 0.5},
    {"frequency_penalty": -0.3, "logit_bias": {5: -9.0}, "min_tokens": 20},
    {"frequency_penalty": 0.1, "bad_words": [[5, 5], [7, 7, 7], [11, 11], [7, 5, 11]]},
]


@ONE_MODEL_IS_QUICK
@pytest.mark.parametrize("penalties", PENALTIES, ids=["less", "more", "banned"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_under_penalties_is_that_of_plain_decoding(
    folder: Path, penalties: dict[str, Any], temperature: float
) -> None:
    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=30,
            ignore_eos=True,
            allowed_token_ids=WORDS,
            **penalties,
        )
        for seed in ([0] if temperature == 0 else [1, 2, 2**62 + 3])
    ]
    tokens = [[5, 7, 11, 11, 7, 5, 5]] * len(params)
    free = SamplingParams(
        temperature=temperature, seed=params[0].seed, max_tokens=30, ignore_eos=True,
        allowed_token_ids=WORDS,
    )  # fmt: skip
    with LLM(folder) as llm:
        plain = [output.outputs for output in llm.generate(tokens, params)]
        (without,) = llm.generate(tokens[:1], free)
    assert plain[0] != without.outputs
    with LLM(folder, speculative=SpeculativeConfig("ngram")) as llm:
        assert [output.outputs for output in llm.generate(tokens, params)] == plain
        assert llm.speculation.accepted > 0


@ONE_MODEL_IS_QUICK
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "cool", "filtered"])
def test_drawing_on_the_host_gives_the_tokens_of_the_step(
    folder: Path, params: SamplingParams
) -> None:
    unchanged = replace(params, logit_bias={5: 0.0})  # has a processor, which changes nothing
    assert needs_processing(unchanged)
    for speculative in (None, SpeculativeConfig("ngram")):
        with LLM(folder, speculative=speculative) as llm:
            tokens = prompts(llm.engine.config.model.vocab_size)[1:]
            by_step = [output.outputs for output in llm.generate(tokens, params)]
            on_host = [output.outputs for output in llm.generate(tokens, unchanged)]
        assert on_host == by_step


class Oracle:
    """Proposes 0 to 7 tokens of the plain output and then wrong ones."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text
        self.rights = [n for first in range(8) for second in range(8) for n in (first, second)]
        random.Random(0).shuffle(self.rights)

    def draft(self, _: Any, tokens: Sequence[int], _sampling: Any, most: int, **_rule: Any):
        place, right = len(tokens), min(self.rights.pop(), most)
        assert list(tokens) == self.text[:place]
        wrong = [token ^ 1 for token in self.text[place + right : place + most]]
        return Proposal([*self.text[place : place + right], *wrong])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_number_of_drafts_may_be_right(
    folder: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=130, ignore_eos=True)
    with LLM(folder) as llm:
        prompt = prompts(llm.engine.config.model.vocab_size)[0]
        (plain,) = llm.generate([prompt], params)[0].outputs
    oracle = Oracle([*prompt, *plain.token_ids])
    monkeypatch.setattr(config, "NgramDrafter", lambda: oracle)
    with LLM(folder, speculative=SpeculativeConfig("ngram")) as llm:
        (output,) = llm.generate([prompt], params)[0].outputs
        stats = llm.speculation
    assert output == plain
    assert stats.plain_steps <= 1  # where one token is left, there is nothing to draft
    assert min(stats.accepted_at) > 0
    assert stats.rounds > 20
