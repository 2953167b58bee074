"""Whole engines with a drafter of their own, random as it is: output, acceptance, measurement.

A random drafter is seldom right, but where the temperature is high all distributions are flat and
near to each other, so that drafts are accepted often enough.
"""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from inkrt.commands import bench, bench_speculation
from inkrt.engines.nano.drafter import HEADS
from inkrt.errors import EngineFormatError
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling
from inkrt.runtime.llm import LLM
from inkrt.runtime.sampling import probabilities
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.session import Session
from inkrt.runtime.spec.config import SpeculativeConfig
from inkrt.runtime.spec.costs import CostTable, engine_hash
from inkrt.runtime.spec.drafter import EngineDrafter
from inkrt.runtime.spec.round import Speculator
from inkrt.runtime.spec.stats import SpeculationStats
from inkrt.runtime.spec.width import FixedWidth

HOT = 3.0
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True),
    SamplingParams(temperature=HOT, seed=3, max_tokens=35, ignore_eos=True),
    SamplingParams(temperature=HOT, seed=4, top_k=40, top_p=0.9, max_tokens=35, ignore_eos=True),
]


@pytest.fixture(scope="module")
def folder(make_speculating_engine: Any) -> Path:
    return make_speculating_engine("rnn")


def prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(vocab_size) for _ in range(count)] for count in (33, 3, 70)]


def flat_costs(folder: Path, draft_s: float) -> None:
    """Costs by hand: a verify step takes a little longer for each token."""
    with Engine.open(folder) as engine:
        hash_, widest = engine_hash(engine.config), engine.config.widest_verify
    verify_s = tuple(1.0 + 0.02 * n for n in range(widest))
    CostTable(hash_, "by hand", (1,), (1.0,), (verify_s,), (draft_s,)).write(folder)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Any]:
    with LLM(folder, speculative=SpeculativeConfig("none")) as llm:
        tokens = prompts(llm.engine.config.model.vocab_size)
        return [[output.outputs for output in llm.generate(tokens, params)] for params in PARAMS]


@pytest.mark.parametrize(
    "width",
    [*(pytest.param(width, marks=pytest.mark.slow) for width in ("fixed", "confidence")), "cost"],
)
def test_coupled_output_is_that_of_plain_decoding(
    folder: Path, plain: list[Any], width: Any
) -> None:
    flat_costs(folder, 0.1)
    chosen = SpeculativeConfig(width=width, confidence_threshold=0.3)
    with LLM(folder, speculative=chosen) as llm:
        assert llm.method == "dspark"
        tokens = prompts(llm.engine.config.model.vocab_size)
        for params, expected in zip(PARAMS, plain, strict=True):
            # Three sessions of very different lengths take turns, in slots that were used before.
            outputs = llm.generate(tokens, params)
            assert [output.outputs for output in outputs] == expected
        stats = llm.speculation
    check_counts(stats)
    assert stats.accepted > 20
    assert stats.rounds > 50
    if width == "confidence":
        assert stats.drafted < stats.proposed


@pytest.mark.slow
@pytest.mark.parametrize("width", ["fixed", "confidence", "cost"])
def test_probabilistic_output_depends_on_the_seed_alone(
    folder: Path, plain: list[Any], width: Any
) -> None:
    flat_costs(folder, 0.1)
    chosen = SpeculativeConfig(accept="probabilistic", width=width, confidence_threshold=0.3)
    with LLM(folder, speculative=chosen) as llm:
        tokens = prompts(llm.engine.config.model.vocab_size)
        assert [output.outputs for output in llm.generate(tokens, PARAMS[0])] == plain[0]
        together = [output.outputs for output in llm.generate(tokens, PARAMS[1])]
        alone = [llm.generate([prompt], PARAMS[1])[0].outputs for prompt in reversed(tokens)]
        assert together == alone[::-1]
        assert together != plain[1]
        check_counts(llm.speculation)
        assert llm.speculation.accepted > 40


def check_counts(stats: SpeculationStats) -> None:
    assert stats.emitted == stats.rounds + stats.accepted + stats.plain_steps - stats.cut
    assert stats.proposed >= stats.drafted == sum(stats.drafted_at)
    assert stats.accepted == sum(stats.accepted_at)


