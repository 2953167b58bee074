"""The kernels of `moe` on a GPU: near the reference, with bits that do not depend on T."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "perf/kernels"))

from moe_checks import MOE, arguments_of, cases, error, rows_of, run_on, tactics_of

pytestmark = pytest.mark.gpu
CASES = cases()


@pytest.fixture(scope="module")
def device(gpu: str, tmp_path_factory: pytest.TempPathFactory):
    from w4a16_gpu import Gpu

    return Gpu(tmp_path_factory.mktemp("cubins"))


@pytest.mark.parametrize("name", CASES)
def test_near_the_reference(name: str, device) -> None:
    arguments = arguments_of(CASES[name])
    expected = MOE.op(**arguments)
    for tactic in tactics_of(arguments):
        got = run_on(device, tactic, arguments, times=3)
        assert error(got, expected) < CASES[name].rtol[torch.bfloat16]


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("T8", "T7", "T5"))])
def test_bits_do_not_depend_on_the_width(name: str, device) -> None:
    arguments = arguments_of(CASES[name])
    num_rows = len(arguments["x"])
    whole, *others = tactics_of(arguments)
    together = run_on(device, whole, arguments)
    for tactic in others:
        assert torch.equal(run_on(device, tactic, arguments), together)
    for first, last in ((0, 1), (1, 3), (0, num_rows - 1), (num_rows - 1, num_rows)):
        some = rows_of(arguments, first, last)
        for tactic in tactics_of(some):
            assert torch.equal(run_on(device, tactic, some), together[first:last])
