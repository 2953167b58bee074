"""Flint from checkpoint to logits: against transformers, between formats, on ranks, with rollback.

transformers rounds elsewhere than Flint's reference (flint.md section 5). In float32 nothing rounds
and the two agree to the order of additions. In bfloat16 a rounding that tips the choice between two
experts moves a whole row, so what is compared is the distance to float32: an engine must be as near
to it as transformers is in bfloat16.
"""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typer.testing import CliRunner

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.commands.parity import ParityCheck, Reference
from inkrt.commands.verify import make_app
from inkrt.engines.tiny import flint, tokenizer
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling

Make = Callable[..., Path]
WINDOW = flint.TINY.window
FORMATS = pytest.mark.parametrize(
    "format_", ["safetensors", pytest.param("gguf", marks=pytest.mark.slow)]
)


@pytest.fixture(scope="module")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(dtype: str, format_: str = "safetensors", factor: float = 1.0) -> Path:
        """A `factor` makes global scales that are no powers of two."""
        folder = tmp_path_factory.mktemp("flint") / "checkpoint"
        power_of_two = flint.power_of_two
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flint, "power_of_two", lambda std: factor * power_of_two(std))
            write_checkpoint(folder, model="flint", seed=1, dtype=dtype, format=format_)
        return folder

    return make


@pytest.fixture(scope="module")
def make_engine(make_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(dtype: str, format_: str = "safetensors", factor: float = 1.0, **options: int) -> Path:
        engine = tmp_path_factory.mktemp("flint") / "engine"
        chosen = BuildOptions(**{"max_seq_len": 256, "max_verify_tokens": 3, **options})
        build_engine(make_checkpoint(dtype, format_, factor), engine, chosen)
        return engine

    return make


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(tokenizer.VOCAB_SIZE, (length,), generator=generator).tolist()


def logits_of(folder: Path, tokens: list[int], prefilled: int) -> NDArray[np.float32]:
    """Rows from the last prefilled token on; the others are fed one by one."""
    with Engine.open(folder) as engine, engine.session() as session:
        rows = [session.prefill(tokens[:prefilled], Sampling()).logits[-1]]
        rows += [session.step([token], Sampling()).logits[0] for token in tokens[prefilled:]]
    return np.stack(rows)


def row_errors(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> NDArray[np.float64]:
    difference = np.linalg.norm(got.astype(np.float64) - wanted, axis=-1)
    errors: NDArray[np.float64] = difference / np.linalg.norm(wanted.astype(np.float64), axis=-1)
    return errors


@FORMATS
@pytest.mark.parametrize(
    ("length", "chunk"),
    [(1, None), (2, 1), (5, 3), (WINDOW, None), (WINDOW + 1, 2), (3 * WINDOW + 2, None),
     (7 * WINDOW, 64)],
)  # fmt: skip
def test_float32_is_transformers(
    make_checkpoint: Make, make_engine: Make, format_: str, length: int, chunk: int | None
) -> None:
    """Of both formats with the same values; measured: at most 1.0e-6."""
    with Engine.open(make_engine("float32", format_)) as engine:
        check = ParityCheck(engine, _reference(make_checkpoint("float32"), "float32"))
        report = check.run(prompt_of(length), chunk, num_decoded=6)
    assert report.max_relative_error <= 5e-6
    assert report.top1_agreement == 1


@cache
def _reference(folder: Path, dtype: str) -> Reference:
    return Reference(folder, dtype)


def test_any_global_scales_are_transformers_in_float32(
    make_checkpoint: Make, make_engine: Make
) -> None:
    """The scale multiplies sums in the engine, and weights in float32 in transformers."""
    factor = 1.37
    with Engine.open(make_engine("float32", "gguf", factor)) as engine:
        reference = _reference(make_checkpoint("float32", factor=factor), "float32")
        report = ParityCheck(engine, reference).run(prompt_of(40), None, num_decoded=12)
    assert report.max_relative_error <= 5e-6
    assert report.top1_agreement == 1


def test_greedy_rollout_is_that_of_transformers(make_checkpoint: Make, make_engine: Make) -> None:
    """Each goes on with its own tokens, past the window and over a page's end."""
    prompt, num_decoded = prompt_of(30), 100
    reference = _reference(make_checkpoint("float32"), "float32")
    reference.reset()
    theirs = [int(reference.feed(prompt).argmax())]
    while len(theirs) < num_decoded:
        theirs.append(int(reference.feed(theirs[-1:]).argmax()))
    with Engine.open(make_engine("float32", "gguf")) as engine, engine.session() as session:
        ours = [int(session.prefill(prompt, Sampling()).tokens[-1])]
        while len(ours) < num_decoded:
            ours.append(int(session.step(ours[-1:], Sampling()).tokens[0]))
    assert ours == theirs
    assert len(set(ours)) > 10


@pytest.mark.slow
@FORMATS
def test_bfloat16_is_as_near_to_float32_as_transformers(
    make_checkpoint: Make, make_engine: Make, format_: str
) -> None:
    """Measured over 6 x 60 rows: 0.031 (0.030 GGUF) in the mean, transformers 0.031."""
    exact, rounded = (
        _reference(make_checkpoint("bfloat16"), dtype).model for dtype in ("float32", "bfloat16")
    )
    errors: dict[str, list[NDArray[np.float64]]] = {"ours": [], "theirs": []}
    for seed in range(3):
        tokens = prompt_of(60, seed)
        with torch.inference_mode():
            wanted, theirs = (
                model(torch.tensor([tokens])).logits[0].float().numpy()
                for model in (exact, rounded)
            )
        ours = logits_of(make_engine("bfloat16", format_), tokens, prefilled=20)
        errors["ours"].append(row_errors(ours, wanted[19:]))
        errors["theirs"].append(row_errors(theirs[19:], wanted[19:]))
    ours_all, theirs_all = np.concatenate(errors["ours"]), np.concatenate(errors["theirs"])
    assert ours_all.mean() <= 1.3 * theirs_all.mean()
    assert ours_all.max() <= 0.3
    assert np.median(ours_all) <= 0.04


def test_formats_are_the_same_engine(make_engine: Make) -> None:
    """The tiny model's global scales are powers of two, so its BF16 weights are the exact products.

    In float32 the arithmetic is the same, a power of two being free, and so is every bit. In
    bfloat16 the matrix library adds BF16 weights in another order than the decoded ones; one sum in
    ten thousand rounds the other way, and where that tips the choice of an expert a row moves.
    """
    tokens = prompt_of(60)
    wide = [logits_of(make_engine("float32", x), tokens, 40) for x in ("safetensors", "gguf")]
    np.testing.assert_array_equal(*wide)
    narrow = [logits_of(make_engine("bfloat16", x), tokens, 40) for x in ("safetensors", "gguf")]
    assert row_errors(*narrow).mean() <= 0.03


@FORMATS
@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.slow), "float32"])
def test_ranks_agree_with_a_single_rank(make_engine: Make, dtype: str, format_: str) -> None:
    """On several ranks sums stay in float32 until they are added; in bfloat16 that rounds less."""
    tokens = prompt_of(50)
    one = logits_of(make_engine(dtype, format_, max_verify_tokens=1), tokens, 30)
    for split in ("experts", "width"):
        engine = make_engine(dtype, format_, max_verify_tokens=1, tp_size=2, moe_split=split)
        two = logits_of(engine, tokens, 30)
        if dtype == "float32":
            assert row_errors(two, one).max() <= 5e-6
            assert (two.argmax(-1) == one.argmax(-1)).all()
        else:
            assert row_errors(two, one).mean() <= 0.06
        assert not np.array_equal(one, two)  # it was other arithmetic


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "format_"), [("bfloat16", "gguf"), ("float32", "safetensors")])
def test_random_schedules_equal_a_plain_run(make_engine: Make, dtype: str, format_: str) -> None:
    """Drafts of any width, any of them rejected, leave no trace: rows have the plain run's bits.

    Across the end of the 48-position rings and of a page of 64.
    """
    generator = random.Random(5)
    tokens = [generator.randrange(tokenizer.VOCAB_SIZE) for _ in range(82)]
    with Engine.open(make_engine(dtype, format_, max_verify_tokens=8, max_batch_size=2)) as engine:
        with engine.session() as plain:
            expected = [plain.step([token], Sampling()).logits[0] for token in tokens]
        with engine.session() as session:
            while session.length < 72:
                position = session.length
                width = generator.randint(1, 8)
                accepted = generator.randint(1, width)
                drafts = tokens[position : position + accepted]
                drafts += [
                    generator.randrange(tokenizer.VOCAB_SIZE) for _ in range(width - accepted)
                ]
                rows = session.step(drafts, Sampling()).logits
                session.rollback(position + accepted)
                for row, wanted in zip(rows[:accepted], expected[position:], strict=False):
                    np.testing.assert_array_equal(row, wanted)


