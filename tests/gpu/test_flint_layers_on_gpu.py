"""The launch of a run of layers on the GPU against the launches of single operators.

Steps of one token take the former, wider ones the latter, whose results are compared with the CPU's
in `test_flint_on_gpu`. Dummy weights.
"""

import json

import numpy as np
import pytest

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling

pytestmark = pytest.mark.gpu

CONFIG = {
    "model_type": "flint",
    "dtype": "bfloat16",
    "vocab_size": 1000,
    "num_hidden_layers": 11,
    "max_position_embeddings": 16384,
    "quantization_config": {"quant_method": "nvfp4"},
}


@pytest.fixture(scope="module", params=[256, 40])
def engine(request, gpu, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"experts{request.param}")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_experts": request.param}))
    # Rings of 576 rows, which the tests' prompts fill.
    options = BuildOptions(target="sm_90a", weights="dummy", max_batch_size=2, prefill_chunk=64)
    build_engine(folder, folder / "engine", options)
    opened = Engine.open(folder / "engine")
    yield opened
    opened.close()


def _prompt(length: int) -> list[int]:
    return [(37 * i + i * i) % 1000 for i in range(length)]


def test_only_steps_of_one_token_are_fused(engine):
    launches = [launch.op for launch in engine.executor.plan("decode").launches]
    assert launches.count("flint_layers") == 1
    assert "flint_moe" not in launches
    wide = [launch.op for launch in engine.executor.plan("verify8").launches]
    assert "flint_layers" not in wide


@pytest.mark.parametrize("start", [0, 8100, 8570])
def test_rows_equal_those_of_single_operators(engine, start):
    """Across the window, pages, the ring's wrap; pages for every block; more than fit at once."""
    tokens = _prompt(640 if start == 0 else 96)
    with engine.session() as plain, engine.session() as wide:
        before = _prompt(start)
        for position in range(0, start, 8):
            plain.step(before[position : position + 8], Sampling())
            wide.step(before[position : position + 8], Sampling())
        assert len(np.unique(plain.step([7], Sampling()).logits)) > 500
        plain.rollback(start)
        rows = [plain.step([token], Sampling()).logits[0] for token in tokens]
        position, width = 0, 2
        while position < len(tokens):
            piece = tokens[position : position + width]
            output = wide.step(piece + [999] * (len(piece) == 1), Sampling())
            for row in range(len(piece)):
                np.testing.assert_array_equal(output.logits[row], rows[position + row])
            position += len(piece)
            wide.rollback(start + position)
            width = width % 8 + 1


def test_slots_do_not_mix(engine):
    """Two sessions in turn give what each gives alone."""
    with engine.session() as alone:
        expected = [alone.step([token], Sampling()).logits[0] for token in _prompt(70)]
    with engine.session() as first, engine.session() as second:
        for token, row in zip(_prompt(70), expected, strict=True):
            np.testing.assert_array_equal(first.step([token], Sampling()).logits[0], row)
            second.step([5], Sampling())
