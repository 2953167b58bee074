"""A checkpoint of a small Flint, in both formats: 512 greedy steps on the GPU and on the CPU."""

import numpy as np
import pytest

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling

pytestmark = pytest.mark.gpu

STEPS = 512
# Between two logits of one row: where the CPU's best is farther ahead, the GPU must choose it too.
# In units of the standard deviation of a row's logits. Sums in other orders move a bf16 model's
# logits by 3e-2 of their norm on average, by 0.15 where two experts are as good as each other.
CLEAR = 0.3
TYPICAL = 3e-2


@pytest.fixture(scope="module", params=["safetensors", "gguf"])
def engines(request, gpu, tmp_path_factory):
    if request.param == "gguf":
        pytest.importorskip("gguf", reason="writing a GGUF checkpoint needs the package gguf")
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder / "checkpoint", model="flint-wide", format=request.param)
    opened = {}
    for target in ("cpu", "sm_90a"):
        options = BuildOptions(
            target=target, max_seq_len=1024, max_verify_tokens=4, prefill_chunk=64
        )
        build_engine(folder / "checkpoint", folder / target, options)
        opened[target] = Engine.open(folder / target)
    yield opened
    for engine in opened.values():
        engine.close()


def test_tokens_equal_those_of_the_cpu(engines, record_property):
    errors, clear, others = [], 0, 0
    with engines["cpu"].session() as cpu, engines["sm_90a"].session() as gpu:
        token = 7
        for _ in range(STEPS):
            expected, got = cpu.step([token], Sampling()), gpu.step([token], Sampling())
            a = got.logits[0].astype(np.float64)
            b = expected.logits[0].astype(np.float64)
            errors.append(float(np.linalg.norm(a - b) / np.linalg.norm(b)))
            second, best = np.sort(b)[-2:]
            is_clear = best - second > CLEAR * b.std()
            is_other = int(got.tokens[0]) != int(expected.tokens[0])
            clear += is_clear
            others += is_other
            assert not (is_clear and is_other), f"step {len(errors)}: {best - second:.3f} apart"
            token = int(expected.tokens[0])
    record_property("median_error", float(np.median(errors)))
    record_property("largest_error", max(errors))
    record_property("other_tokens", others)
    assert clear > STEPS // 8
    assert np.median(errors) <= TYPICAL
