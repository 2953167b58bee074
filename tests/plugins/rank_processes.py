"""Ranks as processes that share memory, each running kernels on the CPU thread by thread."""

import mmap
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from emulator import COMPILER, Emulator  # noqa: E402, F401
from w4a16_backend import Buffer  # noqa: E402

from inkrt.plugins.tactic import KernelLaunch  # noqa: E402
from inkrt.runtime.executor.peers import (  # noqa: E402
    EMPTY_BYTE,
    Mailbox,
    RankSlice,
    inbox_size,
    looped_back,
    peer_table,
)
from inkrt.runtime.plan import TURN_BYTES  # noqa: E402

Bytes = NDArray[np.uint8]


class SharedMemory:
    """Memory that child processes share with this one, in aligned pieces with gaps behind them."""

    def __init__(self, size: int = 1 << 24) -> None:
        self._map = mmap.mmap(-1, size)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._used = 0
        self._gaps: list[Bytes] = []

    def empty(self, size: int, fill: int = 0) -> Bytes:
        """A new piece."""
        piece = self._bytes[self._used : self._used + size]
        assert len(piece) == size, "out of memory"
        end = self._used + size
        self._used = (end // 256 + 2) * 256
        self._gaps.append(self._bytes[end : self._used])
        self._gaps[-1][:] = 0xEE
        piece[:] = fill
        return piece

    def check(self) -> None:
        """Nobody has written behind a piece."""
        for number, gap in enumerate(self._gaps):
            assert (gap == 0xEE).all(), f"overrun of piece {number}"

    def put(self, data: NDArray[np.generic]) -> Bytes:
        """A copy of an array."""
        piece = self.empty(data.nbytes)
        piece[:] = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        return piece


class Ranks:
    """Inboxes, turns, error words and tables of some ranks.

    Attributes:
        tables: of the ranks that run.
        errors: int32 [1] of each of them.
        inboxes: of each of them.

    Args:
        memory: where all of it goes.
        num_ranks: of the engine.
        slot_bytes: of an inbox.
        part: the one rank that runs, if not all do.
    """

    def __init__(
        self, memory: SharedMemory, num_ranks: int, slot_bytes: int, part: RankSlice | None = None
    ) -> None:
        numbers = range(num_ranks) if part is None else [part.rank]
        size = inbox_size(slot_bytes, num_ranks)
        self.inboxes = inboxes = [memory.empty(size, EMPTY_BYTE) for _ in numbers]
        self.errors = [memory.empty(4).view(np.int32) for _ in numbers]
        boxes = [
            Mailbox(inbox.ctypes.data, error.ctypes.data)
            for inbox, error in zip(inboxes, self.errors, strict=True)
        ]
        if part is not None:
            boxes = looped_back(boxes[0], part, slot_bytes)
        self.tables = [
            memory.put(peer_table(rank, slot_bytes, memory.empty(TURN_BYTES).ctypes.data, boxes))
            for rank in numbers
        ]


def run_kernel(
    emulator: Emulator,
    kernel: KernelLaunch,
    values: Sequence[NDArray[np.generic] | int | float],
) -> None:
    """Run a kernel to its end on memory that is there already."""
    given = [Buffer(x.ctypes.data, x.nbytes, x) if isinstance(x, np.ndarray) else x for x in values]
    emulator.launch(kernel, given, [])


def run_ranks(num_ranks: int, function: Callable[[int], None]) -> None:
    """Run `function(rank)` in a process for each rank; all must end well."""
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if not child:
            code = 1
            try:
                function(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    assert codes == [0] * num_ranks, codes
