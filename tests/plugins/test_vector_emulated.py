"""Operators on rows, whose kernels are no products: all cases, thread by thread on the CPU."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from emulator import COMPILER, Emulator  # noqa: E402
from tactic_run import arguments_of, check_case, check_rows, tactics_of  # noqa: E402

from inkrt.plugins.registry import Case, Plugin, plugins  # noqa: E402

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU")

OPERATORS = (
    "allreduce_conv_mix", "concat", "gated_input", "kv_write", "l2_clip", "qkv_post",
    "residual_add", "residual_mix", "rms_norm", "rope", "short_conv", "sigmoid_gate", "silu_mul",
    "sum_parts",
)  # fmt: skip
# They take long, or ways that others take too.
SLOW = {
    "full_width",
    "without_norms",
    "without_norms_in_whole_slices",
    "kernel_full",
    "kernel_one",
    "kernel_wide",
}
CASES = [
    pytest.param(
        plugins()[name],
        case,
        id=f"{name}/{case.name}",
        marks=[pytest.mark.slow] if case.name in SLOW else [],
    )
    for name in OPERATORS
    for case in plugins()[name].cases()
    if tactics_of(plugins()[name], arguments_of(plugins()[name], case))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize(("plugin", "case"), CASES)
def test_tactics_are_near_the_oracle(folder: Path, plugin: Plugin, case: Case) -> None:
    is_odd = len(case.name) % 2 == 1
    assert check_case(Emulator(folder, reverse=is_odd), plugin, case)


@pytest.mark.parametrize(
    ("name", "case", "number"),
    [
        ("allreduce_conv_mix", "three_slices_many_sources", 0),
        ("qkv_post", "ring_of_pages", 0),
        ("qkv_post", "over_a_page", 0),
        ("short_conv", "of fours across the ring's end", 0),
    ],
)
def test_rows_do_not_depend_on_the_width(folder: Path, name: str, case: str, number: int) -> None:
    plugin = plugins()[name]
    (found,) = (one for one in plugin.cases() if one.name == case)
    arguments = arguments_of(plugin, found)
    rows = int(arguments["num_tokens"])
    for widths in ([1] * rows, [3, rows - 3]):
        check_rows(Emulator(folder), plugin, arguments, number, widths)
