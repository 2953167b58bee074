"""Kernels that exchange data between ranks, on the CPU: ranks are processes, threads are fibers."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rank_processes import COMPILER, Emulator, Ranks, SharedMemory, run_kernel, run_ranks

from inkrt.plugins.all_gather.tactics import gather
from inkrt.plugins.all_reduce import op as all_reduce_op
from inkrt.plugins.all_reduce import tactics as all_reduce_tactics
from inkrt.plugins.tactic import KernelLaunch, Output, Peers, Pointer, TensorArg
from inkrt.runtime.executor.peers import RankSlice, describe_error

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU"),
    pytest.mark.slow,
]
WIDTH = 24
# Of float32 parts: the empty pattern and other NaN, infinity, -0, subnormal.
ODD_BITS = [0xFFFFFFFF, 0x7FFFFFFF, 0x7FFF7FFF, 0xFF800000, 0x7F800000, 0x80000000, 0x00000001]


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("kernels"))


def parts(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Random numbers, one in eight odd."""
    x = generator.standard_normal(shape).astype(np.float32)
    bits = x.view(np.uint32)
    is_odd = generator.random(shape) < 0.125
    bits[is_odd] = generator.choice(np.array(ODD_BITS, np.uint32), is_odd.sum())
    return x


def reduce_kernel(num_ranks: int, num_tokens: int, dtype: torch.dtype) -> KernelLaunch:
    args = {"x": TensorArg((num_tokens, WIDTH), torch.float32), "dtype": dtype}
    (tactic,) = all_reduce_tactics.find_tactics("sm_90a", {**args, "tp_size": num_ranks})
    return tactic.kernels[0]


@dataclass
class Job:
    """A launch on all ranks, its inputs and outputs by rank, and what must come out."""

    kernel: KernelLaunch
    x: list[NDArray[np.uint8]]
    out: list[NDArray[np.uint8]]
    expected: NDArray[np.generic]
    num_tokens: NDArray[np.int32]
    best: list[list[NDArray[np.uint8]]] = field(default_factory=list)


def make_jobs(memory: SharedMemory, num_ranks: int, count: int) -> list[Job]:
    """Sums and concatenations of changing sizes."""
    generator = np.random.default_rng(num_ranks)
    kinds: list[Callable[[], Job]] = []

    def job(kernel: KernelLaunch, shape: tuple[int, int], live: int, result: object) -> Job:
        x = [parts(generator, shape) for _ in range(num_ranks)]
        expected = result([torch.from_numpy(each[:live]) for each in x])  # type: ignore[operator]
        is_bf16 = expected.dtype == torch.bfloat16
        expected = expected.view(torch.int16 if is_bf16 else torch.int32).numpy()
        size = expected.nbytes
        best = []
        if dict(kernel.defines).get("HAS_BEST"):
            room = 4 * shape[0] * int(dict(kernel.defines)["PARTS"])
            best = [[memory.empty(room) for _ in range(2)] for _ in range(num_ranks)]
        return Job(
            kernel, [memory.put(each) for each in x],
            [memory.empty(size, 0x55) for _ in range(num_ranks)], expected,
            memory.put(np.array([live], np.int32)).view(np.int32), best,
        )  # fmt: skip

    def sums(num_tokens: int, dtype: torch.dtype, live: int | None = None) -> Callable[[], Job]:
        kernel = reduce_kernel(num_ranks, num_tokens, dtype)
        return lambda: job(
            kernel, (num_tokens, WIDTH), live or num_tokens,
            lambda x: all_reduce_op.sum_in_rank_order(x, dtype),
        )  # fmt: skip

    def rows(
        num_tokens: int, width: int, columns: int, *, best: bool = False, live: int | None = None
    ) -> Callable[[], Job]:
        kernel = gather(
            num_ranks, num_tokens, width, columns, x=Pointer("x"), out=Output(0),
            best=(Output(1), Output(2)) if best else None,
        )  # fmt: skip
        return lambda: job(
            kernel, (num_tokens, width), live or num_tokens,
            lambda x: torch.cat(x, -1)[:, :columns].contiguous(),
        )  # fmt: skip

    kinds = [
        sums(1, torch.bfloat16),
        sums(5, torch.float32),
        sums(11, torch.bfloat16, live=9),
        rows(3, 7, num_ranks * 7),
        rows(2, 8, num_ranks * 8),
        rows(2, 12, num_ranks * 12 - 5, best=True),
        rows(3, 1032, num_ranks * 1032 - 7, best=True),  # three blocks a row
        rows(4, 516, num_ranks * 516 - 6, best=True),  # every other row aligned to 8 bytes only
        rows(21, 516, num_ranks * 516 - 2, best=True, live=18),  # rows in turns
    ]
    return [kinds[number]() for number in generator.integers(len(kinds), size=count)]


