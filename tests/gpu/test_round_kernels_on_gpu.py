"""Kernels of a round in their graph on the GPU: what the host does, double for double."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "perf/kernels"))

from round_checks import make_policy, random_rounds  # noqa: E402

from inkrt.runtime.executor.round_state import MAX_DRAFTS  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rule", ["coupled", "probabilistic", "forced"])
@pytest.mark.parametrize("policy", ["fixed", "threshold", "cost"])
def test_rounds_are_those_of_the_host(gpu, policy, rule):
    from cuda.core import Device
    from round_gpu import GpuRounds

    device = GpuRounds(Device(0))
    widths = random_rounds(device, make_policy(policy, MAX_DRAFTS), rule, 1000)
    assert min(widths) > 0, widths


@pytest.mark.parametrize("most", [1, 4, 7])
def test_costs_decide_without_confidences(gpu, most):
    from cuda.core import Device
    from round_gpu import GpuRounds

    device = GpuRounds(Device(0), has_confidences=False)
    policy = make_policy("cost", most)
    widths = random_rounds(device, policy, "coupled", 1000, has_confidences=False, most=most)
    assert min(widths) > 0, widths
