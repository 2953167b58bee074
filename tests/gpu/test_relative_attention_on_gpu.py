"""Kernels of `relative_attention` on a GPU: every tactic of every case, and long contexts."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "perf/kernels"))

import relative_attention as checks
from w4a16_backend import bind
from w4a16_gpu import Gpu

from inkrt.plugins import kv_layout
from inkrt.plugins.attention_sm90.relative import relative_attention_tactics
from inkrt.plugins.registry import Arguments, Case, plugins
from inkrt.plugins.state import write_step
from inkrt.plugins.tactic import CallArgs, TensorArg

pytestmark = pytest.mark.gpu
OPERATOR = plugins()["relative_attention"]


@pytest.fixture(scope="module")
def device(gpu, tmp_path_factory):
    return Gpu(tmp_path_factory.mktemp("cubins"))


def make(case: Case) -> Arguments:
    """Arguments in bf16, the same as the operator's other tests have."""
    return case.arguments(torch.bfloat16, torch.Generator().manual_seed(0))


def tactics(arguments: Arguments):
    """All candidates for a call."""
    args: CallArgs = {
        name: TensorArg(tuple(value.shape), value.dtype)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in arguments.items()
    }
    return relative_attention_tactics("sm_90a", args)


def kernel_arguments(arguments: Arguments, packings) -> dict[str, torch.Tensor]:
    """Tensors as kernels want them: the step's rows in packed caches, weights packed."""
    found = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    for name in ("k", "v"):
        cache = found[f"{name}_cache"].clone()
        where = (found["position"], found["num_tokens"], found["slot"], arguments["page_table"])
        write_step(cache, found[name], *where)
        found[f"{name}_cache"] = kv_layout.pack(cache)
    for packing in packings:
        (name,) = packing.arguments
        found[name] = packing.pack(found[name])
    return {name: value.cuda() for name, value in found.items()}


CASES = [case for case in OPERATOR.cases() if tactics(make(case))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_tactic_is_near_the_reference(device, case):
    arguments = make(case)
    expected = OPERATOR.reference(**arguments)
    valid = int(arguments["num_tokens"])
    for tactic in tactics(arguments):
        given = kernel_arguments(arguments, tactic.packings)
        buffers = {name: device.buffer(value) for name, value in given.items()}
        out, scratch = torch.full_like(given["q"], torch.nan), {}
        for bound in bind(device, tactic, buffers, [device.buffer(out)], scratch):
            device.launch(bound.kernel, bound.values)
        torch.cuda.synchronize()
        checks.check_scratch(device, tactic, scratch)
        assert out.isfinite().all(), tactic.name
        error = checks.relative_error(out[:valid].cpu(), expected[:valid].double())
        assert error <= case.rtol[torch.bfloat16], tactic.name


def test_there_are_cases_of_every_kernel():
    names = {tactic.name.split("_")[0] for case in CASES for tactic in tactics(make(case))}
    assert names == {"wgmma", "tile", "simple"}


@pytest.mark.parametrize("tp_size", [4, 8])
@pytest.mark.parametrize("start", [99_992, 262_100])
def test_long_contexts(device, tp_size, start):
    """Against float64; bits do not depend on the width of a step."""
    call = checks.ranks(checks.FULL, tp_size)
    assert checks.check_call(device, call, (8, 1), start) == []


@pytest.mark.parametrize("start", [1020, 1532, 100_000])
def test_windows_far_out(device, start):
    assert checks.check_call(device, checks.ranks(checks.SLIDING, 4), (8, 3, 1), start) == []
