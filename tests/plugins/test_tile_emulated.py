"""The tiled w4a16 kernels, of steps of more than 8 tokens, on the CPU, thread by thread."""

import dataclasses
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from emulator import COMPILER, Emulator  # noqa: E402
from w4a16_tile_checks import TileChecks  # noqa: E402

from inkrt.plugins.w4a16.shapes import Dims  # noqa: E402

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU"),
    pytest.mark.slow,
]

# One step of K for most products; a router tile that is not full.
TINY = Dims(
    hidden=256, heads=2, kv_heads=1, experts=24, top_k=6, width=256, shared_width=256,
    dense_width=512, vocab=300,
)  # fmt: skip
# More steps than stages, and more stages than steps.
MIDDLE = Dims(
    hidden=1024, heads=4, kv_heads=2, experts=16, top_k=3, width=512, shared_width=512,
    dense_width=768, vocab=300,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def checks(
    folder: Path, dims: Dims, chunk: int, counts: tuple[int, ...], *, reverse: bool = False
) -> tuple[TileChecks, list[str]]:
    failed: list[str] = []

    def report(name: str, ok: bool, detail: str) -> None:
        if not ok:
            failed.append(f"{name}: {detail}")

    emulator = Emulator(folder, reverse=reverse)
    return TileChecks(emulator, dims, report, counts, chunk=chunk), failed


@pytest.mark.parametrize("bf16", [False, True])
def test_products(folder: Path, bf16: bool) -> None:
    check, failed = checks(folder, dataclasses.replace(TINY, bf16=bf16), 48, (1, 9, 37))
    check.linear(rows=256, width=256)
    check.linear(rows=72, width=512)
    assert failed == []


@pytest.mark.parametrize("has_delta", [False, True])
def test_router(folder: Path, has_delta: bool) -> None:
    check, failed = checks(folder, TINY, 40, (9, 37), reverse=has_delta)
    check.router(has_delta=has_delta)
    assert failed == []


SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("even", "skewed", "steps")]


@pytest.mark.parametrize("kind", [*SLOW_KINDS, "ties"])
def test_experts(folder: Path, kind: str) -> None:
    """With more than an item of pairs an expert where the choice is skewed."""
    check, failed = checks(folder, TINY, 80, (9, 66), reverse=kind == "ties")
    check.experts(kind)
    assert failed == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["skewed", "steps"])
def test_experts_of_many_tokens(folder: Path, kind: str) -> None:
    """Few experts take the wide tile, whose items are twice as long; one more is begun."""
    check, failed = checks(folder, dataclasses.replace(TINY, experts=8), 80, (9, 66))
    check.experts(kind)
    assert failed == []


@pytest.mark.parametrize(("ring", "position"), [(64, 0), (64, 187), (0, 60)])
def test_qkv(folder: Path, ring: int, position: int) -> None:
    """Through a ring's end and over pages."""
    check, failed = checks(folder, TINY, 48, (9, 37), reverse=position == 187)
    check.tile_qkv(ring, position)
    assert failed == []


def test_dense(folder: Path) -> None:
    check, failed = checks(folder, TINY, 48, (37,))
    check.dense(has_delta=True)
    assert failed == []


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_more_steps_and_tokens(folder: Path, bf16: bool) -> None:
    dims = dataclasses.replace(MIDDLE, bf16=bf16)
    check, failed = checks(folder, dims, 128, (9, 100), reverse=bf16)
    check.all()
    assert failed == []
