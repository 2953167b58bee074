"""The drafter on the GPU: its kernels against the operators' references, the draft step of the
trained model against the CPU's, and output with drafts against output without.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from both_targets import relative_error
from nano_engines import nano_prompts, open_nano

from inkrt import LLM, SamplingParams, SpeculativeConfig
from inkrt.commands.bench_speculation import measure_costs
from inkrt.commands.launch_parity import compare_launches
from inkrt.plugins.caseutil import int32
from inkrt.plugins.draft_sample.op import draw_draft
from inkrt.plugins.sample.op import sampling_arguments
from inkrt.runtime.executor import Sampling

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "perf/kernels"))

from draft_checks import check_attention, check_head  # noqa: E402

pytestmark = pytest.mark.gpu

# Of a launch and of logits, in the median: bf16 rows added in other orders, and context keys that
# the model's own steps have made so (a wrong scale, row or sign is off by about 1).
NEAR_LAUNCH, NEAR = 8e-2, 5e-2
REQUESTS = [
    Sampling(),
    Sampling(temperature=1.0, seed=2**62 + 5),
    Sampling(temperature=1.2, top_k=50, top_p=0.95, min_p=0.01, seed=4),
]


@pytest.mark.parametrize("check", [check_attention, check_head])
def test_every_tactic_of_every_case(gpu, tmp_path, check):
    from w4a16_gpu import Gpu

    reports = []
    check(Gpu(tmp_path), lambda *report: reports.append(report))
    assert len(reports) > 10
    assert [report for report in reports if not report[1]] == []


@pytest.fixture(scope="module")
def engines(gpu, tmp_path_factory):
    with open_nano(tmp_path_factory.mktemp("draft"), max_seq_len=1024) as opened:
        yield opened


@pytest.fixture(scope="module")
def prompts():
    return nano_prompts(900)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 300])
def test_every_launch_of_the_draft_step_is_near_the_cpu(engines, prompts, length):
    text = max(prompts, key=len)
    before, anchor = text[:length], text[length]
    distances = compare_launches(
        engines["cpu"], engines["sm_90a"], [anchor], before=before, drafts=True
    )
    assert len(distances) > 50
    # Behind a token that rounding has decided, tokens, logits and confidences are others.
    block = [d for d in distances if d.op != "draft_head"]
    worst = max(block, key=lambda distance: distance.relative_error)
    assert worst.relative_error <= NEAR_LAUNCH, worst


def check_drafts(sessions, anchor, sampling, coupled):
    """Errors of logits up to the first token that differs, and how many tokens are equal."""
    ours, reference = (
        sessions[target].draft(anchor, sampling, coupled=coupled, wants_logits=True)
        for target in ("sm_90a", "cpu")
    )
    request = sampling_arguments(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
        min_p=sampling.min_p, seed=sampling.seed,
    )  # fmt: skip
    position = int32(sessions["cpu"].length)
    drawn = [
        draw_draft(
            torch.from_numpy(row), int32(int(coupled)), **request, position=position, place=place
        )
        for place, row in enumerate(ours.logits)
    ]
    assert ours.tokens.tolist() == drawn
    errors, same = [], 0
    for row in range(len(drawn)):
        errors.append(relative_error(ours.logits[row], reference.logits[row]))
        assert abs(ours.confidences[row] - reference.confidences[row]) < 0.1
        if ours.tokens[row] != reference.tokens[row]:
            break  # from here on the rows have other tokens before them
        same += 1
    return errors, same


def test_drafts_are_those_of_the_cpu(engines, prompts):
    """Those of the kernels' own logits, always; those of the CPU's, but where rounding decides."""
    errors, same = [], 0
    for prompt in prompts:
        *before, anchor = prompt[:300]
        with engines["cpu"].session() as cpu, engines["sm_90a"].session() as gpu:
            for session in (cpu, gpu) if before else ():
                session.prefill(before, Sampling(), wants_logits=False)
            for sampling in REQUESTS:
                for coupled in (True, False):
                    found = check_drafts({"cpu": cpu, "sm_90a": gpu}, anchor, sampling, coupled)
                    errors += found[0]
                    same += found[1]
    assert np.median(errors) <= NEAR, np.quantile(errors, [0.5, 0.9, 1])
    assert same >= 0.9 * len(errors), f"{same} of {len(errors)}"


def test_output_with_drafts_is_that_without(engines, prompts):
    folder = engines["sm_90a"].folder
    params = [
        SamplingParams(temperature=float(number % 2), seed=number, max_tokens=60, ignore_eos=True)
        for number in range(len(prompts))
    ]
    with LLM(folder, speculative=SpeculativeConfig("none")) as llm:
        plain = [output.outputs for output in llm.generate(prompts, params)]
    for width in ("fixed", "confidence"):
        with LLM(folder, speculative=SpeculativeConfig("dspark", width=width)) as llm:
            assert [output.outputs for output in llm.generate(prompts, params)] == plain
            stats = llm.speculation
        # Trained, not random: drafts are right more often than not where text is predictable.
        assert stats.accepted > stats.rounds / 2


def test_costs_are_measured(engines):
    table = measure_costs(engines["sm_90a"], [64, 500], 10)
    assert table.draft_s is not None
    assert all(0 < seconds < 0.1 for seconds in (*table.draft_s, *table.decode_s))
