"""A looped Inkling-2 from checkpoint to tokens: transformers, widths of steps, ranks, drafts.

The tiny model has fifteen visits of seven layers; messages of two blocks enter eight of them.
"""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.commands.parity import ParityCheck, Reference
from inkrt.engines.interface import EXACT_PARITY
from inkrt.engines.tiny import tokenizer
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.engines.tiny.drafter import TinyDrafter
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling
from inkrt.runtime.llm import LLM
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.spec.config import SpeculativeConfig

Make = Callable[..., Path]
LENGTH = 60  # beyond both windows, and where queries are scaled
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(dtype: str, **arguments: Any) -> Path:
        folder = tmp_path_factory.mktemp("loop") / "checkpoint"
        chosen: dict[str, Any] = {"model": "inkling2-loop", "seed": 1, "dtype": dtype}
        write_checkpoint(folder, **(chosen | arguments))
        return folder

    return make


@pytest.fixture(scope="module")
def make_engine(make_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(dtype: str, max_verify_tokens: int = 1, model: str = "inkling2-loop", **more: Any):
        engine = tmp_path_factory.mktemp("loop") / "engine"
        options = BuildOptions(max_seq_len=128, max_verify_tokens=max_verify_tokens, **more)
        build_engine(make_checkpoint(dtype, model=model), engine, options)
        return engine

    return make


def prompt(length: int = LENGTH) -> list[int]:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(tokenizer.VOCAB_SIZE, (length,), generator=generator).tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=SLOW)])
def test_logits_and_visits_are_those_of_transformers(
    dtype: str, make_checkpoint: Make, make_engine: Make
) -> None:
    """Bit by bit, visit by visit; padded prefill steps in float32 within the bound."""
    reference = Reference(make_checkpoint(dtype), dtype)
    with Engine.open(make_engine(dtype, 2)) as engine:
        check = ParityCheck(engine, reference)
        for length, chunk in ((3, 2), (LENGTH, None), (5, 1)):
            report = check.run(prompt(length), chunk, num_decoded=1)
            assert report.max_relative_error <= EXACT_PARITY[dtype].relative_error
            assert report.top1_agreement == 1
            if dtype == "bfloat16" or chunk is not None:
                assert report.equal_rows == 1
                assert report.first_divergence is None
        assert len(reference.layer_outputs) == 15


@SLOW
def test_a_wrong_visit_is_found(make_checkpoint: Make, make_engine: Make) -> None:
    """Gates of layer 3 are read in visits 7 and 11, and nowhere before."""
    with Engine.open(make_engine("bfloat16", 2)) as engine:
        weight = engine.executor._ranks[0].weights["layers.7.mlp_input.gain"]  # type: ignore[attr-defined]
        kept = weight.clone()
        try:
            weight *= 1.5
            check = ParityCheck(engine, Reference(make_checkpoint("bfloat16"), "bfloat16"))
            report = check.run(prompt(5), None, num_decoded=0)
        finally:
            weight.copy_(kept)
    assert report.first_divergence == (0, 7)


@pytest.mark.slow
def test_steps_of_any_width_leave_the_same_state(make_engine: Make) -> None:
    """Verify steps with rejected drafts against a run token by token, bit by bit."""
    tokens = prompt(25)  # over the end of a convolution's ring
    with Engine.open(make_engine("bfloat16", 2)) as engine:
        with engine.session() as plain:
            logits = [plain.step([token], Sampling()).logits[0] for token in tokens]
            expected = _state(engine, plain)
        generator = random.Random(3)
        with engine.session() as session:
            while session.length < len(tokens):
                at = session.length
                is_accepted = generator.random() < 0.5 and at + 1 < len(tokens)
                draft = tokens[at + 1] if is_accepted else generator.randrange(400)
                rows = session.step([tokens[at], draft], Sampling()).logits
                count = 1 + is_accepted
                session.rollback(at + count)
                np.testing.assert_array_equal(rows[:count], logits[at : at + count])
            for name, value in _state(engine, session).items():
                assert torch.equal(value, expected[name]), name
    assert len(expected) == 15 * 6


