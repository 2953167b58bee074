"""Timing an open engine on its GPU by replays of graphs: steps, and launches apart from their step.

A chain runs launches of one kind, with the weights and state of different layers, on the
activations that the first of them finds in its step. Weights are cold in the L2: either the chain
itself walks more bytes than the L2 holds before it comes round, or memory is written in between.
The latter leaves lines that must be written back, which costs small launches a little.

Ranks that wait for each other run the same chain in lock-step; a time is that of the slowest.

This is a part of the CUDA executor that only benchmarks need, so it uses the executor's own means.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import DeviceError, EngineMismatchError
from inkrt.runtime.executor import StepInput
from inkrt.runtime.executor.cuda import CudaExecutor
from inkrt.runtime.executor.cuda_memory import ALIGNMENT
from inkrt.runtime.executor.cuda_rank import CudaRank
from inkrt.runtime.executor.cuda_rounds import CudaRounds
from inkrt.runtime.executor.round_queue import RoundInput, RoundRecord
from inkrt.runtime.executor.round_state import RING_RECORDS, RoundStatus
from inkrt.runtime.plan import LOOSE, KernelParam, Plan, TensorParam, slot_bytes

# More than twice the L2 of an H200.
FLUSH_BYTES = 128 * 2**20
_WARM_UP_RUNS = 3
_ROUNDS = 3
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chain:
    """A graph to time.

    Attributes:
        plan: its launches run one after the other; scratch in `LOOSE` is provided.
        repeats: how often all of them run.
        flush: whether FLUSH_BYTES are written before each repeat; not counted.
    """

    plan: Plan
    repeats: int
    flush: bool

    @property
    def num_launches(self) -> int:
        """Launches of the graph."""
        return self.repeats * len(self.plan.launches)


class Timer:
    """Times work on the GPUs of an executor, which must not run anything else meanwhile."""

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor

    def load(self, cubins: Mapping[str, bytes]) -> None:
        """Make code known that the engine does not have."""
        from cuda.core import ObjectCode

        def load(rank: CudaRank) -> None:
            for name in cubins.keys() - rank.modules.keys():
                rank.modules[name] = ObjectCode.from_cubin(cubins[name])

        self._executor.on_ranks(load)

    def step(
        self, step: str, step_input: StepInput, num_runs: int, *, until: int | None = None
    ) -> list[float]:
        """GPU time in us of `num_runs` replays of a step on the same inputs, back to back.

        Of several ranks, which wait for each other, the time of a run is that of the slowest.

        Args:
            step: its name.
            step_input: the same for every run.
            num_runs: replays.
            until: launches of the step that run, from its first one; None for all.

        Raises:
            DeviceError: a kernel gave up waiting.
        """
        executor = self._executor
        executor.send_inputs(step_input)

        def graph(rank: CudaRank) -> Any:
            if until is None:
                return rank.graphs[step]
            return rank.capture(rank.plans[step], until=until)

        return self._slowest(self._of_ranks(graph), num_runs)

    def rounds(self, given: RoundInput, num_runs: int) -> tuple[list[float], list[RoundRecord]]:
        """GPU time in us of rounds one behind the other, and what each gave; see `step`.

        Args:
            given: the first of them; the others go on behind it.
            num_runs: rounds.

        Raises:
            DeviceError: a kernel gave up, or a round had no token to give or no room to write.
        """
        executor = self._executor
        device = CudaRounds(executor)
        device.begin_rounds(given)
        times: list[float] = []
        records: list[RoundRecord] = []
        while len(records) < num_runs:
            count = min(num_runs - len(records), RING_RECORDS)
            of_ranks = executor.on_ranks(lambda rank: self._replay(rank, rank.round_graph, count))  # noqa: B023 (runs at once)
            times += [max(of_run) for of_run in zip(*of_ranks, strict=True)]
            records += [device.await_record(len(records) + place) for place in range(count)]
        for record in records:
            if record.status is not RoundStatus.OK:
                raise DeviceError(f"a round gave nothing: {record.status.name.lower()}")
        return times, records

    def read(
        self, step: str, step_input: StepInput, until: int, tensors: Sequence[int]
    ) -> list[NDArray[np.uint8]]:
        """Bytes of tensors on the first rank after the step's first `until` launches on all ranks.

        Raises:
            DeviceError: a kernel gave up waiting.
        """
        self._run_until(step, step_input, until)
        return [self._executor.read(step, tensor) for tensor in tensors]

    def chains(
        self, step: str, step_input: StepInput, first: int, chains: Sequence[Chain], num_runs: int
    ) -> list[list[float]]:
        """GPU time in us of a launch of each chain, for every replay; chains take turns.

        Args:
            step: that the launches are from.
            step_input: its inputs.
            first: launches of the step that run before, so that activations are there.
            chains: to time.
            num_runs: replays of each, at least.

        Raises:
            DeviceError: a kernel gave up waiting, or there is no memory for the chains' scratch.
            EngineMismatchError: a chain sends more than the engine's inboxes hold.
        """
        room = self._executor.memory.slot_bytes
        if (most := slot_bytes([chain.plan for chain in chains])) > room:
            raise EngineMismatchError(
                f"a tactic sends {most:,} bytes to each rank, and the engine has room for "
                f"{room:,}; build it again with this version"
            )
        offsets, size = [], FLUSH_BYTES
        for chain in chains:
            offsets.append(size)
            size += -(-chain.plan.scratch_bytes // ALIGNMENT) * ALIGNMENT
        bases: dict[CudaRank, int] = {}

        def allocate(rank: CudaRank) -> None:
            bases[rank] = int(rank.check(rank.driver.cuMemAlloc(size)))

        def capture(rank: CudaRank) -> list[Any]:
            graphs = []
            for chain, offset in zip(chains, offsets, strict=True):
                scratch, stream = bases[rank] + offset, rank.stream.handle
                for fill in chain.plan.fills:
                    start = scratch + fill.offset
                    rank.check(rank.driver.cuMemsetD8Async(start, fill.value, fill.size, stream))
                graphs.append(self._capture(rank, chain, bases[rank], scratch))
            return graphs

        try:
            self._executor.on_ranks(allocate)
            self._run_until(step, step_input, first)
            of_ranks = self._of_ranks(capture)
            graphs = [
                {rank: of_rank[number] for rank, of_rank in of_ranks.items()}
                for number in range(len(chains))
            ]
            return self._take_turns(chains, graphs, bases, num_runs)
        finally:
            self._executor.on_ranks(
                lambda rank: rank in bases and rank.check(rank.driver.cuMemFree(bases[rank]))
            )

    def _take_turns(
        self,
        chains: Sequence[Chain],
        graphs: list[dict[CudaRank, Any]],
        flushed: Mapping[CudaRank, int],
        num_runs: int,
    ) -> list[list[float]]:
        flushes = {
            repeats: self._of_ranks(partial(self._capture_flushes, flushed, repeats))
            for repeats in {chain.repeats for chain in chains if chain.flush}
        }
        count = -(-num_runs // _ROUNDS)
        times: list[list[float]] = [[] for _ in chains]
        of_flushes: dict[int, list[float]] = {repeats: [] for repeats in flushes}
        for graph in graphs:
            self._slowest(graph, _WARM_UP_RUNS)
        for _ in range(_ROUNDS):
            for repeats, graph in flushes.items():
                of_flushes[repeats] += self._slowest(graph, count)
            for number, graph in enumerate(graphs):
                times[number] += self._slowest(graph, count)
        result = []
        for chain, of_chain in zip(chains, times, strict=True):
            other = median(of_flushes[chain.repeats]) if chain.flush else 0.0
            result.append([(time - other) / chain.num_launches for time in of_chain])
        return result

    def _run_until(self, step: str, step_input: StepInput, until: int) -> None:
        """Run the first launches of a step on all ranks and wait."""
        executor = self._executor
        executor.send_inputs(step_input)

        def run(rank: CudaRank) -> None:
            if until:
                rank.capture(rank.plans[step], until=until).launch(rank.stream)
            rank.require_sound()

        executor.on_ranks(run)

    def _of_ranks(self, make: Callable[[CudaRank], T]) -> dict[CudaRank, T]:
        """What is made for every rank, once all have it, so that they start together."""
        executor = self._executor
        return dict(zip(executor.ranks, executor.on_ranks(make), strict=True))

    def _slowest(self, graphs: Mapping[CudaRank, Any], num_runs: int) -> list[float]:
        """GPU time in us of every replay on the slowest rank."""
        times = self._executor.on_ranks(lambda rank: self._replay(rank, graphs[rank], num_runs))
        return [max(of_run) for of_run in zip(*times, strict=True)]

    def _replay(self, rank: CudaRank, graph: Any, num_runs: int) -> list[float]:
        """GPU time in us of every run of a graph of a rank, back to back."""
        driver, check, stream = rank.driver, rank.check, rank.stream
        events = [check(driver.cuEventCreate(0)) for _ in range(num_runs + 1)]
        check(driver.cuEventRecord(events[0], stream.handle))
        for event in events[1:]:
            graph.launch(stream)
            check(driver.cuEventRecord(event, stream.handle))
        rank.require_sound()  # which waits; times of a kernel that gave up mean nothing
        times = [1e3 * float(check(driver.cuEventElapsedTime(a, b))) for a, b in pairwise(events)]
        for event in events:
            check(driver.cuEventDestroy(event))
        return times

    def _capture(self, rank: CudaRank, chain: Chain, flushed: int, scratch: int) -> Any:
        builder = self._begin(rank)
        for _ in range(chain.repeats):
            if chain.flush:
                self._add_flush(rank, builder, flushed)
            is_behind_flush = chain.flush
            for launch in chain.plan.launches:
                for kernel in launch.kernels:
                    params = [_param(rank, chain.plan, item, scratch) for item in kernel.params]
                    # Behind what is no kernel there can be no programmatic edge.
                    pdl = kernel.pdl and not is_behind_flush
                    rank.add_kernel(builder, kernel, params, pdl=pdl)
                    is_behind_flush = False
        return self._end(rank, builder)

    def _capture_flushes(
        self, flushed: Mapping[CudaRank, int], repeats: int, rank: CudaRank
    ) -> Any:
        builder = self._begin(rank)
        for _ in range(repeats):
            self._add_flush(rank, builder, flushed[rank])
        return self._end(rank, builder)

    def _add_flush(self, rank: CudaRank, builder: Any, address: int) -> None:
        stream = builder.stream.handle
        rank.check(rank.driver.cuMemsetD32Async(address, 1, FLUSH_BYTES // 4, stream))

    def _begin(self, rank: CudaRank) -> Any:
        builder = rank.device.create_graph_builder()
        builder.begin_building()
        return builder

    def _end(self, rank: CudaRank, builder: Any) -> Any:
        graph = builder.end_building().complete()
        graph.upload(rank.stream)
        return graph


def _param(rank: CudaRank, plan: Plan, param: KernelParam, scratch: int) -> Any:
    if isinstance(param, TensorParam):
        spec = plan.tensors[param.tensor]
        if spec.storage == LOOSE and not spec.name.startswith("error."):
            return scratch + spec.offset
    return rank.param(plan, param)
