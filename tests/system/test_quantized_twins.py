"""Engines of quantized checkpoints and of dequantized twins give the same logits, bit for bit.

The twin has the values in plain tensors. Global scales are powers of two, so that there are such
values in bfloat16; `--experts bf16` needs no such thing, as it keeps global scales apart. In
bfloat16 the matrix library may add plain weights in another order than decoded ones, so a twin is
compared in float32, and `--experts bf16`, which runs the same products, in both.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.engines.tiny import inkling, tokenizer
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling

LENGTH, PREFILLED = 60, 40  # beyond both windows
MODELS = {
    "inkling-nvfp4": ({}, {"layout": "dequantized"}),
    "inkling2-quantized": ({}, {"layout": "dequantized"}),
    "inkling2-quantized-attention": ({}, {"layout": "dequantized"}),
    "inkling2-mxfp8": ({}, {"layout": "dequantized"}),
    "flint": ({"format": "gguf"}, {}),
}


def write(folder: Path, model: str, *, is_twin: bool = False) -> Path:
    write_checkpoint(folder, model=model, seed=3, **MODELS[model][is_twin])  # type: ignore[arg-type]
    return folder


def logits(folder: Path, engine: Path, **options: Any) -> NDArray[np.float32]:
    """Of the last token of a prompt and of decode steps behind it."""
    build_engine(
        folder, engine, BuildOptions(max_seq_len=64, max_verify_tokens=1, spec="none", **options)
    )
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(tokenizer.VOCAB_SIZE, (LENGTH,), generator=generator).tolist()
    with Engine.open(engine) as opened, opened.session() as session:
        rows = [session.prefill(tokens[:PREFILLED], Sampling()).logits[-1]]
        rows += [session.step([token], Sampling()).logits[0] for token in tokens[PREFILLED:]]
    return np.stack(rows)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_equal_bit_for_bit(model: str, dtype: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "quantized", model)
    wanted = logits(folder, tmp_path / "engine", dtype=dtype)
    assert wanted.std() > 0.5
    decoded = logits(folder, tmp_path / "decoded", dtype=dtype, experts="bf16")
    np.testing.assert_array_equal(decoded, wanted)
    if dtype == "float32":
        twin = write(tmp_path / "twin", model, is_twin=True)
        got = logits(twin, tmp_path / "of_twin", dtype=dtype)
        np.testing.assert_array_equal(got, wanted)


def test_a_small_inkling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with four layers, on two ranks that share the width of every expert."""
    monkeypatch.setattr(inkling, "NUM_LAYERS", 4)
    options = {"dtype": "float32", "tp_size": 2, "moe_split": "width"}
    folder = write(tmp_path / "quantized", "inkling-nvfp4")
    wanted = logits(folder, tmp_path / "engine", **options)
    twin = write(tmp_path / "twin", "inkling-nvfp4", is_twin=True)
    np.testing.assert_array_equal(logits(twin, tmp_path / "of_twin", **options), wanted)
