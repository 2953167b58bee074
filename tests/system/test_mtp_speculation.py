"""Speculation with MTP heads: lossless with random heads, and fast with heads that predict well.

Heads that predict well are made, not trained: layers of the model that add little make its next
token a function of the last one nearly, and a head that passes its token's embedding on gives the
logits of that function. A little of the hidden row goes with it: a head that does not depend on the
context is refused.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_dspark_speculation import (
    PARAMS,
    check_counts,
    excess_acceptance,
    flat_costs,
    prompts,
)

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.engines.tiny import inkling
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.errors import RequestError
from inkrt.runtime.llm import LLM
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.spec.config import SpeculativeConfig

pytestmark = pytest.mark.slow

DEPTHS = 3
OPTIONS = BuildOptions(max_seq_len=136, max_batch_size=3, max_verify_tokens=DEPTHS + 1)


def write(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inkling, "NUM_LAYERS", 3)
        write_checkpoint(folder, model="inkling", seed=5, dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with random heads."""
    base = tmp_path_factory.mktemp("mtp")
    write(base / "checkpoint")
    build_engine(base / "checkpoint", base / "engine", OPTIONS)
    return base / "engine"


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Any]:
    with LLM(folder, speculative=SpeculativeConfig("none")) as llm:
        tokens = prompts(llm.engine.config.model.vocab_size)
        return [[output.outputs for output in llm.generate(tokens, params)] for params in PARAMS]


@pytest.mark.parametrize(
    ("method", "width"),
    [pytest.param("auto", "fixed", marks=pytest.mark.slow), ("mtp", "cost")],
)
def test_coupled_output_is_that_of_plain_decoding(
    folder: Path, plain: list[Any], method: Any, width: Any
) -> None:
    flat_costs(folder, 0.1)
    with LLM(folder, speculative=SpeculativeConfig(method, width=width)) as llm:
        assert llm.method == "mtp"
        tokens = prompts(llm.engine.config.model.vocab_size)
        for params, expected in zip(PARAMS, plain, strict=True):
            # Three sessions of very different lengths take turns, in slots that were used before.
            outputs = llm.generate(tokens, params)
            assert [output.outputs for output in outputs] == expected
        check_counts(llm.speculation)
        assert llm.speculation.accepted > 10
        assert llm.speculation.rounds > 50


def test_probabilistic_output_depends_on_the_seed_alone(folder: Path, plain: list[Any]) -> None:
    chosen = SpeculativeConfig("mtp", accept="probabilistic", width="fixed")
    with LLM(folder, speculative=chosen) as llm:
        tokens = prompts(llm.engine.config.model.vocab_size)
        assert [output.outputs for output in llm.generate(tokens, PARAMS[0])] == plain[0]
        together = [output.outputs for output in llm.generate(tokens, PARAMS[1])]
        alone = [llm.generate([prompt], PARAMS[1])[0].outputs for prompt in reversed(tokens)]
        assert together == alone[::-1]
        assert together != plain[1]
        check_counts(llm.speculation)
        assert llm.speculation.accepted > 40


@pytest.mark.parametrize("filters", [{}, {"top_k": 40, "top_p": 0.9}], ids=["all", "filtered"])
def test_probabilistic_acceptance_is_that_of_p_and_q(folder: Path, filters: Any) -> None:
    excess = excess_acceptance(folder, DEPTHS, filters)
    assert abs(np.sum(excess)) < 4.5 * np.std(excess) * len(excess) ** 0.5
    assert np.std(excess) > 0


def make_predictable(folder: Path) -> None:
    """Change a checkpoint so that its heads predict its model well."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    for name, value in tensors.items():
        is_head = name.startswith("model.mtp.")
        if name.endswith(("wo_ud.weight", "w2_md.weight", "w2_weight")):
            value.mul_(0.0 if is_head else 0.04)
        elif is_head and name.endswith("input_proj.weight"):
            own = torch.eye(len(value))
            value.copy_(torch.cat([0.05 * own, own], dim=1))
        elif is_head and name.endswith("embed_norm.weight"):
            value.copy_(tensors["model.llm.norm.weight"])
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def predictable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("predictable")
    write(base / "checkpoint")
    make_predictable(base / "checkpoint")
    build_engine(base / "checkpoint", base / "engine", OPTIONS)
    return base / "engine"


@pytest.mark.parametrize("accept", ["coupled", "probabilistic"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_good_heads_are_accepted_at_every_depth(
    predictable: Path, temperature: float, accept: Any
) -> None:
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=60, ignore_eos=True)
    with LLM(predictable, speculative=SpeculativeConfig("none")) as llm:
        tokens = prompts(llm.engine.config.model.vocab_size)
        expected = [output.outputs for output in llm.generate(tokens, params)]
    with LLM(predictable, speculative=SpeculativeConfig(accept=accept)) as llm:
        outputs = llm.generate(tokens, params)
        if temperature == 0 or accept == "coupled":
            assert [output.outputs for output in outputs] == expected
        stats = llm.speculation
    check_counts(stats)
    assert stats.emitted / stats.rounds > 2.5
    rates = [a / d for a, d in zip(stats.accepted_at, stats.drafted_at, strict=True)]
    assert len(rates) == DEPTHS
    assert min(rates) > 0.5


def test_what_an_engine_with_heads_refuses(folder: Path) -> None:
    for chosen, message in (
        (SpeculativeConfig("dspark"), "the drafter of this engine is mtp, not dspark"),
        (SpeculativeConfig("mtp", num_draft_tokens=4), "the drafter of this engine gives 3"),
        (SpeculativeConfig(width="confidence"), "drafts of mtp come without confidences"),
    ):
        with pytest.raises(RequestError, match=message):
            LLM(folder, speculative=chosen)


def test_fewer_drafts_and_the_end_of_the_context(folder: Path) -> None:
    params = replace(PARAMS[1], max_tokens=None)
    prompt = [5, 6, 8, 9]
    with LLM(folder, speculative=SpeculativeConfig("none")) as llm:
        expected = llm.generate([prompt], params)[0].outputs
    with LLM(folder, speculative=SpeculativeConfig("mtp", 2, width="fixed")) as llm:
        output = llm.generate([prompt], params)[0]
        assert len(output.outputs[0].token_ids) == 132
        assert output.outputs == expected
