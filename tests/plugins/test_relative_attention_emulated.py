"""Kernels of `relative_attention` on the CPU, thread by thread, against float64 and each other."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from attention_problem import Problem, make_problem, step_arguments  # noqa: E402
from emulator import COMPILER, Emulator  # noqa: E402
from w4a16_backend import empty, run  # noqa: E402

from inkrt.plugins.attention_sm90.bank import Relative  # noqa: E402
from inkrt.plugins.attention_sm90.tactics import (  # noqa: E402
    Call,
    Split,
    fast_tactic,
    simple_tactic,
    splits,
    tile_tactic,
)
from inkrt.plugins.tactic import Tactic  # noqa: E402

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU")

PAGED = Call(8, 1, 6, 128, 0, 0, 128**-0.5, Relative(16, 1024))
SHORT = replace(PAGED, relative=Relative(16, 100))  # keys behind the extent
RING = replace(PAGED, window=100, ring_rows=192, relative=Relative(16, 100))
NANO = Call(8, 2, 2, 32, 0, 0, 32**-0.5, Relative(8, 128))
MAX_ERROR = 6e-3  # bf16 probabilities, and two roundings of the result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def attend(
    backend: Emulator, problem: Problem, tactic: Tactic, offset: int, width: int, count: int
) -> torch.Tensor:
    """Output [width, H, d] of a step whose row 0 is token `offset`; run twice, for its scratch."""
    arguments = {
        name: backend.upload(value.contiguous().view(torch.uint8).numpy())
        for name, value in step_arguments(problem, offset, width, count).items()
    }
    shape = (width, problem.call.num_heads, problem.call.head_dim)
    results, scratch = [], {}
    for _ in range(2):
        out = empty(backend, 2 * int(np.prod(shape)))
        scratch = run(backend, tactic, arguments, [out], scratch)
        assert not backend.download(scratch["error"]).any() if "error" in scratch else True
        bits = torch.from_numpy(backend.download(out)).view(torch.int16)
        results.append(bits.view(torch.bfloat16).view(shape))
    assert torch.equal(*(result[:count].view(torch.int16) for result in results))
    for name in ("partials", "partial_sums"):
        if name in scratch and tactic.kernels[0].params:
            left = backend.download(scratch[name])
            assert (left == 0xFF).all(), name
    return results[0]


def assert_near(problem: Problem, out: torch.Tensor, offset: int, count: int) -> None:
    expected = problem.reference[offset : offset + count]
    for h in range(problem.call.num_heads):
        error = (out[:count, h].double() - expected[:, h]).norm()
        assert error <= MAX_ERROR * expected[:, h].norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "start", "split"),
    [
        (PAGED, 0, Split(1, 3, 1, 8, 4)),
        (SHORT, 58, Split(1, 3, 1, 8, 4)),  # over a page's end
        (SHORT, 186, Split(1, 3, 1, 8, 4)),  # the tokens straddle a change of split length
        (SHORT, 250, Split(2, 2, 1, 8, 4)),  # clusters that exchange
        (SHORT, 700, Split(1, 1, 1, 8, 4)),  # stages are used again
        (RING, 3, Split(8, 1, 1, 8, 2)),
        (RING, 94, Split(8, 1, 1, 3, 2)),  # the window fills up; groups of tokens
        (RING, 187, Split(8, 1, 1, 4, 2)),  # through the ring's end
        (RING, 262_136, Split(8, 1, 1, 8, 2)),  # the last ones of 262,144 positions
        (replace(PAGED, num_kv_heads=2, heads_per_kv=3), 70, Split(1, 2, 1, 8, 4)),
    ],
)
def test_tokens_of_a_step_have_the_bits_of_their_own(
    folder: Path, call: Call, start: int, split: Split
) -> None:
    problem = make_problem(call, start, 8, "cpu")
    backend = Emulator(folder, reverse=start % 2 == 1)
    whole = attend(backend, problem, fast_tactic(call, split), 0, 8, 8)
    assert_near(problem, whole, 0, 8)
    for offset, width, count in ((0, 1, 1), (7, 1, 1), (4, 3, 3), (2, 8, 5)):
        narrow = replace(split, group=min(width, split.group))
        tactic = fast_tactic(replace(call, num_tokens=width), narrow)
        out = attend(backend, problem, tactic, offset, width, count)
        rows = slice(offset, offset + count)
        assert torch.equal(out[:count].view(torch.int16), whole[rows].view(torch.int16))


def test_tokens_of_a_window_are_shared_by_clusters(folder: Path) -> None:
    """All of 1024 positions, groups of three tokens, a ring that has been written over."""
    call = replace(PAGED, window=1024, ring_rows=1088, relative=Relative(16, 1024))
    found = {split.group: split for split in splits(call)}
    assert list(found) == [1, 2, 3, 4, 8]
    problem = make_problem(call, 1180, 8, "cpu")
    out = attend(Emulator(folder), problem, fast_tactic(call, found[3]), 0, 8, 8)
    assert_near(problem, out, 0, 8)


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize(
    ("call", "start", "count"),
    [
        (replace(PAGED, num_tokens=70), 0, 70),
        (replace(SHORT, num_tokens=40), 190, 37),
        (replace(RING, num_tokens=70), 150, 70),  # through the ring's end
        (replace(SHORT, num_tokens=9, num_kv_heads=2, heads_per_kv=3), 130, 9),
    ],
)
def test_tiles(folder: Path, call: Call, start: int, count: int, is_gated: bool) -> None:
    assert call.relative is not None
    call = replace(call, relative=replace(call.relative, is_gated=is_gated))
    problem = make_problem(call, start, count, "cpu")
    out = attend(Emulator(folder), problem, tile_tactic(call), 0, call.num_tokens, count)
    assert_near(problem, out, 0, count)
    assert (out[count:] == 0).all()


@pytest.mark.parametrize(
    ("call", "start", "count"),
    [
        (NANO, 0, 8),
        (NANO, 125, 5),
        (replace(NANO, window=64, ring_rows=128), 123, 8),
        (replace(NANO, window=64, ring_rows=128), 262_136, 8),
        (replace(NANO, num_tokens=20), 120, 17),
        (replace(PAGED, relative=Relative(3, 9, False, False, 4)), 0, 8),  # rows without a key
        (replace(PAGED, relative=Relative(16, 70, True, False, 66)), 70, 8),
    ],
)
def test_simple(folder: Path, call: Call, start: int, count: int) -> None:
    problem = make_problem(call, start, count, "cpu")
    out = attend(Emulator(folder), problem, simple_tactic(call), 0, call.num_tokens, count)
    assert_near(problem, out, 0, count)
    assert (out[count:] == 0).all()
