"""Rounds that the host steps on a GPU: both rules, widths by measured costs, steps that run ahead.

Those that the GPU runs by itself, with an engine's drafter, stand in `test_rounds_on_gpu.py`.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from both_targets import make_prompt, open_both

from inkrt import LLM, SamplingParams, SpeculativeConfig
from inkrt.commands.bench_speculation import measure_costs
from inkrt.runtime.engine import Engine
from inkrt.runtime.spec import config as config_module
from inkrt.runtime.spec.drafter import Proposal

pytestmark = pytest.mark.gpu

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=3, max_tokens=150, ignore_eos=True),
]


class Oracle:
    """Proposes 0 to 7 tokens of a text and then wrong ones, wherever that text has been left."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text, self.random = list(text), random.Random(5)

    def draft(
        self, _: Any, tokens: Sequence[int], _sampling: Any, most: int, **_rule: Any
    ) -> Proposal:
        place, right = len(tokens), min(self.random.randrange(8), most)
        wrong = [token ^ 1 for token in self.text[place + right : place + most]]
        return Proposal([*self.text[place : place + right], *wrong])


@pytest.fixture(scope="module")
def folder(gpu: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with open_both(tmp_path_factory.mktemp("nvfp4"), "nvfp4", 64) as opened:
        return opened["sm_90a"].folder


def test_costs_are_measured(folder: Path) -> None:
    with Engine.open(folder) as engine:
        table = measure_costs(engine, [64], 20)
        assert engine.states.num_free_slots == engine.config.state.num_slots
    assert all(0 < seconds < 0.1 for seconds in (*table.decode_s, *table.verify_s[0]))
    table.write(folder)


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("width", ["fixed", "cost"])
def test_rounds_of_both_rules(
    folder: Path, width: Any, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    if width == "cost":
        test_costs_are_measured(folder)
    prompt = make_prompt(70)
    with LLM(folder, speculative=SpeculativeConfig("none")) as llm:
        plain = llm.generate([prompt], params)[0].outputs
    oracle = Oracle([*prompt, *plain[0].token_ids])
    monkeypatch.setattr(config_module, "NgramDrafter", lambda: oracle)
    chosen = SpeculativeConfig("ngram", width=width)
    with LLM(folder, speculative=chosen) as llm:
        assert llm.generate([prompt], params)[0].outputs == plain
        assert width == "cost" or llm.speculation.accepted > 30
        assert llm.speculation.on_device == 0  # whoever drafts here is not the engine
    chosen = replace(chosen, accept="probabilistic")
    with LLM(folder, speculative=chosen) as llm:
        outputs = []
        for _ in range(2 if width == "fixed" else 1):  # by cost, widths depend on the measurement
            oracle.random.seed(5)
            outputs.append(llm.generate([prompt], params)[0].outputs)
        assert outputs[0] == outputs[-1]
        assert len(outputs[0][0].token_ids) == 150
        assert params.temperature > 0 or outputs[0] == plain
