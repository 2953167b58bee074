"""Kernels of `relative_attention` on a GPU at long contexts: float64, and bits across widths.

Positions are those of the first of eight tokens, the last of which is at 262,143 of 262,144. Short
contexts are cases of the operator, like those of all others.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "perf/kernels"))

import relative_attention as checks
from w4a16_gpu import Gpu

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device(gpu, tmp_path_factory):
    return Gpu(tmp_path_factory.mktemp("cubins"))


@pytest.mark.parametrize("tp_size", [4, 8])
@pytest.mark.parametrize(
    "start", [0, 1, 1016, 1023, 1024, 1025, 8184, 8191, 99_992, 100_000, 262_100, 262_136]
)
def test_all_keys(device, tp_size, start):
    call = checks.ranks(checks.FULL, tp_size)
    assert checks.check_call(device, call, (8, 1), start) == []


@pytest.mark.parametrize("tp_size", [4, 8])
@pytest.mark.parametrize(
    "start", [0, 1, 1016, 1020, 1023, 1024, 1025, 1529, 1532, 8191, 100_000, 262_136]
)
def test_windows(device, start, tp_size):
    """Across the window's end, and that of the ring of 1,536 rows."""
    assert checks.check_call(device, checks.ranks(checks.SLIDING, tp_size), (8, 3, 1), start) == []


@pytest.mark.parametrize("number", range(len(checks.WIDE)))
def test_prefill(device, number):
    assert checks.check_wide(device, *checks.WIDE[number]) == []
