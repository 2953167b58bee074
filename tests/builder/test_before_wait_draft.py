"""As test_before_wait.py, of the drafter's kernels, with all that they were written for."""

import sys
from pathlib import Path

import pytest

from inkrt.builder.tactics import find_tactics
from inkrt.plugins.tactic import KernelLaunch, Output, Scratch

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC through cuda.bindings is not installed")
sys.path.append(str(Path(__file__).parents[2] / "perf/kernels"))

from draft_checks import call_args, calls, shares
from ptx import compile_ptx, touched_before_wait

CASES = [
    ("draft_attention", "64 dims, window"),
    ("draft_head", "wide, rnn, all filters"),
    ("draft_head", "wide, trimmed, own base, top-k"),
]


def own_params(kernel: KernelLaunch) -> dict[int, str]:
    """Outputs and scratch among a kernel's parameters; not the error word."""
    return {
        number: str(param)
        for number, param in enumerate(kernel.params)
        if isinstance(param, Output) or (isinstance(param, Scratch) and param.name != "error")
    }


@pytest.mark.parametrize(("op", "case"), CASES)
def test_nothing_of_the_own_launch_is_touched_before_the_wait(op: str, case: str) -> None:
    (call,) = (call for call in calls(op) if call.case.name == case)
    tactics = [call.tactic]
    if op == "draft_head":  # and of several ranks
        tactics += find_tactics(op, "sm_90a", call_args(shares(call.arguments, 4)[0]))
        assert "share_row" in {kernel.entry for kernel in tactics[1].kernels}
    kernels = {(k.source, k.defines): k for tactic in tactics for k in tactic.kernels}
    assert len(kernels) >= 2 * len(tactics)
    for kernel in kernels.values():
        own = own_params(kernel)
        early = touched_before_wait(compile_ptx(kernel.source, kernel.defines), kernel.entry)
        assert {own[number] for number in early & own.keys()} == set(), kernel.entry
