"""What the checks need of a device: buffers, and launches of a tactic's kernels on them.

The GPU is one (w4a16_gpu.py); the tests bring another, which runs the same kernels on the CPU.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inkrt.plugins.tactic import (
    Float32,
    InputPointer,
    Int32,
    KernelLaunch,
    Output,
    Param,
    Pointer,
    Scratch,
    Tactic,
)

POISON = 0xFF


@dataclass(frozen=True, slots=True)
class Buffer:
    """Device memory.

    Attributes:
        address: of its first byte.
        num_bytes: size.
        owner: keeps it alive.
    """

    address: int
    num_bytes: int
    owner: object


class Backend(Protocol):
    """A device."""

    def upload(self, data: NDArray[np.generic]) -> Buffer:
        """A buffer with the array's bytes."""
        ...

    def download(self, buffer: Buffer) -> NDArray[np.uint8]:
        """A copy of the buffer's bytes."""
        ...

    def launch(
        self, kernel: KernelLaunch, values: Sequence[Buffer | int | float], late: Sequence[Buffer]
    ) -> None:
        """Run a kernel; `late` are the buffers that a predecessor would write until the wait."""
        ...


def kernel_cells(
    values: Sequence[Buffer | int | float],
) -> list[ctypes.c_void_p | ctypes.c_float | ctypes.c_int]:
    """Values of a kernel's parameters as C has them: addresses, float32, int32."""
    return [
        ctypes.c_void_p(v.address) if isinstance(v, Buffer)
        else ctypes.c_float(v) if isinstance(v, float)
        else ctypes.c_int(v)
        for v in values
    ]  # fmt: skip


def empty(backend: Backend, num_bytes: int, fill: int = POISON) -> Buffer:
    """A filled buffer."""
    return backend.upload(np.full(num_bytes, fill, np.uint8))


# Arguments that an earlier kernel of a step writes. `down` reads what the router writes (logits,
# shared_hidden) early, see gate_up.cu.
_LATE = {"x", "xs", "delta", "z", "middle", "hidden", "best", "row"}


@dataclass(frozen=True, slots=True)
class Bound:
    """A kernel with its parameters."""

    kernel: KernelLaunch
    values: tuple[Buffer | int | float, ...]
    late: tuple[Buffer, ...]


# Scratch that a kernel writes and a later one of its tactic reads.
_TILES_LATE = {"angles", "chosen", "items", "lists", "pair_weights", "scores", "y", "x0", "x1"}


def bind(
    backend: Backend,
    tactic: Tactic,
    arguments: Mapping[str, Buffer],
    outputs: Sequence[Buffer],
    scratch: dict[str, Buffer],
) -> list[Bound]:
    """The tactic's kernels with their parameters; scratch that is not there yet is added.

    Arguments are by name; of a list `xs` they are `xs`, `xs.1`, `xs.2`, ...
    """

    def value_of(param: Param) -> Buffer | int | float:
        if isinstance(param, Int32 | Float32):
            return param.value
        if isinstance(param, Output):
            return outputs[param.index]
        if isinstance(param, Pointer):
            return arguments[f"{param.argument}.{param.index}" if param.index else param.argument]
        if isinstance(param, InputPointer):
            return arguments[param.name]
        if param.name not in scratch:
            fill = POISON if param.fill is None else param.fill
            scratch[param.name] = empty(backend, param.num_bytes, fill)
        return scratch[param.name]

    def is_late(param: Param) -> bool:
        if isinstance(param, Pointer):
            return param.argument in _LATE
        return isinstance(param, Scratch) and param.name in _LATE | _TILES_LATE

    bound = []
    for kernel in tactic.kernels:
        values = tuple(value_of(param) for param in kernel.params)
        late = [v for p, v in zip(kernel.params, values, strict=True) if is_late(p)]
        # Once each: parameters that a kernel does not read may name any buffer.
        distinct = {v.address: v for v in late if isinstance(v, Buffer)}
        bound.append(Bound(kernel, values, tuple(distinct.values())))
    return bound


def run(
    backend: Backend,
    tactic: Tactic,
    arguments: Mapping[str, Buffer],
    outputs: Sequence[Buffer],
    scratch: dict[str, Buffer] | None = None,
) -> dict[str, Buffer]:
    """Launch a tactic's kernels; gives its scratch by name, which may be that of an earlier run."""
    scratch = {} if scratch is None else scratch
    for bound in bind(backend, tactic, arguments, outputs, scratch):
        backend.launch(bound.kernel, bound.values, bound.late)
    return scratch
