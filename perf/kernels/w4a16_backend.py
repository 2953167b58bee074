"""What the checks need of a device: buffers, and launches of a tactic's kernels on them.

The GPU is one (w4a16_gpu.py); the tests bring another, which runs the same kernels on the CPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inkrt.plugins.tactic import (
    Float32,
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


def empty(backend: Backend, num_bytes: int, fill: int = POISON) -> Buffer:
    """A filled buffer."""
    return backend.upload(np.full(num_bytes, fill, np.uint8))


# Arguments that an earlier kernel of a step writes. `down` reads the logits early, see gate_up.cu.
_LATE = {"x", "delta", "z", "middle", "hidden", "shared_hidden", "best", "row"}


def run(
    backend: Backend,
    tactic: Tactic,
    arguments: Mapping[str, Buffer],
    outputs: Sequence[Buffer],
    scratch: dict[str, Buffer] | None = None,
) -> dict[str, Buffer]:
    """Launch a tactic's kernels; gives its scratch by name."""
    known = {} if scratch is None else scratch

    def bind(param: Param) -> Buffer | int | float:
        if isinstance(param, Int32 | Float32):
            return param.value
        if isinstance(param, Output):
            return outputs[param.index]
        if isinstance(param, Pointer):
            return arguments[param.argument]
        if param.name not in known:
            fill = POISON if param.fill is None else param.fill
            known[param.name] = empty(backend, param.num_bytes, fill)
        return known[param.name]

    for kernel in tactic.kernels:
        values = [bind(param) for param in kernel.params]
        late = [
            value
            for param, value in zip(kernel.params, values, strict=True)
            if isinstance(value, Buffer)
            and (
                (isinstance(param, Pointer) and param.argument in _LATE)
                or (isinstance(param, Scratch) and param.name in _LATE)
            )
        ]
        backend.launch(kernel, values, late)
    return known