def values_of(job: Job, rank: int, ranks: Ranks) -> list[NDArray[np.generic]]:
    table, error = ranks.tables[rank], ranks.errors[rank]
    best = job.best[rank] if job.best else [job.x[rank]] * 2
    gathers = job.kernel.entry == "all_gather"
    return [
        job.x[rank], job.out[rank], table, job.num_tokens, *(best if gathers else []), error,
    ]  # fmt: skip


def check(job: Job, rank: int) -> None:
    """Numbers in bits, NaN as NaN; with candidates, the largest value of every row."""
    got = job.out[rank].view(job.expected.dtype).reshape(job.expected.shape)
    infinity = 0x7F80 if got.dtype == np.int16 else 0x7F800000
    mask = 0x7FFF if got.dtype == np.int16 else 0x7FFFFFFF
    is_nan = (job.expected & mask) > infinity
    assert np.array_equal((got & mask) > infinity, is_nan)
    assert np.array_equal(got[~is_nan], job.expected[~is_nan])
    if job.best:
        parts = int(dict(job.kernel.defines)["PARTS"])
        values = job.best[rank][0].view(np.float32).reshape(-1, parts)
        columns = job.best[rank][1].view(np.int32).reshape(-1, parts)
        logits = torch.from_numpy(job.expected).view(torch.float32)
        for row in range(len(got)):
            first = int(logits[row].argmax())
            best = torch.from_numpy(values[row].copy()).argmax()
            assert columns[row][best] == first


@pytest.mark.parametrize(("num_ranks", "reverse"), [(2, False), (2, True), (4, False)])
def test_ranks_agree_with_the_references(emulator: Emulator, num_ranks: int, reverse: bool) -> None:
    memory = SharedMemory()
    jobs = make_jobs(memory, num_ranks, 40)
    ranks = Ranks(memory, num_ranks, slot_of(jobs))
    for job in jobs:
        emulator.library(job.kernel)

    def run(rank: int) -> None:
        emulator.reverse = reverse and rank > 0
        for job in jobs:
            run_kernel(emulator, job.kernel, values_of(job, rank, ranks))

    run_ranks(num_ranks, run)
    assert [int(error[0]) for error in ranks.errors] == [0] * num_ranks
    for job in jobs:
        for rank in range(num_ranks):
            check(job, rank)
            assert np.array_equal(job.out[0], job.out[rank]), "bits differ between ranks"


def slot_of(jobs: list[Job]) -> int:
    sizes = [p.num_bytes for job in jobs for p in job.kernel.params if isinstance(p, Peers)]
    return -(-max(sizes) // 256) * 256


@pytest.mark.parametrize("rank", [0, 2])
def test_a_slice_hears_itself(emulator: Emulator, rank: int) -> None:
    """As rank 0 or 2 of 4: sums are those of four equal parts."""
    memory = SharedMemory()
    generator = np.random.default_rng(5)
    ranks = Ranks(memory, 4, 1024, RankSlice(rank, 4))
    for number in range(8):
        rows = (1, 5)[number % 2]
        kernel = reduce_kernel(4, rows, torch.bfloat16 if rows == 1 else torch.float32)
        x = generator.standard_normal((rows, WIDTH)).astype(np.float32)
        dtype = torch.bfloat16 if rows == 1 else torch.float32
        out = memory.empty(x.nbytes // (4 // dtype.itemsize))
        values = [memory.put(x), out, ranks.tables[0], memory.empty(4), ranks.errors[0]]
        run_kernel(emulator, kernel, values)
        expected = all_reduce_op.sum_in_rank_order([torch.from_numpy(x)] * 4, dtype)
        assert torch.equal(torch.from_numpy(out.copy()).view(dtype).view(rows, WIDTH), expected)
    assert int(ranks.errors[0][0]) == 0


def test_an_error_of_one_rank_is_known_to_all_before_what_it_sends(emulator: Emulator) -> None:
    """Rank 1 has failed in an earlier kernel: nobody waits for long, and all say who it was."""
    memory = SharedMemory()
    ranks = Ranks(memory, 2, 1024)
    ranks.errors[1][0] = 2
    kernel = reduce_kernel(2, 5, torch.float32)
    x = [memory.put(np.ones((5, WIDTH), np.float32)) for _ in range(2)]
    out = [memory.empty(x[0].nbytes) for _ in range(2)]
    emulator.library(kernel)

    def run(rank: int) -> None:
        values = [x[rank], out[rank], ranks.tables[rank], memory.empty(4), ranks.errors[rank]]
        run_kernel(emulator, kernel, values)

    run_ranks(2, run)
    assert [int(error[0]) for error in ranks.errors] == [0x20002, 0x20002]
    assert describe_error(0x20002).startswith("a kernel of rank 1 gave up waiting (error word")
