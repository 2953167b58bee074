"""Timing an open engine on its GPU by replays of graphs: steps, and launches apart from their step.

A chain runs launches of one kind, with the weights and state of different layers, on the
activations that the first of them finds in its step. Weights are cold in the L2: either the chain
itself walks more bytes than the L2 holds before it comes round, or memory is written in between.
The latter leaves lines that must be written back, which costs small launches a little.

This is a part of the CUDA executor that only benchmarks need, so it uses the executor's own means.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import DeviceError
from inkrt.runtime.executor import StepInput
from inkrt.runtime.executor.cuda import CudaExecutor
from inkrt.runtime.executor.cuda_memory import ALIGNMENT
from inkrt.runtime.executor.cuda_rank import CudaRank
from inkrt.runtime.executor.cuda_rounds import CudaRounds
from inkrt.runtime.executor.round_queue import RoundInput, RoundRecord
from inkrt.runtime.executor.round_state import RING_RECORDS, RoundStatus
from inkrt.runtime.plan import LOOSE, KernelParam, Plan, TensorParam

# More than twice the L2 of an H200.
FLUSH_BYTES = 128 * 2**20
_WARM_UP_RUNS = 3
_ROUNDS = 3


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
    """Times work on the GPU of an executor, which must not run anything else meanwhile."""

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor
        self._rank = executor.ranks[0]
        self._driver, self._check = self._rank.driver, self._rank.check

    def load(self, cubins: Mapping[str, bytes]) -> None:
        """Make code known that the engine does not have."""
        from cuda.core import ObjectCode

        modules = self._rank.modules
        for name in cubins.keys() - modules.keys():
            modules[name] = ObjectCode.from_cubin(cubins[name])

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

        graphs = dict(zip(executor.ranks, executor.on_ranks(graph), strict=True))
        times = executor.on_ranks(lambda rank: self._replay(rank, graphs[rank], num_runs))
        return [max(of_run) for of_run in zip(*times, strict=True)]

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
        executor = self._executor
        executor.send_inputs(step_input)

        def run(rank: CudaRank) -> None:
            rank.capture(rank.plans[step], until=until).launch(rank.stream)
            rank.require_sound()

        if until:
            executor.on_ranks(run)
        return [executor.read(step, tensor) for tensor in tensors]

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
        """
        offsets, size = [], FLUSH_BYTES
        for chain in chains:
            offsets.append(size)
            size += -(-chain.plan.scratch_bytes // ALIGNMENT) * ALIGNMENT
        base = int(self._check(self._driver.cuMemAlloc(size)))
        try:
            self._run_until(step, step_input, first)
            graphs, stream = [], self._rank.stream.handle
            for chain, offset in zip(chains, offsets, strict=True):
                for fill in chain.plan.fills:
                    start = base + offset + fill.offset
                    self._check(self._driver.cuMemsetD8Async(start, fill.value, fill.size, stream))
                graphs.append(self._capture(chain, base, base + offset))
            return self._take_turns(chains, graphs, base, num_runs)
        finally:
            self._check(self._driver.cuMemFree(base))

    def _take_turns(
        self, chains: Sequence[Chain], graphs: list[Any], flushed: int, num_runs: int
    ) -> list[list[float]]:
        flushes = {
            repeats: self._capture_flushes(flushed, repeats)
            for repeats in {chain.repeats for chain in chains if chain.flush}
        }
        count = -(-num_runs // _ROUNDS)
        times: list[list[float]] = [[] for _ in chains]
        of_flushes: dict[int, list[float]] = {repeats: [] for repeats in flushes}
        for graph in graphs:
            self._replay(self._rank, graph, _WARM_UP_RUNS)
        for _ in range(_ROUNDS):
            for repeats, graph in flushes.items():
                of_flushes[repeats] += self._replay(self._rank, graph, count)
            for number, graph in enumerate(graphs):
                times[number] += self._replay(self._rank, graph, count)
        result = []
        for chain, of_chain in zip(chains, times, strict=True):
            other = median(of_flushes[chain.repeats]) if chain.flush else 0.0
            result.append([(time - other) / chain.num_launches for time in of_chain])
        return result

    def _run_until(self, step: str, step_input: StepInput, until: int) -> None:
        """Run the first launches of a step and wait."""
        self._executor.send_inputs(step_input)
        if until:
            rank = self._rank
            rank.capture(rank.plans[step], until=until).launch(rank.stream)
        self._rank.require_sound()

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

    def _capture(self, chain: Chain, flushed: int, scratch: int) -> Any:
        builder = self._begin()
        for _ in range(chain.repeats):
            if chain.flush:
                self._add_flush(builder, flushed)
            is_behind_flush = chain.flush
            for launch in chain.plan.launches:
                for kernel in launch.kernels:
                    params = [self._param(chain.plan, item, scratch) for item in kernel.params]
                    # Behind what is no kernel there can be no programmatic edge.
                    pdl = kernel.pdl and not is_behind_flush
                    self._rank.add_kernel(builder, kernel, params, pdl=pdl)
                    is_behind_flush = False
        return self._end(builder)

    def _capture_flushes(self, flushed: int, repeats: int) -> Any:
        builder = self._begin()
        for _ in range(repeats):
            self._add_flush(builder, flushed)
        return self._end(builder)

    def _add_flush(self, builder: Any, address: int) -> None:
        stream = builder.stream.handle
        self._check(self._driver.cuMemsetD32Async(address, 1, FLUSH_BYTES // 4, stream))

    def _param(self, plan: Plan, param: KernelParam, scratch: int) -> Any:
        if isinstance(param, TensorParam):
            spec = plan.tensors[param.tensor]
            if spec.storage == LOOSE and not spec.name.startswith("error."):
                return scratch + spec.offset
        return self._rank.param(plan, param)

    def _begin(self) -> Any:
        builder = self._rank.device.create_graph_builder()
        builder.begin_building()
        return builder

    def _end(self, builder: Any) -> Any:
        graph = builder.end_building().complete()
        graph.upload(self._rank.stream)
        return graph
