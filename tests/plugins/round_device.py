"""Rounds of `plugins/round/round.cu` on the CPU: what the graph of a round does on a GPU."""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from emulator import Emulator
from numpy.typing import NDArray
from round_checks import STEPS, Proposed, RoundMemory

from inkrt.plugins.tactic import KernelLaunch

SOURCE = Path(__file__).parents[2] / "plugins/round/round.cu"
ENTRIES = ("begin_round", "choose_width", "commit_round")
NOTHING = 77  # a value of the switch that is no case


class EmulatedRounds(RoundMemory):
    """A rank on the CPU.

    Attributes:
        handles: values of the conditional nodes in the last round.

    Args:
        emulator: compiles and runs the kernels.
        has_ring: whether it is rank 0.
    """

    def __init__(self, emulator: Emulator, *, has_ring: bool = True) -> None:
        super().__init__(lambda size: np.zeros(size, np.uint8), has_ring=has_ring)
        self._reverse = int(emulator.reverse)
        kernels = [KernelLaunch(SOURCE, entry, (), (1, 1, 1), (32, 1, 1), ()) for entry in ENTRIES]
        with ThreadPoolExecutor() as pool:  # compilers work side by side
            libraries = pool.map(emulator.library, kernels)
            self._libraries = dict(zip(ENTRIES, libraries, strict=True))
        self.handles = np.zeros(2, np.uint32)

    def run_round(
        self,
        draft: Callable[[], Proposed],
        step: Callable[[list[int]], Sequence[int]],
        verdict: tuple[int, int] | None,
        error: int,
    ) -> None:
        """See `RoundMemory.round`. Results of the steps come at the kernels' wait."""
        self.handles[:] = 0, NOTHING
        self.run(
            "begin_round", [self.state, self.num_tokens, self.position, self._ring(), self.error,
                            self.handles[:1], self.handles[1:]], ()
        )  # fmt: skip
        if self.handles[0]:
            assert self.num_tokens[0] == 1
            assert self.handles[1] == NOTHING, "it is chosen later"
            tokens, confidences = draft()
            drafts = np.asarray(tokens, np.int32)
            sure = None if confidences is None else np.asarray(confidences, np.float32)
            late = [(memory, memory.copy()) for memory in (drafts, sure) if memory is not None]
            self.run(
                "choose_width", [self.state, drafts, sure, len(drafts), self.tokens,
                                 self.num_tokens, self.handles[1:]], late
            )  # fmt: skip
        if self.handles[1] != NOTHING:
            read = self.read = self.tokens[: self.num_tokens[0]].tolist()
            assert STEPS[self.handles[1]] == min(width for width in STEPS if width >= len(read))
            drawn = np.asarray(step(read), np.int32)
            late = [(drawn, drawn.copy()), (self.error, np.asarray([error], np.int32))]
            if verdict is not None:
                fields = zip(("accepted", "token"), verdict, strict=True)
                late += [
                    (self.state[name], np.asarray([value], np.int32)) for name, value in fields
                ]
            self.run(
                "commit_round", [self.state, drawn, self.tokens, self.position, self._ring(),
                                 self.error], late
            )  # fmt: skip

    def run(
        self, entry: str, values: Sequence[Any], late: Sequence[tuple[NDArray[Any], NDArray[Any]]]
    ) -> None:
        """Run a kernel; `late` is memory, and what it holds from the kernel's wait on."""
        library = self._libraries[entry]
        cells: list[Any] = []
        for value in values:
            if isinstance(value, int):
                cells.append(ctypes.c_int(value))
            else:
                cells.append(ctypes.c_void_p(None if value is None else value.ctypes.data))
        for memory, content in late:
            memory.view(np.uint8)[:] = 0xFF
            library.emu_publish(
                ctypes.c_void_p(memory.ctypes.data), ctypes.c_void_p(content.ctypes.data),
                ctypes.c_size_t(content.nbytes),
            )  # fmt: skip
        pointers = (ctypes.c_void_p * len(cells))(
            *[ctypes.cast(ctypes.byref(cell), ctypes.c_void_p) for cell in cells]
        )
        library.emu_run(1, 1, 1, 32, 1, ctypes.c_size_t(0), self._reverse, 0, pointers)

    def _ring(self) -> NDArray[Any] | None:
        return self.ring if self.has_ring else None
