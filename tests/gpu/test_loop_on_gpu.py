"""A small Inkling-2-Mini on the GPU: launches of all visits, widths of steps, drafts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from both_targets import check_decode_loop, check_rows_alike, make_prompt
from loop_config import loop_config

from inkrt import LLM, SamplingParams, SpeculativeConfig
from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.commands.launch_parity import compare_launches
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor.cuda import CudaExecutor

pytestmark = pytest.mark.gpu

# Products rounded otherwise, on the CPU: 5e-3 of a launch in front of the first experts, 2e-2 to
# 7e-2 of half of all launches (H200), 0.14 of the farthest. A wrong scale, sign or row is off by
# about 1.
NEAR, TYPICAL, FARTHEST = 2e-2, 0.12, 0.4


@pytest.fixture(scope="module")
def engines(gpu: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    folder = tmp_path_factory.mktemp("loop")
    (folder / "config.json").write_text(json.dumps(loop_config(with_drafter=False)))
    for target in ("cpu", "sm_90a"):
        options = BuildOptions(
            target=target, weights="dummy", prefill_chunk=64, max_batch_size=2,
            keep_intermediates=True,
        )  # fmt: skip
        build_engine(folder, folder / target, options)
    with Engine.open(folder / "cpu") as cpu, Engine.open(folder / "sm_90a") as gpu_engine:
        yield {"cpu": cpu, "sm_90a": gpu_engine}


@pytest.mark.parametrize("before", [0, 1, 13, 63, 64, 130, 600])
@pytest.mark.parametrize("width", [1, 3, 8, 50])
def test_every_launch_is_near_the_cpu(engines: dict[str, Engine], before: int, width: int) -> None:
    """Of all visits: messages, gates, three inputs of attention, the mix where a pass ends."""
    tokens = make_prompt(before + width)
    distances = compare_launches(
        engines["cpu"], engines["sm_90a"], tokens[before:], before=tokens[:before]
    )
    assert {"gated_input", "residual_mix"} <= {d.op for d in distances}
    first_moe = next(d.launch for d in distances if d.op == "moe")
    assert all(d.relative_error <= NEAR for d in distances if d.launch <= first_moe), distances
    assert np.median([d.relative_error for d in distances]) <= TYPICAL, distances
    worst = max(
        (d for d in distances if d.op != "lm_head_sample"), key=lambda one: one.relative_error
    )
    assert worst.relative_error <= FARTHEST, worst


def test_rows_do_not_depend_on_the_width(engines: dict[str, Engine]) -> None:
    check_rows_alike(engines["sm_90a"], make_prompt(400))


def test_decode_feeds_itself_like_steps(engines: dict[str, Engine]) -> None:
    check_decode_loop(engines["sm_90a"], make_prompt(70))


@pytest.fixture(scope="module")
def drafting(gpu: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop")
    (folder / "config.json").write_text(json.dumps(loop_config(with_drafter=True)))
    options = BuildOptions(target="sm_90a", weights="dummy", prefill_chunk=64, max_batch_size=3)
    build_engine(folder, folder / "engine", options)
    return folder / "engine"


def test_drafts_change_nothing(drafting: Path) -> None:
    """Rounds of the device, of the host, and plain steps give the same tokens."""
    prompts = [make_prompt(length, 31 + length) for length in (1, 9, 64, 65, 300, 500)]
    params = [
        SamplingParams(temperature=float(number % 2), seed=number, max_tokens=60, ignore_eos=True)
        for number in range(len(prompts))
    ]
    with LLM(drafting, speculative=SpeculativeConfig("none")) as llm:
        plain = [output.outputs for output in llm.generate(prompts, params)]
    for on_device in (True, False):
        with LLM(drafting, speculative=SpeculativeConfig("dspark", width="fixed")) as llm:
            executor = llm.engine.executor
            assert isinstance(executor, CudaExecutor)
            assert executor.rounds is not None, "the engine has no rounds"
            if not on_device:
                executor.rounds = None
            assert [output.outputs for output in llm.generate(prompts, params)] == plain
            assert llm.speculation.drafted > 0
