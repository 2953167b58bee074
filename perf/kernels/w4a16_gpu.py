"""The GPU as a backend of the kernel checks, and timing of launch sequences as CUDA graphs.

Kernels are compiled by the builder's NVRTC compiler, or read from a folder of cubins that was
filled on a machine without a GPU. Launches go to the driver's C interface through ctypes, so that
any version of torch beside it will do; torch gives memory, streams, graphs and events.
"""

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from w4a16_backend import Buffer, kernel_cells

from inkrt.builder.compile import PLUGIN_FOLDER, compile_cubin
from inkrt.plugins.tactic import KernelLaunch

TARGET = "sm_90a"
_MAX_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


def cubin_path(folder: Path, kernel: KernelLaunch) -> Path:
    """Where a kernel's cubin stands: named by its sources and macros."""
    digest = hashlib.sha256()
    for path in [kernel.source, *sorted(PLUGIN_FOLDER.glob("**/*.cuh"))]:
        digest.update(path.read_bytes())
    digest.update(repr((kernel.source.name, kernel.defines)).encode())
    return folder / f"{kernel.entry}-{digest.hexdigest()[:16]}.cubin"


def cubin(folder: Path, kernel: KernelLaunch) -> bytes:
    """The code of a kernel, compiled into the folder if it is not there."""
    path = cubin_path(folder, kernel)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compile_cubin(kernel.source, kernel.defines, TARGET))
    return path.read_bytes()


class Gpu:
    """The first GPU.

    Attributes:
        folder: of cubins.
        pdl: allow programmatic dependent launch where a kernel asks for it.
        device: torch's name.
    """

    device = "cuda"

    def __init__(self, folder: Path, *, pdl: bool = True) -> None:
        torch.cuda.init()
        torch.zeros(1, device="cuda")  # makes the context
        self.folder = folder
        self.pdl = pdl
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._functions: dict[tuple[Path, int], ctypes.c_void_p] = {}

    def upload(self, data: NDArray[np.generic]) -> Buffer:
        """A buffer with the array's bytes."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return self.buffer(torch.from_numpy(raw.copy()).cuda())

    def buffer(self, tensor: torch.Tensor) -> Buffer:
        """A contiguous CUDA tensor as a buffer."""
        return Buffer(tensor.data_ptr(), tensor.nbytes, tensor)

    def download(self, buffer: Buffer) -> NDArray[np.uint8]:
        """A copy of the buffer's bytes."""
        torch.cuda.synchronize()
        assert isinstance(buffer.owner, torch.Tensor)
        result: NDArray[np.uint8] = buffer.owner.view(torch.uint8).cpu().numpy().reshape(-1)
        return result

    def launch(
        self,
        kernel: KernelLaunch,
        values: Sequence[Buffer | int | float],
        late: Sequence[Buffer] = (),  # noqa: ARG002 - a GPU has no way to hold them back
    ) -> None:
        """Queue a kernel on the current stream."""
        self.prepare(kernel, values)()

    def prepare(
        self, kernel: KernelLaunch, values: Sequence[Buffer | int | float]
    ) -> Callable[[], None]:
        """A launch with everything bound, for repeated use."""
        function = self._function(kernel)
        cells = kernel_cells(values)
        pointers = (ctypes.c_void_p * len(cells))(
            *[ctypes.cast(ctypes.byref(cell), ctypes.c_void_p) for cell in cells]
        )
        attributes = (_Attribute * 2)()
        count = 0
        if self.pdl and kernel.pdl:
            attributes[count].id = _PROGRAMMATIC_SERIALIZATION
            attributes[count].value[0] = 1
            count += 1
        if kernel.cluster > 1:
            attributes[count].id = _CLUSTER_DIMENSION
            attributes[count].value[0:3] = [kernel.cluster, 1, 1]
            count += 1
        config = _Config(
            (ctypes.c_uint * 3)(*kernel.grid),
            (ctypes.c_uint * 3)(*kernel.block),
            kernel.smem_bytes,
            None,
            ctypes.cast(attributes, ctypes.POINTER(_Attribute)),
            count,
        )

        def run() -> None:
            # cells, pointers and attributes live as long as this function.
            assert len(cells) == len(values)
            assert len(attributes) == 2
            config.stream = torch.cuda.current_stream().cuda_stream
            self._check(
                self._driver.cuLaunchKernelEx(ctypes.byref(config), function, pointers, None),
                f"launching {kernel.entry} {kernel.defines}",
            )

        return run

    def _function(self, kernel: KernelLaunch) -> ctypes.c_void_p:
        key = (cubin_path(self.folder, kernel), kernel.smem_bytes)
        if key not in self._functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            code = cubin(self.folder, kernel)
            self._check(self._driver.cuModuleLoadData(ctypes.byref(module), code), "loading")
            self._check(
                self._driver.cuModuleGetFunction(
                    ctypes.byref(function), module, kernel.entry.encode()
                ),
                f"finding {kernel.entry}",
            )
            self._check(
                self._driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SMEM, kernel.smem_bytes),
                f"giving {kernel.entry} {kernel.smem_bytes} B of shared memory",
            )
            # Kernels of different carve-outs cannot share an SM.
            self._check(self._driver.cuFuncSetAttribute(function, _CARVEOUT, 100), "carve-out")
            self._functions[key] = function
        return self._functions[key]

    def _check(self, status: int, what: str) -> None:
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{what}: CUDA error {status}, {(text.value or b'').decode()}")


def time_graph(body: Callable[[], None], *, replays: int = 60) -> float:
    """Median time of a CUDA graph of what `body` launches, in microseconds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        body()  # loads modules outside the capture
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        body()
    with torch.cuda.stream(stream):
        for _ in range(5):
            graph.replay()
        times = []
        for _ in range(replays):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000)
    return float(np.median(times))
