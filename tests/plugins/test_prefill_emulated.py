"""A prefill step of a small Flint, whole, on the CPU kernel by kernel, against the CPU engine."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from emulator import COMPILER, Emulator  # noqa: E402
from plan import PlanRunner, Recorder  # noqa: E402

from inkrt.builder import build  # noqa: E402
from inkrt.builder.checkpoint import open_checkpoint  # noqa: E402
from inkrt.builder.options import BuildOptions  # noqa: E402
from inkrt.runtime.engine import Engine  # noqa: E402
from inkrt.runtime.executor import Sampling  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU"),
]

CONFIG = {
    "model_type": "flint",
    "dtype": "bfloat16",
    "vocab_size": 260,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 5,  # dense and full twice, sliding twice, full
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "sliding_window": 21,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "num_experts": 16,
    "max_position_embeddings": 256,
}
CHUNK = 40
# Over a page's end and, at the same place, the end of the ring; the last two not full.
PIECES = (40, 40, 40, 23, 9)
OTHER_PIECES = (17, 40, 40, 40, 15)
PROMPT = [(37 * i + i * i) % 260 for i in range(sum(PIECES))]


@pytest.mark.parametrize("form", ["nvfp4", "bf16"])
def test_logits_are_those_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    config = dict(CONFIG)
    if form == "nvfp4":
        config["quantization_config"] = {"quant_method": "nvfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    build.build_engine(
        tmp_path, tmp_path / "cpu", BuildOptions(weights="dummy", prefill_chunk=CHUNK)
    )
    recorder = Recorder("sm_90a")
    monkeypatch.setattr(build, "Compiler", lambda _target: recorder)
    monkeypatch.setattr(build, "compile_cubin", lambda *_: b"")
    options = BuildOptions(
        target="sm_90a", weights="dummy", prefill_chunk=CHUNK, max_batch_size=2,
        max_verify_tokens=1,
    )  # fmt: skip
    prepared = build.prepare(open_checkpoint(tmp_path), options)
    rings = [spec.shape[1] for spec in prepared.state.buffers if spec.kind == "ring"]
    assert set(rings) == {64}
    runner = PlanRunner(Emulator(tmp_path), prepared, recorder, f"prefill{CHUNK}")
    rows = _prefill(runner, PIECES, slot=1, pages=[6, 2, 5, 3])
    errors = []
    with Engine.open(tmp_path / "cpu") as engine, engine.session() as session:
        for count, got in zip(PIECES, rows, strict=True):
            piece = PROMPT[session.length : session.length + count]
            expected = session.prefill(piece, Sampling()).logits[-1].astype(np.float64)
            errors.append(float(np.linalg.norm(got - expected) / np.linalg.norm(expected)))
    # Sums in another order, in bfloat16; a wrong scale, sign or row is off by about 1.
    assert max(errors) <= 2e-2, errors
    if form == "nvfp4":  # a row's bits do not depend on the chunks
        (*_, last) = _prefill(runner, OTHER_PIECES, slot=0, pages=[1, 7, 0, 4])
        np.testing.assert_array_equal(last, rows[-1])


def _prefill(
    runner: PlanRunner, pieces: tuple[int, ...], slot: int, pages: list[int]
) -> list[NDArray[np.float32]]:
    """Logits of the last row of each piece of the prompt."""
    position, rows = 0, []
    for count in pieces:
        step = {
            "tokens": PROMPT[position : position + count], "position": [position],
            "num_tokens": [count], "slot": [slot], "page_table": pages, "top_p": [1.0],
        }  # fmt: skip
        rows.append(runner.run(step)[0])
        position += count
    return rows
