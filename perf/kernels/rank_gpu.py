"""Kernels of several ranks on GPUs, without an engine: memory, launches and graphs of each rank."""

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inkrt.builder.compile import compile_cubin
from inkrt.plugins.tactic import KernelLaunch
from inkrt.runtime.executor.cuda_device import enable_peer_access
from inkrt.runtime.executor.peers import (
    EMPTY_BYTE,
    Mailbox,
    RankSlice,
    inbox_size,
    looped_back,
    peer_table,
)
from inkrt.runtime.plan import TURN_BYTES

TARGET = "sm_90a"
Value = int | ctypes.c_int | ctypes.c_float


class RankGpus:
    """Ranks that run on some GPUs.

    Attributes:
        tables: address of every running rank's table of peers.
        errors: address of every running rank's error word.

    Args:
        devices: GPU of every rank; may be the same one.
        slot_bytes: most that a launch sends.
        part: the one rank that runs, on the first device, if not all do.
    """

    def __init__(
        self, devices: Sequence[int], slot_bytes: int, part: RankSlice | None = None
    ) -> None:
        from cuda.bindings import driver
        from cuda.core import Device

        self._driver = driver
        self._devices = [Device(number) for number in devices]
        self._contexts, self._streams = [], []
        for device in self._devices:
            device.set_current()
            self._contexts.append(self._check(driver.cuCtxGetCurrent()))
            self._streams.append(device.create_stream())
        self.num_ranks = len(devices)
        for rank in range(self.num_ranks):
            self.enter(rank)
            enable_peer_access(driver, self._check, self._contexts)
        self._modules: dict[object, Any] = {}
        num_slots = self.num_ranks if part is None else part.num_ranks
        slot = -(-slot_bytes // 256) * 256
        size = inbox_size(slot, num_slots)
        self.errors = [self.empty(rank, 4) for rank in range(self.num_ranks)]
        boxes = [
            Mailbox(self.empty(rank, size, EMPTY_BYTE), self.errors[rank])
            for rank in range(self.num_ranks)
        ]
        if part is not None:
            assert self.num_ranks == 1
            boxes = looped_back(boxes[0], part, slot)
        self.tables = [
            self.put(
                rank,
                peer_table(part.rank if part else rank, slot, self.empty(rank, TURN_BYTES), boxes),
            )
            for rank in range(self.num_ranks)
        ]

    def enter(self, rank: int) -> None:
        """Make the rank's GPU current."""
        self._check(self._driver.cuCtxSetCurrent(self._contexts[rank]))

    def empty(self, rank: int, size: int, fill: int = 0) -> int:
        """Address of new memory of a rank."""
        self.enter(rank)
        address = int(self._check(self._driver.cuMemAlloc(max(size, 16))))
        self.fill(rank, address, size, fill)
        return address

    def fill(self, rank: int, address: int, size: int, value: int) -> None:
        """Set bytes, in the order of the rank's launches."""
        self.enter(rank)
        handle = self._streams[rank].handle
        self._check(self._driver.cuMemsetD8Async(address, value, size, handle))

    def put(self, rank: int, data: NDArray[np.generic]) -> int:
        """Address of a copy of an array."""
        data = np.ascontiguousarray(data)
        address = self.empty(rank, data.nbytes)
        self.synchronize()
        self.enter(rank)
        self._check(self._driver.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))
        return address

    def get(self, rank: int, address: int, size: int) -> NDArray[np.uint8]:
        """Bytes of a rank; wait for its launches first."""
        host = np.empty(size, np.uint8)
        self.enter(rank)
        self._check(self._driver.cuMemcpyDtoH(host.ctypes.data, address, size))
        return host

    def error(self, rank: int) -> int:
        """A rank's error word."""
        return int(self.get(rank, self.errors[rank], 4).view(np.int32)[0])

    def launch(self, rank: int, kernel: KernelLaunch, values: Sequence[Value]) -> None:
        """Queue a kernel of a rank."""
        self.enter(rank)
        self._add(self._streams[rank], rank, kernel, values, pdl=kernel.pdl)

    def graph(self, rank: int, launches: Sequence[tuple[KernelLaunch, Sequence[Value]]]) -> Any:
        """A graph of kernels with programmatic edges."""
        self.enter(rank)
        builder = self._devices[rank].create_graph_builder()
        builder.begin_building()
        for kernel, values in launches:
            self._add(builder, rank, kernel, values, pdl=kernel.pdl)
        graph = builder.end_building().complete()
        graph.upload(self._streams[rank])
        return graph

    def replay(self, graphs: Sequence[Any], num_runs: int) -> float:
        """Median GPU time in us of a run of each rank's graph, back to back, on the slowest rank.

        The first runs are left out: ranks start one after the other.
        """
        driver = self._driver
        events: list[list[Any]] = [[] for _ in graphs]
        for number in range(num_runs + 1):
            for rank, graph in enumerate(graphs):
                self.enter(rank)
                if number:
                    graph.launch(self._streams[rank])
                event = self._check(driver.cuEventCreate(0))
                self._check(driver.cuEventRecord(event, self._streams[rank].handle))
                events[rank].append(event)
        self.synchronize()
        return max(
            median(
                1e3 * float(self._check(driver.cuEventElapsedTime(a, b)))
                for a, b in pairwise(of_rank[num_runs // 4 :])
            )
            for of_rank in events
        )

    def synchronize(self) -> None:
        """Wait for all ranks."""
        for rank, stream in enumerate(self._streams):
            self.enter(rank)
            self._check(self._driver.cuStreamSynchronize(stream.handle))

    def _add(
        self, to: Any, rank: int, kernel: KernelLaunch, values: Sequence[Value], *, pdl: bool
    ) -> None:
        from cuda.core import LaunchConfig, ObjectCode, launch

        key = (kernel.source, kernel.defines)
        if key not in self._modules:
            code = compile_cubin(kernel.source, kernel.defines, TARGET)
            self._modules[key] = ObjectCode.from_cubin(code)
        function = self._modules[key].get_kernel(kernel.entry)
        attribute = self._driver.CUfunction_attribute
        for name, value in (
            (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.smem_bytes),
            (attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
        ):
            number = self._devices[rank].device_id
            self._check(self._driver.cuKernelSetAttribute(name, value, function.handle, number))
        x, y, z = kernel.grid
        config = LaunchConfig(
            grid=(x // kernel.cluster, y, z),  # in clusters
            cluster=(kernel.cluster, 1, 1) if kernel.cluster > 1 else None,
            block=kernel.block, shmem_size=kernel.smem_bytes,
            programmatic_stream_serialization=pdl,
        )  # fmt: skip
        launch(to, config, function, *values)

    def _check(self, result: Any) -> Any:
        status, *values = result
        assert not status, status
        return values[0] if len(values) == 1 else tuple(values)
