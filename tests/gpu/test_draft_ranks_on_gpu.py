"""The drafter of several ranks: its head on one GPU or two, the trained nano's on two GPUs, and a
rank slice of that on one.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from both_targets import relative_error
from nano_engines import CHECKPOINT, nano_prompts
from numpy.typing import NDArray
from test_ranks_on_gpu import Job, devices  # noqa: F401 (a fixture)
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "perf/kernels"))

from draft_checks import NEAR, calls, reference, shares  # noqa: E402
from rank_gpu import RankGpus  # noqa: E402

from inkrt import LLM, SamplingParams, SpeculativeConfig  # noqa: E402
from inkrt.builder.build import build_engine  # noqa: E402
from inkrt.builder.options import BuildOptions  # noqa: E402
from inkrt.commands import bench  # noqa: E402
from inkrt.runtime.engine import Engine  # noqa: E402
from inkrt.runtime.executor import Sampling  # noqa: E402
from inkrt.runtime.executor.cuda import CudaExecutor  # noqa: E402
from inkrt.runtime.executor.cuda_rank import CudaRank  # noqa: E402
from inkrt.runtime.executor.round_state import RING_RECORDS  # noqa: E402

# Those with confidences, so that every output has a size.
CASES = [
    "wide, rnn, greedy",
    "wide, rnn, own noise",
    "wide, rnn, all filters",
    "wide, gated, all filters, coupled",
    "wide, trimmed",
    "wide, trimmed, own base, top-k",
]
REQUESTS = [
    Sampling(),
    Sampling(temperature=1.0, seed=2**62 + 5),
    Sampling(temperature=1.2, top_k=50, top_p=0.95, min_p=0.01, seed=4),
]
# As in test_ranks_on_gpu: bf16 rows, whose sums ranks make in parts.
NEAR_LOGITS = 5e-2


@pytest.mark.parametrize("case", CASES)
def test_the_head_is_that_of_the_reference(devices: tuple[int, int], case: str) -> None:  # noqa: F811
    (call,) = (call for call in calls("draft_head") if call.case.name == case)
    gpus = RankGpus(devices, 16384)
    expected = reference(call)
    is_drafted = torch.isfinite(expected[1])
    bits: set[bytes] = set()
    for wants_logits in (1, 0, 1):
        given = shares(call.arguments, 2)
        for arguments in given:
            arguments["wants_logits"] = torch.tensor([wants_logits], dtype=torch.int32)
        job = Job(gpus, "draft_head", given)
        for _ in range(20):
            job.launch()
            gpus.synchronize()
            assert [gpus.error(rank) for rank in range(2)] == [0, 0]
            for rank in range(2):
                tokens, logits, confidences = job.outputs(rank)
                assert tokens.tolist() == expected[0].tolist()
                bits.add(confidences.numpy().tobytes())
                if wants_logits:
                    assert torch.equal(torch.isfinite(logits), is_drafted)
                    error = relative_error(
                        logits[is_drafted].numpy(), expected[1][is_drafted].numpy()
                    )
                    assert error <= NEAR
    assert len(bits) == 1


def build(folder: Path, target: str, tp_size: int) -> Path:
    options = BuildOptions(target=target, tp_size=tp_size, max_seq_len=1024, prefill_chunk=64)
    build_engine(CHECKPOINT, folder / f"{target}-{tp_size}", options)
    return folder / f"{target}-{tp_size}"


@pytest.fixture(scope="module")
def two(gpu: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained nano with its drafter for two GPUs."""
    return build(tmp_path_factory.mktemp("nano"), gpu, 2)


@pytest.fixture
def pair() -> None:
    from cuda.bindings import driver

    _, count = driver.cuDeviceGetCount()
    if count < 2:
        pytest.skip(f"needs two GPUs, there is {count}")


@pytest.mark.multigpu
def test_drafts_are_those_of_the_cpu(pair: None, two: Path, tmp_path: Path) -> None:
    """But where rounding decides; they are the same on both ranks, with logits and without."""
    errors, same, total = [], 0, 0
    with Engine.open(build(tmp_path, "cpu", 1)) as cpu, Engine.open(two) as gpu:
        executor = gpu.executor
        assert isinstance(executor, CudaExecutor)
        plan = executor.plan("draft")
        for prompt in nano_prompts(300):
            *before, anchor = prompt
            with cpu.session() as reference_session, gpu.session() as session:
                for one in (reference_session, session) if before else ():
                    one.prefill(before, Sampling(), wants_logits=False)
                for sampling in REQUESTS:
                    for coupled in (True, False):
                        want = reference_session.draft(
                            anchor, sampling, coupled=coupled, wants_logits=True
                        )
                        got = session.draft(anchor, sampling, coupled=coupled, wants_logits=True)
                        ranks = [
                            executor.read("draft", plan.outputs["tokens"], rank)
                            for rank in range(2)
                        ]
                        assert np.array_equal(*ranks)
                        bare = session.draft(anchor, sampling, coupled=coupled, wants_logits=False)
                        assert bare.tokens.tolist() == got.tokens.tolist()
                        for row in range(len(got.tokens)):
                            errors.append(relative_error(got.logits[row], want.logits[row]))
                            total += 1
                            if got.tokens[row] != want.tokens[row]:
                                break  # from here on the rows have other tokens before them
                            same += 1
    assert np.median(errors) <= NEAR_LOGITS, np.quantile(errors, [0.5, 0.9, 1])
    assert same >= 0.9 * total, f"{same} of {total}"


@pytest.mark.multigpu
def test_output_with_drafts_is_that_without(pair: None, two: Path) -> None:
    prompts = nano_prompts(500)
    params = [
        SamplingParams(temperature=float(number % 2), seed=number, max_tokens=60, ignore_eos=True)
        for number in range(len(prompts))
    ]
    with LLM(two, speculative=SpeculativeConfig("none")) as llm:
        plain = [output.outputs for output in llm.generate(prompts, params)]
    with LLM(two, speculative=SpeculativeConfig("dspark", width="fixed")) as llm:
        assert [output.outputs for output in llm.generate(prompts, params)] == plain
        stats = llm.speculation
    assert stats.accepted > stats.rounds / 2


@pytest.mark.multigpu
@pytest.mark.parametrize("accept", ["coupled", "probabilistic"])
def test_ranks_leave_the_same_records(pair: None, two: Path, accept: Any) -> None:
    """Each decides for itself, from the first round to the last, which is fewer than a ring has."""
    chosen = SpeculativeConfig("dspark", accept=accept, width="confidence")
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=RING_RECORDS, ignore_eos=True)

    def records(rank: CudaRank) -> NDArray[np.void]:
        rank.synchronize()
        assert rank.rounds is not None
        return rank.rounds.ring.copy()

    with LLM(two, speculative=chosen) as llm:
        stats = llm.generate([nano_prompts(500)[0]], params)[0].speculation
        executor = llm.engine.executor
        assert isinstance(executor, CudaExecutor)
        first, second = executor.on_ranks(records)
    num_rounds = stats.rounds + stats.plain_steps
    assert stats.on_device == num_rounds > 0
    assert first["sequence"][:num_rounds].tolist() == list(range(1, num_rounds + 1))
    assert first.tobytes() == second.tobytes()


@pytest.mark.gpu
def test_a_slice_times_its_draft_step(two: Path) -> None:
    command = ["engine", str(two), "--rank-slice", "0/2", "--steps", "draft", "--contexts", "500"]
    result = CliRunner().invoke(bench.make_app(), [*command, "--runs", "10"])
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.output.splitlines() if line.startswith("draft "))
    assert 0 < float(line.split()[2]) < 5000
