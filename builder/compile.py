"""Compiling kernels to cubins with NVRTC. No GPU and no system compiler is needed.

A cubin is named by the hash of its content, so equal code is stored once however many launches use
it.
"""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType

from inkrt.errors import BuildError
from inkrt.plugins.tactic import KernelLaunch

PLUGIN_FOLDER = Path(__file__).resolve().parent.parent / "plugins"

_Key = tuple[Path, tuple[tuple[str, int | float | str], ...]]


class Compiler:
    """Compiles the kernels of one build, by as many threads as there are processors.

    Attributes:
        target: e.g. "sm_90a".
        cubins: name to code, of everything compiled so far.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.cubins: dict[str, bytes] = {}
        self._names: dict[_Key, str] = {}
        self._started: dict[_Key, Future[bytes]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def compile(self, kernel: KernelLaunch) -> str:
        """Name of the cubin that holds the kernel.

        Raises:
            BuildError: NVRTC is not installed or rejects the source.
        """
        key = (kernel.source, kernel.defines)
        if key not in self._names:
            if key in self._started:
                code = self._started[key].result()
            else:
                code = compile_cubin(kernel.source, kernel.defines, self.target)
            name = hashlib.sha256(code).hexdigest()[:16]
            self.cubins[name] = code
            self._names[key] = name
        return self._names[key]

    def start(self, kernels: Iterable[KernelLaunch]) -> None:
        """Begin to compile kernels side by side, which `compile` will be asked for; not waited for.

        Raises:
            BuildError: NVRTC is not installed.
        """
        for kernel in kernels:
            key = (kernel.source, kernel.defines)
            if key in self._names or key in self._started:
                continue
            if self._pool is None:
                _nvrtc(self.target)  # threads must not import it at once
                self._pool = ThreadPoolExecutor(os.cpu_count())
            # NVRTC works outside of Python's lock.
            self._started[key] = self._pool.submit(compile_cubin, *key, self.target)

    def stop(self) -> None:
        """Begin nothing more that has been asked for by `start`."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
            begun = {key: one for key, one in self._started.items() if not one.cancelled()}
            self._started = begun

    def compile_all(self, kernels: Iterable[KernelLaunch]) -> None:
        """Compile kernels side by side, so that `compile` finds them done.

        Raises:
            BuildError: see `compile`.
        """
        wanted = list(kernels)
        self.start(wanted)
        try:
            for kernel in wanted:
                self.compile(kernel)
        finally:
            self.stop()


def compile_cubin(
    source: Path, defines: tuple[tuple[str, int | float | str], ...], target: str
) -> bytes:
    """Compile one CUDA C++ file.

    Raises:
        BuildError: NVRTC is not installed or rejects the source.
    """
    nvrtc = _nvrtc(target)
    options = nvrtc.ProgramOptions(
        arch=target,
        std="c++17",
        define_macro=[(name, str(value)) for name, value in defines] or None,
        include_path=[str(source.parent), str(PLUGIN_FOLDER)],
    )
    try:
        program = nvrtc.Program(source.read_text(encoding="utf-8"), "c++", options)
        code = program.compile("cubin").code
    except Exception as error:  # cuda.core raises its own classes for each library
        raise BuildError(f"{source.name} does not compile for {target}: {error}") from error
    assert isinstance(code, bytes)
    return code


def _nvrtc(target: str) -> ModuleType:
    """The package that knows NVRTC."""
    try:
        return import_module("cuda.core")
    except ModuleNotFoundError:
        raise BuildError(
            f"compiling for {target} needs NVRTC; install it with: pip install 'inkrt[build]'"
        ) from None
