"""Running the tactics of `sink_attention` on a GPU with cuda.core, for perf/kernels/attention.py.

Owns compiled kernels, their scratch memory and launches. Inputs are torch tensors of the caller;
torch is no part of the launches. Importing this needs no GPU.
"""

import ctypes
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inkrt.builder.compile import compile_cubin
from inkrt.errors import DeviceError
from inkrt.plugins.attention_sm90.tactics import Call, fast_tactic, simple_tactic, splits
from inkrt.plugins.tactic import Float32, Int32, KernelLaunch, Output, Pointer, Scratch, Tactic

TARGET = "sm_90a"


def tactics(call: Call) -> list[Tactic]:
    """Every candidate for a call, the simple kernel last."""
    fast = []
    if call.head_dim == 128 and call.heads_per_kv <= 8:
        fast = [fast_tactic(call, split) for split in splits(call)]
    return [*fast, simple_tactic(call)]


def cubin_path(folder: Path, kernel: KernelLaunch) -> Path:
    """Where `compile_all` puts the code of a kernel."""
    text = repr((kernel.source.name, kernel.defines))
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.cubin"


def compile_all(kernels: list[KernelLaunch], folder: Path) -> int:
    """Compile kernels into a folder, each macro set once; gives their number. Needs no GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {cubin_path(folder, kernel): kernel for kernel in kernels}
    for path, kernel in paths.items():
        path.write_bytes(compile_cubin(kernel.source, kernel.defines, TARGET))
    return len(paths)


class Gpu:
    """One device, its stream and the kernels loaded so far.

    Args:
        cubins: folder that `compile_all` has filled; kernels missing there are compiled now.
    """

    def __init__(self, cubins: Path | None) -> None:
        from cuda.core import Device

        self._device = Device()
        self._device.set_current()
        self.stream = self._device.create_stream()
        self._cubins = cubins
        self._functions: dict[KernelLaunch, Any] = {}
        self._scratch: dict[tuple[str, int], Tensor] = {}
        self.error = torch.zeros(1, dtype=torch.int32, device="cuda")

    def launch(self, tactic: Tactic, arguments: dict[str, Tensor], out: Tensor) -> None:
        """Launch a tactic's kernels.

        Args:
            tactic: what to run.
            arguments: device tensors by argument name.
            out: the output.
        """
        from cuda.core import LaunchConfig, launch

        for kernel in tactic.kernels:
            x, y, z = kernel.grid
            config = LaunchConfig(
                grid=(x // kernel.cluster, y, z),  # in clusters
                cluster=(kernel.cluster, 1, 1) if kernel.cluster > 1 else None,
                block=kernel.block,
                shmem_size=kernel.smem_bytes,
                programmatic_stream_serialization=kernel.pdl,
            )
            params = [self._param(param, arguments, out) for param in kernel.params]
            launch(self.stream, config, self.function(kernel), *params)

    def function(self, kernel: KernelLaunch) -> Any:
        """The loaded function of a kernel.

        Raises:
            DeviceError: the driver refuses its shared memory.
        """
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        if kernel not in self._functions:
            path = cubin_path(self._cubins, kernel) if self._cubins else None
            code = (
                path.read_bytes()
                if path is not None and path.exists()
                else compile_cubin(kernel.source, kernel.defines, TARGET)
            )
            module = ObjectCode.from_cubin(code)
            function = module.get_kernel(kernel.entry)
            if kernel.smem_bytes > 48 * 1024:
                attribute = driver.CUfunction_attribute
                (status,) = driver.cuKernelSetAttribute(
                    attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    kernel.smem_bytes,
                    function.handle,
                    self._device.device_id,
                )
                if int(status) != 0:
                    raise DeviceError(
                        f"cuKernelSetAttribute gave {status} for {kernel.smem_bytes} bytes of "
                        f"shared memory of {kernel.entry}; an {TARGET} GPU allows 232448"
                    )
            self._functions[kernel] = (module, function)
        return self._functions[kernel][1]

    def synchronize(self) -> None:
        """Wait for all work.

        Raises:
            DeviceError: a kernel gave up waiting.
        """
        torch.cuda.synchronize()
        if code := int(self.error):
            self.error.zero_()
            raise DeviceError(
                f"a kernel gave up waiting (error word {code}); check that no other process uses "
                "the GPU, then look for the launch with --check"
            )

    def _param(self, param: Any, arguments: dict[str, Tensor], out: Tensor) -> Any:
        if isinstance(param, Pointer):
            return arguments[param.argument].data_ptr()
        if isinstance(param, Output):
            return out.data_ptr()
        if isinstance(param, Int32):
            return ctypes.c_int(param.value)
        if isinstance(param, Float32):
            return ctypes.c_float(param.value)
        assert isinstance(param, Scratch)
        if param.name == "error":
            return self.error.data_ptr()
        key = (param.name, param.num_bytes)
        if key not in self._scratch:
            fill = 0 if param.fill is None else param.fill
            size = (param.num_bytes,)
            self._scratch[key] = torch.full(size, fill, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
        return self._scratch[key].data_ptr()
