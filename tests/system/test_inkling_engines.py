"""Whole engines of a tiny Inkling against transformers, over lengths, chunks, ranks and layouts."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.commands import build as build_command
from inkrt.commands import run as run_command
from inkrt.commands.parity import ParityCheck, Reference, compare_logits
from inkrt.engines.catalog import find_definition
from inkrt.engines.tiny import inkling
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling

GREEDY = Sampling()
WINDOW = inkling.WINDOW
Make = Callable[..., Path]
PARITY = find_definition(inkling.config("float32")).parity


@pytest.fixture(scope="module")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(dtype: str, layout: str = "publisher") -> Path:
        folder = tmp_path_factory.mktemp("checkpoint") / dtype
        write_checkpoint(folder, model="inkling", seed=1, dtype=dtype, layout=layout)  # type: ignore[arg-type]
        return folder

    return make


@pytest.fixture(scope="module")
def make_engine(make_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(dtype: str, layout: str = "publisher", **options: Any) -> Path:
        engine = tmp_path_factory.mktemp("engine") / "engine"
        chosen = BuildOptions(**{"max_seq_len": 250, "max_verify_tokens": 3, **options})
        build_engine(make_checkpoint(dtype, layout), engine, chosen)
        return engine

    return make


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def check(
    request: pytest.FixtureRequest, make_checkpoint: Make, make_engine: Make
) -> Iterator[ParityCheck]:
    dtype = request.param
    with Engine.open(make_engine(dtype, spec="none")) as engine:
        yield ParityCheck(engine, Reference(make_checkpoint(dtype), dtype))


# Chunks 1 and 3 take decode and verify steps, the others prefill steps, full and padded.
@pytest.mark.parametrize(
    ("length", "chunk", "num_decoded"),
    [
        (1, None, 2), (2, 1, 2), (5, 3, 2), (WINDOW - 1, 4, 2), (WINDOW, None, 2),
        (WINDOW + 1, 3, 2), (3 * WINDOW + 2, None, 40), (7 * WINDOW, 64, 2), (7 * WINDOW, 10, 2),
    ],
)  # fmt: skip
def test_parity(check: ParityCheck, length: int, chunk: int | None, num_decoded: int) -> None:
    generator = torch.Generator().manual_seed(length)
    prompt = torch.randint(490, (length,), generator=generator).tolist()
    report = check.run(prompt, chunk, num_decoded)
    bound = PARITY[check.engine.config.model.dtype]
    assert report.max_relative_error <= bound.relative_error
    assert report.top1_agreement >= bound.top1_agreement


def test_prefill_and_decode_agree(make_engine: Make) -> None:
    """Rows of narrow steps are those of decoding, bit for bit; a prefill step's are near."""
    prompt = [(7 * i + i * i) % 470 for i in range(101)]
    last = {}
    with Engine.open(make_engine("float32", spec="none")) as engine:
        for chunk in (1, 2, 3, None):
            with engine.session() as session:
                last[chunk] = session.prefill(prompt, GREEDY, chunk=chunk).logits[-1]
    assert np.array_equal(last[1], last[2])
    assert np.array_equal(last[1], last[3])
    assert compare_logits(last[None], last[1]).relative_error < 2e-6


@pytest.fixture(scope="module")
def single(make_engine: Make) -> tuple[list[int], list[np.ndarray]]:
    return generate(make_engine("float32", spec="none"))


def generate(folder: Path) -> tuple[list[int], list[np.ndarray]]:
    tokens, logits = [], []
    with Engine.open(folder) as engine, engine.session() as session:
        output = session.prefill([(7 * i + i * i) % 470 for i in range(61)], GREEDY)
        for _ in range(20):
            tokens.append(int(output.tokens[-1]))
            logits.append(output.logits[-1])
            output = session.step([tokens[-1]], GREEDY)
    return tokens, logits


@pytest.mark.parametrize(
    ("layout", "tp_size", "moe_split"),
    [("transformers", 1, "experts"), ("publisher", 2, "experts"), ("transformers", 2, "width")],
)
def test_ranks_and_layouts_agree(
    single: Any, make_engine: Make, layout: str, tp_size: int, moe_split: str
) -> None:
    folder = make_engine("float32", layout, tp_size=tp_size, moe_split=moe_split, spec="none")
    tokens, logits = generate(folder)
    assert tokens == single[0]
    distances = [compare_logits(a, b) for a, b in zip(logits, single[1], strict=True)]
    assert max(distance.relative_error for distance in distances) <= 2e-6
    assert all(distance.same_bits for distance in distances) == (tp_size == 1)


@pytest.mark.slow
def test_heads_change_nothing_of_the_model(single: Any, make_engine: Make) -> None:
    tokens, logits = generate(make_engine("float32"))
    assert tokens == single[0]
    assert all(np.array_equal(a, b) for a, b in zip(logits, single[1], strict=True))


def test_commands_from_checkpoint_to_text(make_checkpoint: Make, tmp_path: Path) -> None:
    """ink-build finds the heads, ink-run drafts with them; the text is that of a run without."""
    engine = tmp_path / "engine"
    arguments = [str(make_checkpoint("float32")), "-o", str(engine), "--max-seq-len", "100"]
    arguments += ["--max-verify-tokens", "3"]
    built = CliRunner().invoke(build_command.make_app(), arguments)
    assert built.exit_code == 0, built.output
    assert "drafter: mtp, 2 of 3 depths, window in depths 0" in built.output
    assert "unknown tensor" not in built.output
    texts = []
    for spec in ("auto", "mtp", "none"):
        arguments = [str(engine), "-p", "Why is the sea blue?", "--max-tokens", "12", "--stats"]
        arguments += ["--seed", "1"]
        result = CliRunner().invoke(run_command.make_app(), [*arguments, "--spec", spec])
        assert result.exit_code == 0, result.output
        texts.append(result.stdout)
        assert ("verified drafts" in result.stderr) == (spec != "none")
    assert texts[0] == texts[1] == texts[2]