def _state(engine: Engine, session: Any) -> dict[str, torch.Tensor]:
    """What every state buffer holds for the last positions of a session."""
    found = {}
    for spec in engine.config.state.buffers:
        rows, sequence = spec.shape[1], session._sequence
        held = engine.executor.state(spec.name)  # type: ignore[attr-defined]
        last = range(session.length - 3, session.length)
        entries = [
            sequence.slot if spec.kind == "ring" else sequence.pages[p // rows] for p in last
        ]
        found[spec.name] = torch.stack(
            [held[entry, p % rows].clone() for entry, p in zip(entries, last, strict=True)]
        )
    return found


@SLOW
@pytest.mark.parametrize(
    ("layout", "moe_split"),
    [("publisher", "width"), ("publisher", "experts"), ("transformers", "width")],
)
def test_quantized_experts_on_two_ranks(
    layout: str, moe_split: str, make_checkpoint: Make, make_engine: Make,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Experts in NVFP4, MXFP8 and plain; transformers has the values that they stand for."""
    model = "inkling2-loop-quantized"
    folder = make_checkpoint("float32", model=model, layout="transformers")
    if layout == "publisher":
        engine_folder = make_engine("float32", model=model, tp_size=2, moe_split=moe_split)
    else:
        engine_folder = tmp_path / "engine"
        options = BuildOptions(max_seq_len=128, max_verify_tokens=1, tp_size=2, moe_split=moe_split)  # type: ignore[arg-type]
        build_engine(folder, engine_folder, options)
    with Engine.open(engine_folder) as engine:
        report = ParityCheck(engine, Reference(folder, "float32")).run(prompt(), 24, num_decoded=4)
    assert report.max_relative_error <= 5e-6
    assert report.top1_agreement == 1


@SLOW
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ranks_give_the_tokens_of_one(dtype: str, make_engine: Make) -> None:
    found = []
    for tp_size in (1, 2):
        with (
            Engine.open(make_engine(dtype, tp_size=tp_size)) as engine,
            engine.session() as session,
        ):
            output, tokens, logits = session.prefill(prompt(), Sampling()), [], []
            for _ in range(20):
                tokens.append(int(output.tokens[-1]))
                logits.append(output.logits[-1])
                output = session.step(tokens[-1:], Sampling())
            found.append((tokens, np.stack(logits).astype(np.float64)))
    (one, a), (two, b) = found
    assert one == two
    bound = EXACT_PARITY[dtype].relative_error
    assert np.linalg.norm(a - b) <= bound * np.linalg.norm(a)


@SLOW
def test_output_with_drafts_is_that_without(tmp_path: Path) -> None:
    """Greedy and coupled; the drafter taps visits of two passes and the final state."""
    write_checkpoint(
        tmp_path / "checkpoint", model="inkling2-loop", seed=1, dtype="float32",
        drafter=TinyDrafter("embedded"),
    )  # fmt: skip
    lines: list[str] = []
    options = BuildOptions(max_seq_len=128, max_batch_size=2)
    build_engine(tmp_path / "checkpoint", tmp_path / "engine", options, lines.append)
    assert any("taps 1, 7, 15" in line for line in lines)
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=3.0, seed=3, max_tokens=40, ignore_eos=True),
    ]
    prompts = [prompt(33), prompt(3)]
    outputs = {}
    for method in ("none", "dspark"):
        with LLM(tmp_path / "engine", speculative=SpeculativeConfig(method)) as llm:
            outputs[method] = [
                [output.outputs for output in llm.generate(prompts, chosen)] for chosen in params
            ]
            stats = llm.speculation
    assert outputs["dspark"] == outputs["none"]
    assert stats.accepted > 5
    assert stats.rounds > 20
