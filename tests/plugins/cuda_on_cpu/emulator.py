"""A backend for kernel checks that runs CUDA kernels on the CPU, see cuda_on_cpu.h."""

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from w4a16_backend import Buffer, kernel_cells

from inkrt.plugins.tactic import KernelLaunch, Output, Scratch

_HERE = Path(__file__).parent
_PLUGINS = _HERE.parents[2] / "plugins"
# Scratch of kernels whose blocks wait for each other.
_MEETINGS = {"exchange", "mix_exchange", "arrivals", "partials"}
# Kernels with plugins/attention_sm90/sm90.cuh, of which sm90_on_cpu.h has another.
_WITH_SM90 = {"attention.cu", "attention_window.cu", "gated_input.cu"}
COMPILER = shutil.which("g++")


class Emulator:
    """Compiles kernels with g++ into `folder` and runs them.

    Attributes:
        folder: of shared libraries; equal kernels are compiled once.
        reverse: run threads in falling order.
        seed: if not 0, run threads in random orders, another one whenever all have had their turn.
        rest: with a seed, first lanes of some warps come late to whatever they do.
    """

    def __init__(
        self, folder: Path, *, reverse: bool = False, seed: int = 0, rest: bool = False
    ) -> None:
        self.folder = folder
        self.reverse = reverse
        self.seed = seed
        self.rest = rest
        self._libraries: dict[str, ctypes.CDLL] = {}
        self._known: dict[tuple[object, ...], ctypes.CDLL] = {}

    def upload(self, data: NDArray[np.generic]) -> Buffer:
        # Some spare bytes, so that 16-byte alignment can be had and small overruns are seen.
        raw = np.full(data.nbytes + 32, 0xEE, np.uint8)
        start = -raw.ctypes.data % 16
        part = raw[start : start + data.nbytes]
        part[:] = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        return Buffer(part.ctypes.data, data.nbytes, (raw, part))

    def download(self, buffer: Buffer) -> NDArray[np.uint8]:
        raw, part = buffer.owner
        assert (raw[part.size + part.ctypes.data - raw.ctypes.data :] == 0xEE).all(), "overrun"
        return part.copy()

    def launch(
        self, kernel: KernelLaunch, values: Sequence[Buffer | int | float], late: Sequence[Buffer]
    ) -> None:
        library = self.library(kernel)
        shared = library.emu_shared_bytes()
        assert shared <= kernel.smem_bytes, f"{kernel.entry}: {kernel.smem_bytes} B for {shared}"
        held = []
        for buffer in late:
            _, part = buffer.owner
            copy = part.copy()
            part[:] = 0xFF
            held.append(copy)
            library.emu_publish(
                ctypes.c_void_p(buffer.address),
                ctypes.c_void_p(copy.ctypes.data),
                ctypes.c_size_t(copy.size),
            )
        # No kernel writes results in front of its wait; a dry pass (gated_input.cu) nothing at all.
        has_dry_pass = dict(kernel.defines).get("DRY_PASS")
        published = {buffer.address for buffer in late}
        for param, value in zip(kernel.params, values, strict=True):
            is_watched = isinstance(param, Output) or (
                has_dry_pass and not isinstance(param, Scratch)
            )
            if isinstance(value, Buffer) and is_watched and value.address not in published:
                library.emu_watch(ctypes.c_void_p(value.address), ctypes.c_size_t(value.num_bytes))
        cells = kernel_cells(values)
        pointers = (ctypes.c_void_p * len(cells))(
            *[ctypes.cast(ctypes.byref(cell), ctypes.c_void_p) for cell in cells]
        )
        # Blocks of such a kernel wait for each other.
        order = self.seed + 1 if self.seed else int(self.reverse)
        order = -order if self.rest else order
        scratch = {param.name for param in kernel.params if isinstance(param, Scratch)}
        library.emu_run(
            *kernel.grid, kernel.block[0], kernel.cluster, ctypes.c_size_t(kernel.smem_bytes),
            order, int(bool(scratch & _MEETINGS)), pointers,
        )  # fmt: skip

    def library(self, kernel: KernelLaunch) -> ctypes.CDLL:
        """The compiled kernel. Sources do not change while this object lives."""
        key = (kernel.entry, kernel.source, kernel.defines, kernel.smem_bytes > 0)
        if key not in self._known:
            self._known[key] = self._compiled(kernel)
        return self._known[key]

    def _compiled(self, kernel: KernelLaunch) -> ctypes.CDLL:
        defines = [f"-D{name}={value}" for name, value in kernel.defines]
        sources = [
            *_PLUGINS.glob("**/*.cu*"),
            *_HERE.glob("*.cpp"),
            *_HERE.glob("*.h"),
        ]
        text = "\0".join([kernel.entry, str(kernel.source), *defines])
        digest = hashlib.sha256(text.encode())
        for path in sorted(sources):
            digest.update(path.read_bytes())
        name = digest.hexdigest()[:16]
        if name not in self._libraries:
            path = self.folder / f"{kernel.entry}-{name}.so"
            if not path.exists():
                assert COMPILER is not None
                # Static shared memory is no matter of the launch.
                shared = kernel.smem_bytes > 0 and (
                    "struct Shared {" in kernel.source.read_text().split("extern")[0]
                )
                sm90 = kernel.source.name in _WITH_SM90
                command = [
                    COMPILER, "-x", "c++", "-std=c++17", "-O1", "-ffp-contract=off", "-shared",
                    "-fPIC",
                    "-include", str(_HERE / "cuda_on_cpu.h"), f"-I{kernel.source.parent}",
                    f"-I{_PLUGINS}", f"-DKERNEL={kernel.entry}", f'-DSOURCE="{kernel.source.name}"',
                    *defines, *(["-DHAS_SHARED"] if shared else []),
                    *(["-DHAS_SM90", f"-I{_HERE}"] if sm90 else []), str(_HERE / "run.cpp"),
                    "-o", str(path),
                ]  # fmt: skip
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr[-4000:]
            self._libraries[name] = ctypes.CDLL(str(path))
            self._libraries[name].emu_shared_bytes.restype = ctypes.c_size_t
        return self._libraries[name]
