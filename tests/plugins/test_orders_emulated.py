"""Kernels whose blocks or warps hand each other data, in random orders of threads and of copies.

Bulk copies land late, and their places hold NaN until then, see cuda_on_cpu.h.
"""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from emulator import COMPILER, Emulator  # noqa: E402
from moe_checks import MOE, arguments_of, cases, error, rows_of, run_on, tactics_of  # noqa: E402

from inkrt.plugins.moe import variants  # noqa: E402

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["T1_like_nano", "T8_like_nano", "T2_nvfp4_kernel"])
def test_bits_of_experts_do_not_depend_on_the_order(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "MULTIPROCESSORS", 3)
    arguments = arguments_of(cases()[name])
    first, *_ = found = tactics_of(arguments)
    expected = run_on(Emulator(folder), first, arguments)
    for tactic in found:
        for seed in (1, 2, 3):
            got = run_on(Emulator(folder, seed=seed), tactic, arguments, times=3)
            assert torch.equal(got, expected), (tactic.name, seed)


@pytest.mark.slow
def test_narrow_experts_have_the_bits_of_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In random orders. A block's row tiles are several, with activations of other warps."""
    monkeypatch.setattr(variants, "MULTIPROCESSORS", 3)
    arguments = rows_of(arguments_of(cases()["T8_like_nano"]), 0, 2)
    narrow, *others = tactics_of(arguments)
    assert narrow.name == "moe_narrow_words_rows"
    expected = run_on(Emulator(folder), others[-1], arguments)
    assert error(expected, MOE.op(**arguments)) < 8e-3
    for seed in (1, 2):
        got = run_on(Emulator(folder, seed=seed), narrow, arguments, times=2)
        assert torch.equal(got, expected), seed


def test_warps_that_ask_for_nearly_32_stages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 are used, and as many requests as there are places in the ring come behind them."""
    monkeypatch.setattr(variants, "MULTIPROCESSORS", 1)
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / float(shape[-1]) ** 0.5

    experts, width, hidden = 4, 1216, 144
    arguments = arguments_of(cases()["T1_like_nano"]) | {
        "x": torch.randn(1, width, generator=generator).bfloat16(),
        "router_weight": normal(experts, width),
        "router_bias": normal(experts),
        "gate_up": normal(experts, 2 * hidden, width).bfloat16(),
        "down": normal(experts, width, hidden).bfloat16(),
        "top_k": 1,
    }
    tactic = next(tactic for tactic in tactics_of(arguments) if tactic.name == "moe_beside")
    got = run_on(Emulator(folder), tactic, arguments)
    assert error(got, MOE.op(**arguments)) < 8e-3
