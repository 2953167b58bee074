"""The CUDA executor: runs plans as CUDA graphs on one GPU, without torch.

Each step is one graph whose kernels may start before their predecessors end (programmatic edges).
Positions, lengths and tokens are read from device memory, so a graph is captured once and replayed.
What is where on the device is `cuda_memory.DeviceMemory`.
"""

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import DeviceError, EngineMismatchError
from inkrt.runtime.engine_file import EngineConfig, read_code
from inkrt.runtime.executor import StepInput, StepOutput
from inkrt.runtime.executor.cuda_memory import DeviceMemory, num_bytes
from inkrt.runtime.executor.decode_queue import DecodeQueue
from inkrt.runtime.plan import IntParam, Kernel, KernelParam, Plan, TableParam, TensorParam

_NUMPY_DTYPES = {"int32": np.int32, "int64": np.int64, "float32": np.float32}
# Drawn tokens that pinned memory holds; more than a decode queue ever has in flight.
RING_SIZE = 1024
NO_TOKEN = 0xFFFFFFFF
NEEDED_MULTIPROCESSORS = 132
NEEDED_CUDA = 13_000  # as cuDriverGetVersion counts: CUDA 13.0, whose NVRTC compiles the kernels


class CudaExecutor:
    """An engine on one GPU; see `runtime.executor.Executor`.

    Attributes:
        memory: what is where on the device.

    Raises:
        EngineMismatchError: from the constructor, if the GPU or the driver does not fit.
        CapacityError: from the constructor, if the engine does not fit into free memory.
        EngineFormatError: from the constructor, if plans or weights are damaged.
    """

    def __init__(self, folder: Path, config: EngineConfig, device: int = 0) -> None:
        from cuda.bindings import driver
        from cuda.core import Device, ObjectCode

        self._driver = driver
        self._config = config
        _require_driver(driver, folder)
        self._device = _open_device(Device, device, folder, config)
        self._stream = self._device.create_stream()
        code = read_code(folder, 0)
        self._plans = code.plans
        self._modules = {name: ObjectCode.from_cubin(cubin) for name, cubin in code.cubins.items()}
        self.memory = DeviceMemory(driver, folder, config, code, self._stream.handle)
        self._check = self.memory.check
        try:
            self._inputs = self.memory.host_bytes(self.memory.input_bytes)
            self._ring = self.memory.host_bytes(RING_SIZE * 8).view(np.uint64)
            self._error = self.memory.host_bytes(4).view(np.int32)
            self._outputs = self.memory.host_bytes(self._output_bytes())
            self._graphs = {name: self._capture(plan) for name, plan in self._plans.items()}
            self._loop = self._capture(self._plans["decode"], advances=True)
            self._context = self._check(driver.cuCtxGetCurrent())
        except BaseException:
            self.memory.close()
            raise
        self._queue = DecodeQueue(self)

    def run(self, step: str, step_input: StepInput, *, wants_logits: bool = True) -> StepOutput:
        """Run one step and wait for it."""
        self._enter()
        plan = self._plans[step]
        self._send_inputs(step_input)
        self._graphs[step].launch(self._stream)
        count = len(step_input.tokens)
        rows = count if plan.num_rows == plan.num_tokens else plan.num_rows
        num_rows = {"tokens": rows, "logits": rows if wants_logits else 0, "confidences": rows}
        outputs = self._receive(plan, num_rows)
        return StepOutput(outputs["tokens"], outputs["logits"], outputs.get("confidences"))

    def decode(self, step_input: StepInput, num_ahead: int) -> int:
        """Run the decode step on one token, or take its result if it has run ahead."""
        self._enter()
        return self._queue.decode(step_input, num_ahead)

    def begin(self, step_input: StepInput) -> None:
        """See `decode_queue.DecodeDevice`."""
        self._send_inputs(step_input)
        self._ring[:] = 0

    def extend_pages(self, first: int, pages: Sequence[int]) -> None:
        """See `decode_queue.DecodeDevice`."""
        entries = np.asarray(pages, _NUMPY_DTYPES[self.memory.input_dtypes["page_table"]])
        start = self.memory.input_offsets["page_table"] + first * entries.itemsize
        # No copy that may still be on its way reads these bytes: entries of a chain never change.
        staged = self._inputs[start : start + entries.nbytes]
        staged[:] = entries.view(np.uint8)
        self._copy_to_device(self.memory.inputs + start, staged)

    def queue_step(self) -> None:
        """See `decode_queue.DecodeDevice`."""
        self._loop.launch(self._stream)

    def await_token(self, position: int) -> int:
        """Spin on pinned memory until the token for `position` has been drawn."""
        slot = position % RING_SIZE
        spins = 0
        while (word := int(self._ring[slot])) >> 32 != position:
            spins += 1
            if spins % 100 == 0:  # other threads of the host have work too
                time.sleep(0)
            if spins % 100_000 == 0:  # a dead GPU must not hang the host
                self._require_alive(slot, position)
        token = word & 0xFFFFFFFF
        if token == NO_TOKEN:
            self._check_error()
            raise DeviceError(f"the GPU has drawn no token for position {position}")
        return token

    def copy_slot(self, source: int, target: int) -> None:
        """Copy all ring buffers of a slot."""
        self._enter()
        self._queue.clear()
        self.memory.copy_entries("ring", source, target)

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page of every paged buffer."""
        self._enter()
        self._queue.clear()
        self.memory.copy_entries("paged", source, target)

    def read(self, step: str, tensor: int) -> NDArray[np.uint8]:
        """Bytes of a tensor of a plan as the last run left them; for parity reports."""
        spec = self._plans[step].tensors[tensor]
        size = num_bytes(spec)
        host = np.empty(size, np.uint8)
        self._enter()
        self._synchronize()
        self._check(
            self._driver.cuMemcpyDtoH(host.ctypes.data, self.memory.address(step, spec), size)
        )
        return host

    def plan(self, step: str) -> Plan:
        """The plan of a step."""
        return self._plans[step]

    @property
    def device_name(self) -> str:
        """Name of the GPU."""
        return str(self._device.name)

    def close(self) -> None:
        """Release all memory."""
        if self.memory.base:
            self._enter()
            self._synchronize()
            self._graphs.clear()
            del self._loop
            self.memory.close()

    def _enter(self) -> None:
        """Make the context current in the calling thread; calls may come from several in turn."""
        self._check(self._driver.cuCtxSetCurrent(self._context))

    def _capture(self, plan: Plan, *, advances: bool = False, until: int | None = None) -> Any:
        """One graph of a plan's first launches, or all; with `advances`, it feeds itself."""
        from cuda.core import LaunchConfig, launch

        builder = self._device.create_graph_builder()
        builder.begin_building()
        for launch_of_plan in plan.launches[:until]:
            for kernel in launch_of_plan.kernels:
                params = [self._param(plan, param) for param in kernel.params]
                self._add_kernel(builder, kernel, params, pdl=kernel.pdl)
        if advances:
            inputs, offsets = self.memory.inputs, self.memory.input_offsets
            drawn = self.memory.address(plan.name, plan.tensors[plan.outputs["tokens"]])
            config = LaunchConfig(grid=1, block=1, programmatic_stream_serialization=True)
            launch(
                builder,
                config,
                self._modules["advance"].get_kernel("advance"),
                drawn,
                inputs + offsets["tokens"],
                inputs + offsets["position"],
                self._ring.ctypes.data,
                self.memory.error,
                ctypes.c_int(RING_SIZE),
            )
        graph = builder.end_building().complete()
        graph.upload(self._stream)
        return graph

    def _add_kernel(self, builder: Any, kernel: Kernel, params: list[Any], *, pdl: bool) -> None:
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
        function = self._modules[kernel.cubin].get_kernel(kernel.entry)
        attribute = self._driver.CUfunction_attribute
        # Kernels of different carve-outs cannot share a multiprocessor, so none would start beside
        # its predecessor.
        values = {
            attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: kernel.smem_bytes,
            attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: 100,
        }
        for name, value in values.items():
            self._check(
                self._driver.cuKernelSetAttribute(
                    name, value, function.handle, self._device.device_id
                )
            )
        launch(builder, config, function, *params)

    def _param(self, plan: Plan, param: KernelParam) -> Any:
        if isinstance(param, TensorParam):
            return self.memory.address(plan.name, plan.tensors[param.tensor])
        if isinstance(param, TableParam):
            return self.memory.table_address(plan.name, param)
        if isinstance(param, IntParam):
            return ctypes.c_int(param.value)
        return ctypes.c_float(param.value)

    def _send_inputs(self, step_input: StepInput) -> None:
        sampling = step_input.sampling
        values: dict[str, Any] = {
            "tokens": step_input.tokens,
            "position": [step_input.position],
            "num_tokens": [len(step_input.tokens)],
            "slot": [step_input.slot],
            "rank": [0],
            "page_table": step_input.pages,
            "temperature": [sampling.temperature],
            "top_k": [sampling.top_k],
            "top_p": [sampling.top_p],
            "min_p": [sampling.min_p],
            "seed": [sampling.seed],
            "is_coupled": [int(step_input.is_coupled)],
        }
        self._queue.clear()
        self._synchronize()  # the staging memory may still be on its way
        self._inputs[:] = 0
        for name, value in values.items():
            if name in self.memory.input_offsets:
                dtype = _NUMPY_DTYPES[self.memory.input_dtypes[name]]
                start = self.memory.input_offsets[name]
                data = np.asarray(value, dtype).view(np.uint8)
                self._inputs[start : start + data.size] = data
        self._copy_to_device(self.memory.inputs, self._inputs)

    def _copy_to_device(self, address: int, staged: NDArray[np.uint8]) -> None:
        """Copy pinned bytes; they must not change until the stream has got there."""
        self._check(
            self._driver.cuMemcpyHtoDAsync(
                address, staged.ctypes.data, staged.nbytes, self._stream.handle
            )
        )

    def _receive(self, plan: Plan, num_rows: dict[str, int]) -> dict[str, Any]:
        """Copy the first rows of every output to the host and wait."""
        results: dict[str, Any] = {}
        offset = 0
        for name, index in plan.outputs.items():
            spec = plan.tensors[index]
            dtype = _NUMPY_DTYPES[spec.dtype]
            width = int(np.prod(spec.shape[1:]))
            rows = num_rows[name]
            size = rows * width * np.dtype(dtype).itemsize
            host = self._outputs[offset : offset + size]
            if size:
                address = self.memory.address(plan.name, spec)
                self._check(
                    self._driver.cuMemcpyDtoHAsync(
                        host.ctypes.data, address, size, self._stream.handle
                    )
                )
            results[name] = host.view(dtype).reshape((rows, *spec.shape[1:]))
            offset += -(-size // 8) * 8
        self._check_error()
        return {name: value.copy() for name, value in results.items()}

    def _require_alive(self, slot: int, position: int) -> None:
        (status,) = self._driver.cuStreamQuery(self._stream.handle)
        if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return
        self._check((status,))
        self._check_error()
        if int(self._ring[slot]) >> 32 != position:
            raise DeviceError(f"the GPU is idle but has drawn no token for position {position}")

    def _check_error(self) -> None:
        """Wait for the stream and raise if a kernel has set the error word."""
        self._check(
            self._driver.cuMemcpyDtoHAsync(
                self._error.ctypes.data, self.memory.error, 4, self._stream.handle
            )
        )
        self._synchronize()
        if code := int(self._error[0]):
            raise DeviceError(
                f"a kernel gave up waiting (error word {code:#x}); another process may occupy "
                f"multiprocessors of this GPU: close it and open the engine again"
            )

    def _output_bytes(self) -> int:
        return max(
            sum(-(-num_bytes(plan.tensors[index]) // 8) * 8 for index in plan.outputs.values())
            for plan in self._plans.values()
        )

    def _synchronize(self) -> None:
        self._check(self._driver.cuStreamSynchronize(self._stream.handle))


def _require_driver(driver: Any, folder: Path) -> None:
    """Raise if the driver is older than the compiler of the kernels, whose code it cannot load."""
    try:
        status, version = driver.cuDriverGetVersion()
    except Exception:  # without a driver; opening the device says so
        return
    if not status and version < NEEDED_CUDA:
        raise EngineMismatchError(
            f"engine {folder} needs a driver for CUDA {_cuda_name(NEEDED_CUDA)} or newer, "
            f"this one is for CUDA {_cuda_name(version)}; update it to release 580 or newer"
        )


def _cuda_name(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _open_device(device_class: Any, number: int, folder: Path, config: EngineConfig) -> Any:
    """Make the GPU current and check that it runs the engine's target."""
    if config.tp_size != 1:
        raise EngineMismatchError(
            f"engine {folder} is for {config.tp_size} ranks, this version runs one rank on a GPU; "
            f"rebuild it with: {config.rebuild_command} --tp-size 1"
        )
    try:
        device = device_class(number)
        device.set_current()
    except Exception as error:  # cuda.core raises its own classes, and ImportError without a driver
        raise DeviceError(
            f"engine {folder} was built for {config.target}, but no GPU is usable here ({error}); "
            f"check the driver with nvidia-smi, or build with --target cpu"
        ) from None
    capability = device.compute_capability
    found = f"sm_{capability.major}{capability.minor}"
    if found != config.target.rstrip("af"):
        raise EngineMismatchError(
            f"engine {folder} was built for {config.target}, this GPU is {found} ({device.name}); "
            f"rebuild it for {found}: {config.rebuild_command}"
        )
    # Blocks of some kernels wait for each other, one on each multiprocessor of an H200.
    multiprocessors = device.properties.multiprocessor_count
    if multiprocessors < NEEDED_MULTIPROCESSORS:
        raise EngineMismatchError(
            f"engine {folder} needs a GPU with {NEEDED_MULTIPROCESSORS} multiprocessors, "
            f"{device.name} has {multiprocessors}; use a whole GPU, or build with --target cpu"
        )
    return device