def test_end_tokens_come_from_the_generation_config(make_engine: Make) -> None:
    with Engine.open(make_engine("float32")) as engine:
        ids = tokenizer.special_ids(tokenizer.GLM)
        wanted = tuple(ids[token] for token in ("<|endoftext|>", "<|user|>", "<|observation|>"))
        assert engine.config.model.eos_token_ids == wanted


def test_ink_verify(make_checkpoint: Make, make_engine: Make, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--lengths", f"{WINDOW}", "--chunks", "3,0", "--decode", "4", "--json", str(report)]
    engine, checkpoint = make_engine("bfloat16", "gguf"), make_checkpoint("bfloat16")
    result = CliRunner().invoke(make_app(), [str(engine), str(checkpoint), *options])
    assert result.exit_code == 0, result.output
    assert "bound 0.3, top-1 at least 60%" in result.output
    assert "parity holds; 10 rows" in result.output
    assert [len(prompt["rows"]) for prompt in json.loads(report.read_text())] == [5, 5]
    refused = CliRunner().invoke(
        make_app(), [str(engine), str(make_checkpoint("bfloat16", "gguf"))]
    )
    assert refused.exit_code != 0
    assert "transformers does not read NVFP4 GGUF files" in refused.output


def test_default_lengths_are_around_the_window(make_checkpoint: Make, make_engine: Make) -> None:
    with Engine.open(make_engine("float32")) as engine:
        check = ParityCheck(engine, _reference(make_checkpoint("float32"), "float32"))
        assert check.default_lengths(64) == [1, 2, 3, 5, 20, 21, 22, 65, 147]


@pytest.mark.parametrize("is_nvfp4", [False, True], ids=["plain", "nvfp4"])
def test_dummy_weights_need_a_config_only(tmp_path: Path, is_nvfp4: bool) -> None:
    quantization = {"quant_method": "nvfp4"} if is_nvfp4 else None
    config = flint.config("bfloat16") | {"quantization_config": quantization}
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config))
    options = BuildOptions(weights="dummy", max_seq_len=64, max_verify_tokens=1)
    build_engine(tmp_path / "checkpoint", tmp_path / "engine", options)
    rows = logits_of(tmp_path / "engine", prompt_of(20), 12)
    assert np.isfinite(rows).all()
    assert 0.01 < rows.std() < 1000