class Watched:
    """A session that keeps the logits of the last draft and the last verify step."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.drafted: Any = None
        self.verified: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def draft(self, *args: Any, **options: Any) -> Any:
        self.drafted = self._session.draft(*args, **options)
        return self.drafted

    def step(self, *args: Any, **options: Any) -> Any:
        self.verified = self._session.step(*args, **options)
        return self.verified


def excess_acceptance(folder: Path, most: int, filters: Any) -> list[float]:
    """Accepted drafts of many rounds of up to `most`, less what p and q let expect.

    Given its drafts, at least i are accepted with probability P_i.
    """
    excess: list[float] = []
    speculator = Speculator(EngineDrafter(), FixedWidth(), most, "probabilistic")
    with Engine.open(folder) as engine, engine.session() as session:
        watched: Any = Watched(session)
        prompt = prompts(engine.config.model.vocab_size)[0]
        seed, tokens = -1, [0] * 130
        while len(excess) < 120:
            if len(tokens) >= 126:
                seed += 1
                sampling = Sampling(temperature=HOT, seed=seed, **filters)
                session.rollback(0)
                tokens = [*prompt, int(session.prefill(prompt, sampling).tokens[-1])]
            step = speculator.run(watched, tokens, sampling, 100)
            tokens += step.tokens
            p = probabilities(watched.verified.logits, sampling)
            q = probabilities(watched.drafted.logits, sampling)
            share, expected = 1.0, 0.0
            for place in range(step.drafted):
                token = watched.drafted.tokens[place]
                share = min(1.0, share * p[place, token] / q[place, token])
                expected += share
            excess.append(len(step.tokens) - 1 - expected)
    return excess


@pytest.mark.parametrize(
    "filters",
    [
        pytest.param({}, id="all", marks=pytest.mark.slow),
        pytest.param({"top_k": 40, "top_p": 0.9}, id="filtered"),
    ],
)
def test_probabilistic_acceptance_is_that_of_p_and_q(folder: Path, filters: Any) -> None:
    excess = excess_acceptance(folder, 7, filters)
    assert abs(np.sum(excess)) < 4.5 * np.std(excess) * len(excess) ** 0.5
    assert np.std(excess) > 0


def test_drafting_stops_where_it_does_not_pay(folder: Path, plain: list[Any]) -> None:
    flat_costs(folder, 20.0)
    with LLM(folder, speculative=SpeculativeConfig(width="cost")) as llm:
        tokens = prompts(llm.engine.config.model.vocab_size)
        outputs = llm.generate(tokens[:1], replace(PARAMS[1], max_tokens=60))
        expected = plain[1][0][0].token_ids
        assert outputs[0].outputs[0].token_ids[: len(expected)] == expected
        assert llm.speculation.rounds <= 6
        assert llm.speculation.plain_steps > 32


def test_costs_and_acceptance_of_the_draft_step(folder: Path, tmp_path: Path) -> None:
    arguments = ["engine", str(folder), "--costs", "--runs", "2", "--contexts", "20"]
    result = CliRunner().invoke(bench.make_app(), arguments)
    assert result.exit_code == 0, result.output
    with Engine.open(folder) as engine:
        table = CostTable.read(folder, engine.config)
    assert table is not None
    assert table.draft_s is not None
    assert table.draft_s[0] > 0
    prompts_file, out = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts_file.write_text("t5 t6 t7\nt8")
    arguments = ["engine", str(folder), "--acceptance", "--prompts", str(prompts_file)]
    arguments += ["--max-tokens", "20", "--temperature", "3", "--accept", "probabilistic"]
    arguments += ["--json", str(out)]
    result = CliRunner().invoke(bench.make_app(), arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "has no tokenizer.json" in result.stderr
    words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(89)}, "t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    result = CliRunner().invoke(bench.make_app(), arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert (report["method"], report["accept"]) == ("dspark", "probabilistic")
    assert report["all"]["accepted"] > 0
    assert [row["prompt"] for row in report["prompts"]] == ["t5 t6 t7", "t8"]
    params = SamplingParams(temperature=3.0, seed=0, max_tokens=20)
    with LLM(folder, speculative=SpeculativeConfig(accept="probabilistic")) as llm:
        llm.generate([[5, 6, 7], [8]], params)
        assert report["all"] == bench_speculation.figures(llm.speculation)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (
            {"has_confidence": False},
            ": step draft has output confidences, config.json says otherwise",
        ),
        ({"block_size": 6}, " has other steps than config.json says"),
    ],
)
def test_a_drafter_that_is_not_as_the_configuration_says_is_refused(
    folder: Path, tmp_path: Path, edit: dict[str, Any], problem: str
) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "engine"))
    config = json.loads((copied / "config.json").read_text())
    config["draft"] |= edit
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineFormatError) as caught:
        Engine.open(copied)
    assert str(caught.value) == (
        f"engine {copied} is damaged: rank0.engine{problem} (damaged); copy it again or rebuild it "
        f"with: {config['rebuild_command']}"
    )
    assert Engine.check(copied) == [f"rank0.engine{problem} (damaged)"]


@pytest.mark.parametrize(
    "accept", [pytest.param("coupled", marks=pytest.mark.slow), "probabilistic"]
)
@pytest.mark.parametrize(
    "head",
    ["rnn", *(pytest.param(head, marks=pytest.mark.slow) for head in HEADS if head != "rnn")],
)
def test_every_head_passes_the_self_test_and_runs_to_the_end(
    make_speculating_engine: Any, head: str, accept: Any
) -> None:
    params = SamplingParams(temperature=HOT, seed=1, ignore_eos=True)
    prompt = [5, 6, 8, 9]
    folder = make_speculating_engine(head)
    with LLM(folder, speculative=SpeculativeConfig("none")) as llm:
        plain = llm.generate([prompt], params)[0].outputs
    with LLM(folder, speculative=SpeculativeConfig(accept=accept)) as llm:
        output = llm.generate([prompt], params)[0]
        assert len(output.outputs[0].token_ids) == 132  # to the last position
        assert (output.outputs == plain) == (accept == "coupled")
        assert output.speculation.accepted > 0
