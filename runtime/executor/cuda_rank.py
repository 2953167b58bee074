"""One rank on one GPU: its memory, its code, the graphs of its steps, and their launches."""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import DeviceError
from inkrt.runtime.code_check import require_code
from inkrt.runtime.engine_file import DRAFT_STEP, EngineConfig, read_code
from inkrt.runtime.executor.cuda_memory import ROUND_CODE, DeviceMemory, num_bytes
from inkrt.runtime.executor.cuda_rounds import RankRounds
from inkrt.runtime.executor.peers import Mailbox, describe_error
from inkrt.runtime.plan import (
    IntParam,
    Kernel,
    KernelParam,
    PeersParam,
    Plan,
    TableParam,
    TensorParam,
)

NUMPY_DTYPES = {"int32": np.int32, "int64": np.int64, "float32": np.float32}
# Drawn tokens that pinned memory holds; more than a decode queue ever has in flight.
RING_SIZE = 1024


class CudaRank:
    """What one GPU holds and launches. Calls may come from any thread, one at a time.

    Attributes:
        rank: its number.
        driver: `cuda.bindings.driver`.
        check: turns a driver result into its values or raises.
        device: the GPU, of cuda.core.
        context: of the GPU; current in the threads that use it.
        stream: that all its work is in.
        plans: by step.
        ratio_tests: plans of what judges drafts behind a step, by that step.
        modules: loaded code by name.
        memory: what is where on the device.
        graphs: of the steps, by name.
        ring: pinned words that `advance.cu` shows drawn tokens in.
        rounds: of speculation, which run by themselves; None without a drafter.

    Raises:
        CapacityError: from the constructor, if the rank does not fit into free memory.
        EngineFormatError: from the constructor, if plans or weights are damaged.
    """

    def __init__(
        self, driver: Any, device: Any, folder: Path, config: EngineConfig, rank: int
    ) -> None:
        from cuda.core import ObjectCode

        self.rank, self.driver, self.device = rank, driver, device
        self.stream = device.create_stream()
        code = read_code(folder, rank)
        require_code(folder, config, rank, code)
        self.plans, self.ratio_tests = code.plans, code.ratio_tests
        self.modules = {name: ObjectCode.from_cubin(cubin) for name, cubin in code.cubins.items()}
        self.graphs: dict[str, Any] = {}
        self._loop: Any = None
        self._vocab_size = config.model.vocab_size
        self.rounds: RankRounds | None = None
        self.memory = DeviceMemory(driver, folder, config, code, self.stream.handle, rank)
        self.check = self.memory.check
        try:
            self.context = self.check(driver.cuCtxGetCurrent())
            self._inputs = self.memory.host_bytes(self.memory.input_bytes)
            self.ring = self.memory.host_bytes(RING_SIZE * 8).view(np.uint64)
            self._error = self.memory.host_bytes(4).view(np.int32)
            self._outputs = self.memory.host_bytes(self._output_bytes())
        except BaseException:
            self.memory.close()
            raise

    def prepare(self, mailboxes: Sequence[Mailbox]) -> None:
        """Connect with all ranks, and capture the graphs."""
        self.enter()
        self.memory.connect(mailboxes)
        self.graphs = {name: self.capture(plan) for name, plan in self.plans.items()}
        self._loop = self.capture(self.plans["decode"], advances=True)
        if ROUND_CODE in self.modules and DRAFT_STEP in self.plans:
            self.rounds = RankRounds(self, self._vocab_size)

    @property
    def round_graph(self) -> Any:
        """The graph of a round."""
        assert self.rounds is not None, "the engine has no rounds"
        return self.rounds.graph

    def enter(self) -> None:
        """Make the context current in the calling thread; calls may come from several in turn."""
        self.check(self.driver.cuCtxSetCurrent(self.context))

    def capture(self, plan: Plan, *, advances: bool = False, until: int | None = None) -> Any:
        """One graph of a plan's first launches, or all; with `advances`, it feeds itself."""
        builder = self.begin_graph()
        self.add_plan(builder, plan, until=until)
        if advances:
            inputs, offsets = self.memory.inputs, self.memory.input_offsets
            params = (
                self.memory.address(plan.name, plan.tensors[plan.outputs["tokens"]]),
                inputs + offsets["tokens"],
                inputs + offsets["position"],
                self.ring.ctypes.data,
                self.memory.error,
                ctypes.c_int(RING_SIZE),
            )
            self.add_control(builder, "advance", "advance", params, threads=1)
        graph = builder.end_building().complete()
        graph.upload(self.stream)
        return graph

    def begin_graph(self) -> Any:
        """The builder of a graph, in whichever thread calls."""
        # Every thread has devices of its own in cuda.core, which ask for more than a context: the
        # body of a conditional node gets its stream from that of the thread that builds it.
        device = type(self.device)(self.device.device_id)
        device.set_current()
        builder = device.create_graph_builder()
        builder.begin_building()
        return builder

    def add_plan(
        self,
        builder: Any,
        plan: Plan,
        *,
        until: int | None = None,
        is_first: bool = True,
        pdl: bool = True,
    ) -> None:
        """Add a plan's first launches, or all, to a graph that is being built.

        Args:
            builder: of the graph.
            plan: of a step, or of a ratio test.
            until: number of its launches; None for all.
            is_first: whether the graph has no kernel yet that the first could start beside.
            pdl: whether kernels may start beside their predecessors at all.
        """
        for launch in plan.launches[:until]:
            for kernel in launch.kernels:
                params = [self.param(plan, param) for param in kernel.params]
                self.add_kernel(builder, kernel, params, pdl=pdl and kernel.pdl and not is_first)
                is_first = False

    def add_control(
        self, builder: Any, code: str, entry: str, params: Sequence[Any], *,
        threads: int, pdl: bool = True,
    ) -> None:  # fmt: skip
        """Add a kernel of one block that belongs to the executor, not to a plan.

        Args:
            builder: of a graph.
            code: name of the module that has the kernel.
            entry: of the kernel.
            params: what it is given.
            threads: of the block.
            pdl: whether it may start beside its predecessor, as which it waits by itself.
        """
        from cuda.core import LaunchConfig, launch

        config = LaunchConfig(grid=1, block=threads, programmatic_stream_serialization=pdl)
        launch(builder, config, self.modules[code].get_kernel(entry), *params)

    def add_kernel(self, builder: Any, kernel: Kernel, params: list[Any], *, pdl: bool) -> None:
        """Add a kernel to a graph that is being built."""
        from cuda.core import LaunchConfig, launch

        x, y, z = kernel.grid
        has_cluster = kernel.cluster > 1
        config = LaunchConfig(
            grid=(x // kernel.cluster, y, z),  # in clusters
            cluster=(kernel.cluster, 1, 1) if has_cluster else None,
            block=kernel.block,
            shmem_size=kernel.smem_bytes,
            is_cooperative=kernel.cooperative,
            programmatic_stream_serialization=pdl,
        )
        function = self.modules[kernel.cubin].get_kernel(kernel.entry)
        attribute = self.driver.CUfunction_attribute
        # Kernels of different carve-outs cannot share a multiprocessor, so none would start beside
        # its predecessor.
        values = {
            attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: kernel.smem_bytes,
            attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: 100,
        }
        for name, value in values.items():
            self.check(
                self.driver.cuKernelSetAttribute(
                    name, value, function.handle, self.device.device_id
                )
            )
        launch(builder, config, function, *params)

    def param(self, plan: Plan, param: KernelParam) -> Any:
        """What a kernel of a plan is given for a parameter."""
        if isinstance(param, TensorParam):
            return self.memory.address(plan.name, plan.tensors[param.tensor])
        if isinstance(param, TableParam):
            return self.memory.table_address(plan.name, param)
        if isinstance(param, PeersParam):
            return self.memory.peers
        if isinstance(param, IntParam):
            return ctypes.c_int(param.value)
        return ctypes.c_float(param.value)

    def encode_inputs(self, values: Mapping[str, Any]) -> NDArray[np.uint8]:
        """The block of step inputs, zero where there is no value; it is the same on all ranks."""
        block = np.zeros(self.memory.input_bytes, np.uint8)
        for name, value in values.items():
            if name in self.memory.input_offsets:
                start = self.memory.input_offsets[name]
                data = np.asarray(value, self.input_dtype(name)).view(np.uint8)
                block[start : start + data.size] = data
        return block

    def input_dtype(self, name: str) -> Any:
        """The numpy dtype of a step input."""
        return NUMPY_DTYPES[self.memory.input_dtypes[name]]

    def send_inputs(self, block: NDArray[np.uint8]) -> None:
        """Wait for all work, and set the step inputs: a block of `encode_inputs` and the rank."""
        self.synchronize()  # the staging memory may still be on its way
        self._inputs[:] = block
        if (start := self.memory.input_offsets.get("rank")) is not None:
            number = np.asarray([self.rank], self.input_dtype("rank")).view(np.uint8)
            self._inputs[start : start + number.size] = number
        self.copy_to_device(self.memory.inputs, self._inputs)

    def extend_pages(self, first: int, pages: Sequence[int]) -> None:
        """See `decode_queue.DecodeDevice`."""
        entries = np.asarray(pages, self.input_dtype("page_table"))
        start = self.memory.input_offsets["page_table"] + first * entries.itemsize
        # No copy that may still be on its way reads these bytes: entries of a chain never change.
        staged = self._inputs[start : start + entries.nbytes]
        staged[:] = entries.view(np.uint8)
        self.copy_to_device(self.memory.inputs + start, staged)

    def launch(self, step: str) -> None:
        """Queue a step."""
        self.graphs[step].launch(self.stream)

    def launch_loop(self) -> None:
        """Queue a decode step that leaves its token as the input of the next."""
        self._loop.launch(self.stream)

    def receive(self, plan: Plan, num_rows: Mapping[str, int]) -> dict[str, NDArray[Any]]:
        """Copy the first rows of every output to the host and wait."""
        results: dict[str, NDArray[Any]] = {}
        offset = 0
        for name, index in plan.outputs.items():
            spec = plan.tensors[index]
            dtype = NUMPY_DTYPES[spec.dtype]
            width = int(np.prod(spec.shape[1:]))
            rows = num_rows[name]
            size = rows * width * np.dtype(dtype).itemsize
            host = self._outputs[offset : offset + size]
            if size:
                address = self.memory.address(plan.name, spec)
                self.check(
                    self.driver.cuMemcpyDtoHAsync(
                        host.ctypes.data, address, size, self.stream.handle
                    )
                )
            results[name] = host.view(dtype).reshape((rows, *spec.shape[1:]))
            offset += -(-size // 8) * 8
        self.require_sound()
        return {name: value.copy() for name, value in results.items()}

    def read(self, step: str, tensor: int) -> NDArray[np.uint8]:
        """Bytes of a tensor of a plan as the last run left them."""
        spec = self.plans[step].tensors[tensor]
        size = num_bytes(spec)
        host = np.empty(size, np.uint8)
        self.synchronize()
        address = self.memory.address(step, spec)
        self.check(self.driver.cuMemcpyDtoH(host.ctypes.data, address, size))
        return host

    def is_busy(self) -> bool:
        """Whether work is left in the stream; raises if some of it has failed."""
        (status,) = self.driver.cuStreamQuery(self.stream.handle)
        if status == self.driver.CUresult.CUDA_ERROR_NOT_READY:
            return True
        self.check((status,))
        return False

    def require_sound(self) -> None:
        """Wait for the stream and raise if a kernel of any rank has set the error word."""
        self.check(
            self.driver.cuMemcpyDtoHAsync(
                self._error.ctypes.data, self.memory.error, 4, self.stream.handle
            )
        )
        self.synchronize()
        if code := int(self._error[0]):
            raise DeviceError(describe_error(code))

    def synchronize(self) -> None:
        """Wait for the stream."""
        self.check(self.driver.cuStreamSynchronize(self.stream.handle))

    def close(self) -> None:
        """Wait for the stream and release all memory. May be called again."""
        if self.memory.base:
            self.enter()
            self.synchronize()
            self.graphs.clear()
            self._loop = self.rounds = None
            self.memory.close()

    def copy_to_device(self, address: int, staged: NDArray[Any]) -> None:
        """Copy pinned bytes; they must not change until the stream has got there."""
        self.check(
            self.driver.cuMemcpyHtoDAsync(
                address, staged.ctypes.data, staged.nbytes, self.stream.handle
            )
        )

    def _output_bytes(self) -> int:
        return max(
            sum(-(-num_bytes(plan.tensors[index]) // 8) * 8 for index in plan.outputs.values())
            for plan in self.plans.values()
        )
