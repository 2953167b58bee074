"""Products with quantized weights on the CPU, thread by thread: near float64, rows of one width.

The oracle multiplies the values that codes and scales stand for.
"""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from emulator import COMPILER, Emulator  # noqa: E402
from tactic_run import arguments_of, check_case, run, tactics_of  # noqa: E402

from inkrt.plugins.registry import Arguments, Case, Plugin, plugins  # noqa: E402
from inkrt.plugins.w4a16 import quant_tactics  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU"),
]

# Sizes that take long thread by thread, or many kernels.
LARGE = ("many rows", "long rows", "more tiles", "model width", "three inputs", "prefill")
CASES = [
    pytest.param(
        plugin,
        case,
        id=f"{plugin.name}/{case.name}",
        marks=[pytest.mark.slow] if case.name.startswith(LARGE) else [],
    )
    for plugin in map(
        plugins().__getitem__, ("linear_nvfp4", "linear_mxfp8", "linear_group_quantized")
    )
    for case in plugin.cases()
]
GROUP = plugins()["linear_group_quantized"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize(("plugin", "case"), CASES)
def test_tactics_are_near_the_oracle(folder: Path, plugin: Plugin, case: Case) -> None:
    is_odd = len(case.name) % 2 == 1
    assert check_case(Emulator(folder, reverse=is_odd), plugin, case)


def named(name: str) -> Case:
    (found,) = (case for case in GROUP.cases() if case.name == name)
    return found


def first_rows(arguments: Arguments, count: int) -> Arguments:
    return {**arguments, "xs": [x[:count] for x in arguments["xs"]]}


@pytest.mark.parametrize("form", [pytest.param("MXFP8", marks=pytest.mark.slow), "NVFP4"])
@pytest.mark.parametrize(
    "name", ["verify", pytest.param("quantized alone", marks=pytest.mark.slow)]
)
def test_rows_and_tactics_agree_in_all_bits(
    folder: Path, name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of several tiles, one of them more than others; rings shorter than the list."""
    monkeypatch.setattr(quant_tactics, "MULTIPROCESSORS", 3)
    arguments = arguments_of(GROUP, named(f"{name}, {form}"))
    slot = dict(tactics_of(GROUP, arguments)[0].kernels[0].defines)
    monkeypatch.setattr(quant_tactics, "RING_BYTES", (2 * 4 * 2112, 1))
    emulator = Emulator(folder, reverse=form == "NVFP4")
    tactics = tactics_of(GROUP, arguments)
    assert len(tactics) >= 2, slot
    wide = run(emulator, GROUP, tactics[0], arguments).outputs
    for tactic in tactics[1:]:
        for got, expected in zip(
            run(emulator, GROUP, tactic, arguments).outputs, wide, strict=True
        ):
            assert torch.equal(got, expected), tactic.name
    for count in range(1, len(arguments["xs"][0])):
        rows = first_rows(arguments, count)
        for got, expected in zip(
            run(emulator, GROUP, tactics_of(GROUP, rows)[-1], rows).outputs, wide, strict=True
        ):
            assert torch.equal(got, expected[:count]), count


@pytest.mark.parametrize("form", ["MXFP8", "NVFP4"])
def test_a_group_has_the_bits_of_its_members(folder: Path, form: str) -> None:
    """Whatever order its matrices stand in, and whoever shares the launch."""
    arguments = arguments_of(GROUP, named(f"decode, {form}"))
    emulator = Emulator(folder)
    together = run(emulator, GROUP, tactics_of(GROUP, arguments)[0], arguments).outputs
    single = plugins()[f"linear_{form.lower()}"]
    for number, codes in enumerate(arguments["codes"]):
        scales = arguments["scales"][number]
        one: Arguments = {"x": arguments["xs"][0], "codes": codes, "partial": True}
        if form == "NVFP4":
            one |= {"scales": scales, "global_scale": arguments["global_scales"][number]}
        else:
            one |= {"exponents": scales}
        alone = run(emulator, single, tactics_of(single, one)[0], one).outputs[0]
        assert torch.equal(together[2 + number], alone.bfloat16())
