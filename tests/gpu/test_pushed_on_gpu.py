"""Products that send their sums themselves: whole steps have the bits of the others.

On one GPU of a rank slice, whose rows are no model's but the same either way; on two of the model.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "perf"))

from slice_hash import graph_logits  # noqa: E402

from inkrt.builder.build import build_engine  # noqa: E402
from inkrt.builder.options import BuildOptions  # noqa: E402
from inkrt.commands.bench_step import step_input_of  # noqa: E402
from inkrt.runtime.engine import Engine  # noqa: E402
from inkrt.runtime.executor import Sampling  # noqa: E402
from inkrt.runtime.executor.cuda import CudaExecutor  # noqa: E402

CHECKPOINT = ROOT / "engines/nano/checkpoint"
ROUNDS = 20


@pytest.fixture(scope="module")
def engines(gpu: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("engines")
    for sums in ("mix", "pushed"):
        options = BuildOptions(target=f"{gpu}a", tp_size=2, max_seq_len=512, spec="none", sums=sums)
        build_engine(CHECKPOINT, folder / sums, options)
    return {sums: folder / sums for sums in ("mix", "pushed")}


def slice_logits(folder: Path) -> list[NDArray[np.uint8]]:
    """Of steps of all widths in turn, again and again."""
    found = []
    with Engine.open(folder, rank_slice="1/2") as engine:
        executor = engine.executor
        assert isinstance(executor, CudaExecutor)
        executor.fill_state(0x3C)
        steps = [step for step in engine.config.steps if step.num_tokens <= 8]
        assert [step.num_tokens for step in steps] == list(range(1, 9))
        for number in range(ROUNDS):
            for step in steps:
                context = 100 + 17 * number
                step_input = step_input_of(engine.config, step, context)
                found.append(graph_logits(executor, executor.plan(step.name), step_input))
    return found


@pytest.mark.gpu
def test_a_slice_has_the_bits_of_launches_one_by_one(engines: dict[str, Path]) -> None:
    with Engine.open(engines["pushed"], rank_slice="1/2") as engine:
        assert isinstance(engine.executor, CudaExecutor)
        for step in ("decode", "verify8"):
            launches = engine.executor.plan(step).launches
            assert {"linear_conv_mix", "moe_conv_mix"} <= {launch.op for launch in launches}
    expected, got = (slice_logits(engines[sums]) for sums in ("mix", "pushed"))
    assert len(expected) == 8 * ROUNDS
    for wanted, ours in zip(expected, got, strict=True):
        assert np.array_equal(wanted, ours)
    assert len({data.tobytes() for data in expected}) > len(expected) / 2


@pytest.mark.multigpu
def test_two_gpus_give_the_same_tokens(engines: dict[str, Path]) -> None:
    found = []
    for folder in engines.values():
        with Engine.open(folder) as engine, engine.session() as session:
            prompt = list(range(20, 90))
            logits = [session.prefill(prompt, Sampling()).logits.copy()]
            for start in range(8):  # steps of all widths
                tokens = list(range(start, 2 * start + 1))
                logits.append(session.step(tokens, Sampling()).logits.copy())
            found.append(logits)
    for wanted, ours in zip(*found, strict=True):
        assert np.array_equal(wanted, ours)
