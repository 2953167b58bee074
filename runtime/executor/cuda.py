"""The CUDA executor: runs plans as CUDA graphs, without torch, every rank on a GPU of its own.

Each step is one graph a rank, whose kernels may start before their predecessors end (programmatic
edges). Positions, lengths and tokens are read from device memory, so a graph is captured once and
replayed. Ranks exchange data inside of kernels (`plugins/all_reduce/lamport.cuh`), so all that the
host does is to launch them at about the same time; all ranks draw the same tokens, and those of
the first are read. What one GPU holds and launches is `cuda_rank.CudaRank`; `cuda_rounds` has
rounds of speculation, which run by themselves.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import DeviceError, EngineMismatchError
from inkrt.runtime.engine_file import EngineConfig
from inkrt.runtime.executor import StepInput, StepOutput
from inkrt.runtime.executor.cuda_device import (
    enable_peer_access,
    open_device,
    require_driver,
    require_peers,
)
from inkrt.runtime.executor.cuda_memory import DeviceMemory
from inkrt.runtime.executor.cuda_rank import RING_SIZE, CudaRank
from inkrt.runtime.executor.cuda_rounds import CudaRounds, RankRounds
from inkrt.runtime.executor.decode_queue import DecodeQueue
from inkrt.runtime.executor.peers import Mailbox, RankSlice, looped_back
from inkrt.runtime.executor.rank_threads import RankThreads
from inkrt.runtime.executor.round_queue import DeviceRule, RoundInput, RoundQueue
from inkrt.runtime.plan import Plan

NO_TOKEN = 0xFFFFFFFF
# Longest that a decode step may take, in seconds, some thousand times what it does.
TOKEN_S = 20.0
ROUND_RULES: frozenset[DeviceRule] = frozenset(get_args(DeviceRule))
T = TypeVar("T")


class CudaExecutor:
    """An engine on as many GPUs as it has ranks; see `runtime.executor.Executor`.

    Attributes:
        ranks: what every GPU holds.
        rank_slice: the one rank that runs, alone and for times only; None if all do.
        rounds: of speculation, which the GPUs run by themselves; None without a drafter, and of a
            slice.

    Args:
        folder: of the engine.
        config: of the engine.
        devices: number of the GPU of every rank; None for 0, 1, 2 and so on. Ranks on one GPU are
            for tests: their kernels must fit it side by side.
        rank_slice: see above; it runs on the first of `devices`.

    Raises:
        EngineMismatchError: from the constructor, if GPUs, their access to each other or the driver
            do not fit, or the slice is of another number of ranks.
        CapacityError: from the constructor, if the engine does not fit into free memory.
        EngineFormatError: from the constructor, if plans or weights are damaged.
    """

    rounds: RoundQueue | None = None

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        *,
        devices: Sequence[int] | None = None,
        rank_slice: RankSlice | None = None,
    ) -> None:
        from cuda.bindings import driver

        self.rank_slice = rank_slice
        self._driver = driver
        numbers = list(devices or range(config.tp_size))
        if rank_slice is not None:
            _require_slice(rank_slice, folder, config)
            numbers = numbers[:1]
        assert rank_slice is not None or len(numbers) == config.tp_size, numbers
        require_driver(driver, folder)
        self._threads = RankThreads(len(numbers))
        opened: dict[int, CudaRank] = {}
        try:
            self._open(opened, folder, config, numbers)
            self.ranks = [opened[index] for index in range(len(numbers))]
            self._threads.run(
                lambda index: self.ranks[index].prepare(self._mailboxes()), is_patient=True
            )
        except BaseException:
            for rank in opened.values():
                rank.enter()
                rank.memory.close()
            self._threads.close()
            raise
        self._queue = DecodeQueue(self)
        if self.ranks[0].rounds is not None and rank_slice is None:
            rules = ROUND_RULES if self.ranks[0].ratio_tests else ROUND_RULES - {"probabilistic"}
            self.rounds = RoundQueue(CudaRounds(self), rules)

    def run(self, step: str, step_input: StepInput, *, wants_logits: bool = True) -> StepOutput:
        """Run one step and wait for it."""
        self._require_whole()
        self._enter()
        plan = self.plan(step)
        self._start(step_input, step, wants_logits=wants_logits)
        count = len(step_input.tokens)
        rows = count if plan.num_rows == plan.num_tokens else plan.num_rows
        num_rows = {"tokens": rows, "logits": rows if wants_logits else 0, "confidences": rows}
        outputs = self._await(lambda: self.ranks[0].receive(plan, num_rows))
        return StepOutput(outputs["tokens"], outputs["logits"], outputs.get("confidences"))

    def encode(
        self,
        step: str,
        inputs: Mapping[str, NDArray[np.generic]],  # noqa: ARG002
        num_rows: int,  # noqa: ARG002
    ) -> NDArray[np.float32]:
        """Refuse: the builder makes no engine for GPUs that has such a step."""
        raise EngineMismatchError(f"step {step}: this version runs towers on the cpu only")

    def decode(self, step_input: StepInput, num_ahead: int) -> int:
        """Run the decode step on one token, or take its result if it has run ahead."""
        self._enter()
        return self._queue.decode(step_input, num_ahead)

    def begin(self, step_input: StepInput) -> None:
        """See `decode_queue.DecodeDevice`."""
        self._require_whole()
        self._start(step_input)
        self.ranks[0].ring[:] = 0

    def extend_pages(self, first: int, pages: Sequence[int]) -> None:
        """See `decode_queue.DecodeDevice`."""
        self._threads.post(lambda index: self.ranks[index].extend_pages(first, pages))

    def queue_step(self) -> None:
        """See `decode_queue.DecodeDevice`."""
        self._threads.post(lambda index: self.ranks[index].launch_loop())

    def await_token(self, position: int) -> int:
        """Spin on pinned memory until the token for `position` has been drawn."""
        ring, slot = self.ranks[0].ring, position % RING_SIZE
        spins, deadline = 0, time.monotonic() + TOKEN_S
        while (word := int(ring[slot])) >> 32 != position:
            spins += 1
            if spins % 100 == 0:  # other threads of the host have work too
                time.sleep(0)
            if spins % 100_000 == 0:  # a dead GPU must not hang the host
                self._require_alive(slot, position, deadline)
        token = word & 0xFFFFFFFF
        if token == NO_TOKEN:
            self.require_sound()
            raise DeviceError(f"the GPU has drawn no token for position {position}")
        return token

    def begin_rounds(self, given: RoundInput) -> None:
        """See `round_queue.RoundDevice`; on a slice for times only."""
        self._enter()
        self._forget_queued()
        first = self.ranks[0].rounds
        assert first is not None, "the engine has no rounds"
        has_test = given.settings.rule == "probabilistic"
        if not first.is_prepared(has_test=has_test):
            # On all ranks before any begins: kernels wait for other ranks for seconds only.
            self._threads.run(
                lambda index: self._rounds_of(index).prepare(has_test=has_test), is_patient=True
            )
        block = self._encode(given.step, wants_logits=has_test)
        state = first.encode(given)
        self.on_rounds(lambda rounds: rounds.begin(block, state))

    def on_rounds(self, function: Callable[[RankRounds], None]) -> None:
        """Call a function of the rounds of each rank, in their threads; waits for rank 0 only."""
        self._enter()
        self._threads.post(lambda index: function(self._rounds_of(index)))

    def copy_slot(self, source: int, target: int) -> None:
        """Copy all ring buffers of a slot."""
        self._copy("ring", source, target)

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page of every paged buffer."""
        self._copy("paged", source, target)

    def read(self, step: str, tensor: int, rank: int = 0) -> NDArray[np.uint8]:
        """Bytes of a tensor of a plan as the last run left them; for parity reports."""
        return self.on_ranks(lambda own: own.read(step, tensor))[rank]

    def fill_state(self, value: int) -> None:
        """Set every byte of all state; for benchmarks, which have no real context."""
        self.on_ranks(lambda rank: rank.memory.fill_state(value))

    def send_inputs(self, step_input: StepInput) -> None:
        """Set the inputs of the next step of all ranks; for benchmarks."""
        self._enter()
        self._start(step_input)

    def on_ranks(self, function: Callable[[CudaRank], T]) -> list[T]:
        """Results of a function of each rank that runs, side by side in their threads."""
        self._enter()
        return self._threads.run(lambda index: function(self.ranks[index]))

    def require_sound(self) -> None:
        """Wait for all work and raise if any of it failed."""
        self._await(self.ranks[0].require_sound)

    def plan(self, step: str) -> Plan:
        """The plan of a step."""
        return self.ranks[0].plans[step]

    @property
    def memory(self) -> DeviceMemory:
        """What is where on the first GPU."""
        return self.ranks[0].memory

    @property
    def gpu_name(self) -> str:
        """Name of the GPU, the same for all ranks."""
        return str(self.ranks[0].device.name)

    @property
    def device_name(self) -> str:
        """Name of the GPU, and what runs on it if that is not all of an engine of one rank."""
        name = self.gpu_name
        if self.rank_slice is not None:
            return f"{name}, {self.rank_slice}"
        return name if len(self.ranks) == 1 else f"{len(self.ranks)} x {name}"

    @property
    def can_refit(self) -> bool:
        """Not in this version."""
        return False

    def refit(self, folder: Path, config: EngineConfig) -> None:
        """Not called, see `can_refit`."""
        raise NotImplementedError

    def close(self) -> None:
        """Release all memory.

        Raises:
            DeviceError: a rank is lost, see `rank_threads`. Its kernels may still write to others,
                so all memory stays where it is until the process ends.
        """
        if self.memory.base:
            try:
                self.on_ranks(lambda rank: rank.close())
            finally:
                self._threads.close()

    def _open(
        self, opened: dict[int, CudaRank], folder: Path, config: EngineConfig, numbers: list[int]
    ) -> None:
        """Open the ranks of all devices side by side, each in its own thread."""
        from cuda.core import Device

        # First of all in this thread, so that what is wrong with all GPUs is said once.
        open_device(Device, numbers[0], folder, config)
        require_peers(self._driver, numbers, folder, config)

        def open_rank(index: int) -> None:
            device = open_device(Device, numbers[index], folder, config)
            rank = self.rank_slice.rank if self.rank_slice else index
            opened[index] = CudaRank(self._driver, device, folder, config, rank)

        self._threads.run(open_rank, is_patient=True)  # weights may come from a busy disk
        contexts = [rank.context for rank in opened.values()]
        self._threads.run(
            lambda index: enable_peer_access(self._driver, opened[index].check, contexts)
        )

    def _mailboxes(self) -> list[Mailbox]:
        """Where what is sent to every rank of the engine goes."""
        own = [rank.memory.mailbox for rank in self.ranks]
        if self.rank_slice is None:
            return own
        return looped_back(own[0], self.rank_slice, self.memory.slot_bytes)

    def _rounds_of(self, index: int) -> RankRounds:
        rounds = self.ranks[index].rounds
        assert rounds is not None, "the engine has no rounds"
        return rounds

    def _enter(self) -> None:
        """Make the first rank's context current in the calling thread; the others have theirs."""
        self.ranks[0].enter()

    def _start(
        self, step_input: StepInput, step: str | None = None, *, wants_logits: bool = False
    ) -> None:
        """Set the inputs on all ranks, and queue a step."""
        self._forget_queued()
        block = self._encode(step_input, wants_logits=wants_logits)

        def start(index: int) -> None:
            self.ranks[index].send_inputs(block)
            if step is not None:
                self.ranks[index].launch(step)

        self._threads.post(start)

    def _encode(self, step_input: StepInput, *, wants_logits: bool = False) -> NDArray[np.uint8]:
        """The block of step inputs; what is in it may change afterwards."""
        sampling = step_input.sampling
        values: dict[str, Any] = {
            "tokens": step_input.tokens,
            "position": [step_input.position],
            "num_tokens": [len(step_input.tokens)],
            "slot": [step_input.slot],
            "page_table": step_input.pages,
            "temperature": [sampling.temperature],
            "top_k": [sampling.top_k],
            "top_p": [sampling.top_p],
            "min_p": [sampling.min_p],
            "seed": [sampling.seed],
            "is_coupled": [int(step_input.is_coupled)],
            "wants_logits": [int(wants_logits)],
        }
        return self.ranks[0].encode_inputs(values)

    def _forget_queued(self) -> None:
        """Inputs or state are used otherwise than by what is queued."""
        self._queue.clear()
        if self.rounds is not None:
            self.rounds.clear()

    def _require_whole(self) -> None:
        if self.rank_slice is not None:
            raise EngineMismatchError(
                f"a {self.rank_slice}, computes parts of sums, so its tokens mean nothing; use it "
                f"for ink-bench only, and open the engine without a slice to run it"
            )

    def _await(self, results: Callable[[], T]) -> T:
        """What the first rank has to give; if it failed for the sake of another, why that did."""
        try:
            return results()
        except DeviceError:
            self._threads.join()
            raise

    def _copy(self, kind: str, source: int, target: int) -> None:
        self._enter()
        self._forget_queued()
        self._threads.run(lambda index: self.ranks[index].memory.copy_entries(kind, source, target))

    def _require_alive(self, slot: int, position: int, deadline: float) -> None:
        if self.ranks[0].is_busy():
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"the GPU of rank 0 has worked on the token for position {position} for "
                    f"{TOKEN_S:g} s: it has stalled; look at nvidia-smi, end this process and open "
                    f"the engine again"
                )
            return
        self.require_sound()
        if int(self.ranks[0].ring[slot]) >> 32 != position:
            raise DeviceError(f"the GPU is idle but has drawn no token for position {position}")


def _require_slice(part: RankSlice, folder: Path, config: EngineConfig) -> None:
    if part.num_ranks != config.tp_size:
        raise EngineMismatchError(
            f"engine {folder} has {config.tp_size} ranks, so there is no slice "
            f"{part.rank}/{part.num_ranks} of it; give 0/{config.tp_size}, or build it with "
            f"--tp-size {part.num_ranks}"
        )
