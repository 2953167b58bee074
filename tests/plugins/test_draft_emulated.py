"""Kernels of `draft_attention` and `draft_head`, thread by thread, are as the references."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from draft_checks import calls, check_attention, check_head  # noqa: E402
from emulator import COMPILER, Emulator  # noqa: E402

from inkrt.plugins.registry import plugins  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU"),
]
CHECKS = {"draft_attention": check_attention, "draft_head": check_head}
# The others take a second or two each.
FAST = {
    "64 dims",
    "64 dims, window",
    "wide, vanilla, ties",
    "wide, trimmed, own base, top-k",
    "wide, one row",
}
CASES = [
    pytest.param(op, call.case.name, marks=[] if call.case.name in FAST else pytest.mark.slow)
    for op in CHECKS
    for call in calls(op)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("reverse", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("op", "case"), CASES)
def test_kernels_give_what_the_reference_gives(
    folder: Path, op: str, case: str, reverse: bool
) -> None:
    failed, count = [], 0

    def report(name: str, ok: bool, detail: str) -> None:
        nonlocal count
        count += 1
        if not ok:
            failed.append(f"{name}: {detail}")

    CHECKS[op](Emulator(folder, reverse=reverse), report, case)
    assert failed == []
    assert count > 0


def test_what_kernels_take() -> None:
    """Cases of odd sizes and float32 have no tactics; those of sizes for kernels all have."""
    for op, prefix in (("draft_attention", " dims"), ("draft_head", "wide, ")):
        taken = {call.case.name for call in calls(op)}
        assert taken == {case.name for case in plugins()[op].cases() if prefix in case.name}
        assert {call.case.name for call in calls(op, "sm_100a")} == taken
        assert not list(calls(op, "cpu"))
