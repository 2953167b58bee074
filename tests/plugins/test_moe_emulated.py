"""The kernels of `moe` on the CPU, thread by thread, against the operator's reference."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from emulator import COMPILER, Emulator  # noqa: E402
from moe_checks import MOE, arguments_of, cases, error, rows_of, run_on, tactics_of  # noqa: E402

from inkrt.plugins.moe import variants  # noqa: E402

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU"),
    pytest.mark.slow,
]

# Thousands of columns take too long here.
CASES = {name: case for name, case in cases().items() if "wide" not in name}
# Blocks: few, so that each has several tiles and row tiles.
FEW = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("name", CASES)
def test_near_the_reference(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "MULTIPROCESSORS", FEW)
    arguments = arguments_of(CASES[name])
    expected = MOE.op(**arguments)
    emulator = Emulator(folder, reverse=len(name) % 2 == 1)
    for tactic in tactics_of(arguments):
        got = run_on(emulator, tactic, arguments, times=2)
        assert error(got, expected) < CASES[name].rtol[torch.bfloat16]


@pytest.mark.parametrize(
    "name",
    [
        "T8_nvfp4_kernel",
        "T8_mxfp8_kernel",
        "T7_nvfp4_slice",
        "T5_nvfp4_rank_of_4",
        "T8_nvfp4_two_parts",
    ],
)
def test_bits_depend_on_neither_the_width_nor_blocks(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "MULTIPROCESSORS", FEW)
    arguments = arguments_of(CASES[name])
    num_rows = len(arguments["x"])
    whole, *others = tactics_of(arguments)
    together = run_on(Emulator(folder), whole, arguments)
    for tactic in others:
        assert torch.equal(run_on(Emulator(folder), tactic, arguments), together)
    for number, (first, last) in enumerate([(0, 1), (1, 3), (num_rows - 1, num_rows)]):
        monkeypatch.setattr(variants, "MULTIPROCESSORS", (1, 4, 12)[number])
        some = rows_of(arguments, first, last)
        for tactic in tactics_of(some):
            got = run_on(Emulator(folder, reverse=True), tactic, some)
            assert torch.equal(got, together[first:last])


@pytest.mark.parametrize(
    "name", ["T2_nvfp4_kernel", "T1_like_nano", "T8_like_nano", "T8_nvfp4_two_parts"]
)
def test_a_launch_takes_nothing_from_those_before(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations and scores that are their own flags, in slots that are used again."""
    monkeypatch.setattr(variants, "MULTIPROCESSORS", FEW)
    arguments = arguments_of(CASES[name])
    inputs = [arguments["x"] * factor for factor in (1, -2, 3, 0.5, -1)]
    emulator = Emulator(folder)
    for tactic in tactics_of(arguments):
        scratch: dict[str, Any] = {}
        for x in inputs:
            some = {**arguments, "x": x}
            got = run_on(emulator, tactic, some, scratch=scratch)
            assert torch.equal(got, run_on(emulator, tactic, some))


@pytest.mark.parametrize("name", ["T1_many_experts", "T4_many_experts", "T5_nvfp4_rank_of_4"])
def test_of_equal_scores_the_lowest_ids_are_taken(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that are all alike, or one of three, within a lane, a warp and between warps."""
    monkeypatch.setattr(variants, "MULTIPROCESSORS", FEW)
    arguments = arguments_of(CASES[name])
    alike = {**arguments, "router_weight": torch.zeros_like(arguments["router_weight"])}
    ids = torch.arange(len(arguments["router_bias"]))
    for bias in (torch.zeros(len(ids)), (ids * 7 // 5 % 3).float(), (ids % 2 - ids // 9).float()):
        some = {**alike, "router_bias": bias}
        expected = MOE.op(**some)
        found = tactics_of(some)
        for tactic in (found[0], *found[-2:]):
            got = run_on(Emulator(folder), tactic, some)
            assert error(got, expected) < CASES[name].rtol[torch.bfloat16]
