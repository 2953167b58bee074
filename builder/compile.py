"""Compiling kernels to cubins with NVRTC. No GPU and no system compiler is needed.

A cubin is named by the hash of its content, so equal code is stored once however many launches use
it.
"""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from inkrt.errors import BuildError
from inkrt.plugins.tactic import KernelLaunch

PLUGIN_FOLDER = Path(__file__).resolve().parent.parent / "plugins"

_Key = tuple[Path, tuple[tuple[str, int | float | str], ...]]


class Compiler:
    """Compiles the kernels of one build.

    Attributes:
        target: e.g. "sm_90a".
        cubins: name to code, of everything compiled so far.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.cubins: dict[str, bytes] = {}
        self._names: dict[_Key, str] = {}

    def compile(self, kernel: KernelLaunch) -> str:
        """Name of the cubin that holds the kernel.

        Raises:
            BuildError: NVRTC is not installed or rejects the source.
        """
        key = (kernel.source, kernel.defines)
        if key not in self._names:
            code = compile_cubin(kernel.source, kernel.defines, self.target)
            name = hashlib.sha256(code).hexdigest()[:16]
            self.cubins[name] = code
            self._names[key] = name
        return self._names[key]

    def compile_all(self, kernels: Iterable[KernelLaunch]) -> None:
        """Compile kernels side by side, so that `compile` finds them done.

        Raises:
            BuildError: see `compile`.
        """
        distinct = list({(kernel.source, kernel.defines): kernel for kernel in kernels}.values())
        for kernel in distinct[:1]:
            self.compile(kernel)  # imports cuda.core, which threads must not do at once
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC works outside of Python's lock
            for _ in pool.map(self.compile, distinct[1:]):
                pass


def compile_cubin(
    source: Path, defines: tuple[tuple[str, int | float | str], ...], target: str
) -> bytes:
    """Compile one CUDA C++ file.

    Raises:
        BuildError: NVRTC is not installed or rejects the source.
    """
    try:
        from cuda.core import Program, ProgramOptions
    except ModuleNotFoundError:
        raise BuildError(
            f"compiling for {target} needs NVRTC; install it with: pip install 'inkrt[build]'"
        ) from None
    options = ProgramOptions(
        arch=target,
        std="c++17",
        define_macro=[(name, str(value)) for name, value in defines] or None,
        include_path=[str(source.parent), str(PLUGIN_FOLDER)],
    )
    try:
        code = Program(source.read_text(encoding="utf-8"), "c++", options).compile("cubin").code
    except Exception as error:  # cuda.core raises its own classes for each library
        raise BuildError(f"{source.name} does not compile for {target}: {error}") from error
    assert isinstance(code, bytes)
    return code
