"""Kernel of a window in narrow steps on the CPU, thread by thread, against float64 and itself."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cubin import resources
from test_relative_attention_emulated import PAGED, assert_near, attend

from attention_problem import make_problem  # isort: skip  # the module above makes it known
from emulator import COMPILER, Emulator  # isort: skip
from inkrt.builder.compile import compile_cubin
from inkrt.plugins.attention_sm90.bank import Relative
from inkrt.plugins.attention_sm90.tactics import Call
from inkrt.plugins.attention_sm90.window import fits_window_kernel, window_tactics
from inkrt.plugins.tactic import Tactic

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU")

# One kv head, as a rank of eight has; a ring as short as may be, so that it is soon written over.
FULL_SIZE = replace(PAGED, window=1024, ring_rows=1088)
SHORT = replace(PAGED, window=100, ring_rows=128, relative=Relative(16, 100))
NEAR = replace(SHORT, relative=Relative(16, 37))  # seen keys behind the extent
FAR = replace(SHORT, relative=Relative(16, 300))  # distances of the extent that none sees
TABLE = replace(SHORT, ring_rows=0)
ODD = replace(SHORT, num_kv_heads=2, heads_per_kv=3)
MOST = replace(SHORT, heads_per_kv=8)
MANY = replace(SHORT, num_kv_heads=8, heads_per_kv=3)  # as Inkling-2-Mini on one GPU
MIDDLE = replace(PAGED, window=513, ring_rows=576)  # two tiles, most of the second without keys


def steps(call: Call) -> Iterator[tuple[Tactic, int, int, int]]:
    """Tactics with the first token, width and valid rows of a step: of all widths, all tokens."""
    for width in range(1, 9):
        for tactic in window_tactics(replace(call, num_tokens=width)):
            for offset in {0, 8 - width, 3} if width == 1 else {0, 8 - width}:
                yield tactic, offset, width, width
    yield window_tactics(call)[0], 0, 8, 3


def assert_same_bits(folder: Path, call: Call, start: int, widths: tuple[int, ...]) -> None:
    problem = make_problem(call, start, 8, "cpu")
    backend = Emulator(folder, reverse=start % 2 == 1)
    whole = attend(backend, problem, window_tactics(call)[0], 0, 8, 8)
    assert_near(problem, whole, 0, 8)
    for tactic, offset, width, count in steps(call):
        if width in widths:
            out = attend(backend, problem, tactic, offset, width, count)[:count]
            expected = whole[offset : offset + count]
            assert torch.equal(out.view(torch.int16), expected.view(torch.int16)), tactic.name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "widths"),
    [
        (0, (1, 8)),
        (57, (1, 8)),  # over a page's end
        (1016, (1, 8)),  # the last key of the window comes
        (1020, (1, 3, 8)),  # and goes
        (1083, tuple(range(1, 9))),  # through the ring's end
        (262_136, (1, 8)),  # the last ones of 262,144 positions
    ],
)
def test_bits_of_a_full_window(folder: Path, start: int, widths: tuple[int, ...]) -> None:
    assert_same_bits(folder, FULL_SIZE, start, widths)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "start"),
    [
        (NEAR, 0),
        (NEAR, 125),
        (FAR, 93),
        (TABLE, 0),
        (TABLE, 125),
        (ODD, 93),
        (ODD, 187),
        (MOST, 58),
        (MANY, 93),
    ],
)
def test_bits_of_a_short_window(folder: Path, call: Call, start: int) -> None:
    assert_same_bits(folder, call, start, (1, 5, 8))


@pytest.mark.slow
def test_bits_of_a_window_between_two_numbers_of_tiles(folder: Path) -> None:
    assert_same_bits(folder, MIDDLE, 571, (1, 3, 8))


def test_two_tokens_through_memory_have_the_bits_of_one_in_a_cluster(folder: Path) -> None:
    call = replace(SHORT, heads_per_kv=3)
    problem = make_problem(call, 127, 2, "cpu")  # the second token is at the ring's begin
    (_, through_memory) = window_tactics(replace(call, num_tokens=2))
    (in_cluster, _) = window_tactics(replace(call, num_tokens=1))
    backend = Emulator(folder)
    both = attend(backend, problem, through_memory, 0, 2, 2)
    assert_near(problem, both, 0, 2)
    for offset in (0, 1):
        out = attend(backend, problem, in_cluster, offset, 1, 1)
        assert torch.equal(out[0].view(torch.int16), both[offset].view(torch.int16))


def test_calls_of_the_kernel() -> None:
    assert fits_window_kernel(FULL_SIZE)
    assert fits_window_kernel(replace(FULL_SIZE, num_kv_heads=8))
    for other in (
        PAGED,  # no window
        replace(FULL_SIZE, num_kv_heads=9),
        replace(FULL_SIZE, window=1025, ring_rows=1088),
        replace(FULL_SIZE, num_tokens=9),
        replace(FULL_SIZE, head_dim=64),
        replace(FULL_SIZE, heads_per_kv=9),
    ):
        assert not fits_window_kernel(other)


def test_blocks_that_exchange_through_memory_fit_on_the_gpu() -> None:
    for num_kv_heads in (1, 2, 3, 8):
        call = replace(FULL_SIZE, num_kv_heads=num_kv_heads)
        tactics = window_tactics(call)
        assert [t.name for t in tactics][1:] == ["window_in_memory"] * (num_kv_heads <= 2)
        for tactic in tactics:
            (kernel,) = tactic.kernels
            blocks = kernel.grid[0] * kernel.grid[1] * kernel.grid[2]
            assert blocks == 64 * num_kv_heads
            assert kernel.cluster > 1 or blocks <= 132
            assert kernel.grid[0] % kernel.cluster == 0


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("call", [replace(FULL_SIZE, num_kv_heads=2, num_tokens=1), TABLE])
def test_it_compiles_without_spills(call: Call, target: str) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")
    for tactic in window_tactics(call):
        (kernel,) = tactic.kernels
        used = resources(compile_cubin(kernel.source, kernel.defines, target))
        assert used["stack"] == 0
        # Beside a block of linear_group, of 384 threads with 96 registers and 198,528 bytes; the
        # system takes 1 KB a block.
        assert used["registers"] * kernel.block[0] + 384 * 96 <= 65536
        assert kernel.smem_bytes + 1024 <= 233_472 - 198_528 - 1024
