"""The w4a16 kernels on the CPU, thread by thread, against the runner's float64 oracle."""

import dataclasses
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from emulator import COMPILER, Emulator  # noqa: E402
from w4a16_cases import HEAD_CASES, linear_cases, qkv_cases  # noqa: E402
from w4a16_checks import Checks  # noqa: E402

from inkrt.plugins.w4a16.shapes import Dims  # noqa: E402

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU")

TINY = Dims(
    hidden=256, heads=2, kv_heads=1, experts=16, top_k=6, width=256, shared_width=256,
    dense_width=512, vocab=300,
)  # fmt: skip
# Other shares of K for a warp, experts without a router row, more shared jobs, an odd vocabulary.
MIDDLE = Dims(
    hidden=512, heads=2, kv_heads=1, experts=64, top_k=3, width=256, shared_width=512,
    dense_width=768, vocab=601,
)  # fmt: skip
# Two vectors a warp, as the model.
WIDE = dataclasses.replace(TINY, hidden=1280, experts=24, width=512, shared_width=512)
# Three tiles a block of gate_up, of which one is staged.
WIDE_BF16 = dataclasses.replace(WIDE, bf16=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def checks(folder: Path, dims: Dims, *, reverse: bool = False) -> tuple[Checks, list[str]]:
    failed: list[str] = []

    def report(name: str, ok: bool, detail: str) -> None:
        if not ok:
            failed.append(f"{name}: {detail}")

    return Checks(Emulator(folder, reverse=reverse), dims, report, widths=(1, 3, 8)), failed


def test_linear_and_embed(folder: Path) -> None:
    check, failed = checks(folder, TINY)
    check.linear(**linear_cases(TINY)[1])
    check.embed()
    assert failed == []


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dims", [TINY, MIDDLE, WIDE, WIDE_BF16])
def test_experts(folder: Path, dims: Dims, reverse: bool) -> None:
    check, failed = checks(folder, dims, reverse=reverse)
    check.moe(has_delta=not reverse, ties=reverse)
    assert failed == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(qkv_cases(TINY))))
def test_qkv(folder: Path, number: int) -> None:
    check, failed = checks(folder, TINY, reverse=number % 2 == 1)
    check.qkv(**qkv_cases(TINY)[number])
    assert failed == []


@pytest.mark.slow
@pytest.mark.parametrize("case", HEAD_CASES)
def test_head(folder: Path, case: dict[str, bool]) -> None:
    check, failed = checks(folder, MIDDLE)
    check.lm_head(**case)
    assert failed == []


@pytest.mark.slow
def test_dense(folder: Path) -> None:
    check, failed = checks(folder, MIDDLE)
    check.dense(has_delta=True)
    assert failed == []


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
def test_tiles_that_warps_share(folder: Path, reverse: bool) -> None:
    """Of sizes with eight steps of K: those of the model in NVFP4, smaller ones in bf16."""
    check, failed = checks(folder, dataclasses.replace(MIDDLE, bf16=True), reverse=reverse)
    check.moe(has_delta=True, ties=False)
    assert failed == []


@pytest.mark.slow
def test_bf16_weights(folder: Path) -> None:
    check, failed = checks(folder, dataclasses.replace(TINY, bf16=True))
    check.qkv(**qkv_cases(TINY)[-1])
    check.moe(has_delta=True, ties=False)
    check.lm_head(**HEAD_CASES[0])
    assert failed == []
