"""Rounds of `plugins/round/round.cu` on the CPU: what the graph of a round does on a GPU."""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from emulator import Emulator
from numpy.typing import NDArray

from inkrt.plugins.tactic import KernelLaunch
from inkrt.runtime.executor.round_state import (
    MAX_DRAFTS,
    RING_RECORDS,
    ROUND_RECORD,
    ROUND_STATE,
    RoundPolicy,
)
from inkrt.runtime.spec.width import ConfidenceThreshold, CostAware, RoundCosts, WidthPolicy

SOURCE = Path(__file__).parents[2] / "plugins/round/round.cu"
ENTRIES = ("begin_round", "choose_width", "commit_round")
# Widths of the row steps; a switch value that is none of their indices runs nothing.
STEPS = (1, 2, 4, 8)
NOTHING = 77
UNWRITTEN = -0x11111112  # EE bytes

Proposed = tuple[Sequence[int], Sequence[float] | None]


class RoundDevice:
    """A rank's memory and its kernels.

    Args:
        emulator: compiles and runs them.
        has_ring: whether it is rank 0.
    """

    def __init__(self, emulator: Emulator, *, has_ring: bool = True) -> None:
        self._reverse = int(emulator.reverse)
        kernels = [KernelLaunch(SOURCE, entry, (), (1, 1, 1), (32, 1, 1), ()) for entry in ENTRIES]
        with ThreadPoolExecutor() as pool:  # compilers work side by side
            libraries = pool.map(emulator.library, kernels)
            self._libraries = dict(zip(ENTRIES, libraries, strict=True))
        self.state: NDArray[Any] = np.zeros(1, ROUND_STATE)
        self.state["case_of_width"] = [
            next(i for i, step in enumerate(STEPS) if step > width)
            for width in range(MAX_DRAFTS + 1)
        ]
        self.ring: NDArray[Any] = np.full(RING_RECORDS * ROUND_RECORD.itemsize, 0xEE, np.uint8)
        self.ring = self.ring.view(ROUND_RECORD)
        self.has_ring = has_ring
        self.tokens = np.full(16, UNWRITTEN, np.int32)
        self.num_tokens, self.position, self.error = np.zeros((3, 1), np.int32)
        self.handles = np.zeros(2, np.uint32)

    def set_policy(
        self, policy: WidthPolicy, contexts: Sequence[int] = (), costs: Sequence[RoundCosts] = ()
    ) -> None:
        """Let the state say what a policy object says."""
        state = self.state[0]
        state["policy"] = RoundPolicy.FIXED
        if isinstance(policy, ConfidenceThreshold):
            state["policy"] = RoundPolicy.THRESHOLD
            state["threshold"] = policy.threshold
        if isinstance(policy, CostAware):
            state["policy"] = RoundPolicy.COST
            state["explore_every"], state["num_first"] = policy.explore_every, policy.num_first
            state["margin"] = policy.margin
            state["num_contexts"] = len(contexts)
            state["contexts"][: len(contexts)] = contexts
            for place, of_context in enumerate(costs):
                state["plain"][place] = of_context.plain
                state["rounds"][place][: len(of_context.rounds)] = of_context.rounds
            state["policy_state"] = policy_state(policy)

    def round(
        self,
        draft: Callable[[], Proposed],
        step: Callable[[list[int]], Sequence[int]],
        verdict: tuple[int, int] | None = None,
        error: int = 0,
    ) -> Any:
        """Run a round, and give its record; None on ranks that show none.

        Args:
            draft: the draft step.
            step: what a row step draws behind the tokens that it reads.
            verdict: of the ratio test.
            error: that a kernel of the row step sets.
        """
        number = int(self.state[0]["round"])
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
            read = self.tokens[: self.num_tokens[0]].tolist()
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
        assert self.state[0]["round"] == number + 1
        record = self.ring[number % RING_RECORDS]
        if not self.has_ring:
            return None
        assert record["sequence"] == number + 1
        return record

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


def policy_state(policy: CostAware) -> tuple[Any, ...]:
    """What a policy has learned, as a POLICY_STATE."""

    def padded(values: list[float]) -> list[float]:
        return values + [0.0] * (MAX_DRAFTS - len(values))

    unread = np.nan if policy._unread is None else policy._unread
    return (
        padded(policy._reached), padded(policy._accepted), unread, policy._num_rounds,
        policy._num_plain, int(policy._drafts_pay), policy._last_width,
    )  # fmt: skip
