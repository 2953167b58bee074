"""Tactics: ways to run a plugin on a GPU target, described without a GPU.

A tactic is a short list of kernel launches with everything fixed at build time but addresses. The
builder compiles its sources to cubins and writes the launches into the plan; the executor only
fills in pointers. `plugins/<op>/tactics.py` lists an operator's candidates for a target and shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

Shape = tuple[int, ...]

# Architectures that kernels are compiled for. What is written for wgmma runs on HOPPER only.
HOPPER, BLACKWELL = "sm_90a", "sm_100a"
GPU_TARGETS = (HOPPER, BLACKWELL)


@dataclass(frozen=True, slots=True)
class TensorArg:
    """Shape and dtype of a tensor argument or output, known at build time.

    Attributes:
        shape: sizes.
        dtype: of an element.
        strides: in elements, of a view whose elements do not stand one behind the other; else None.
    """

    shape: Shape
    dtype: torch.dtype
    strides: Shape | None = None


def strides_of_view(shape: Sequence[int], strides: Sequence[int]) -> Shape | None:
    """What `TensorArg.strides` says of a tensor."""
    dense = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != dense:
            return tuple(strides)
        dense *= size
    return None


# An argument of an operator call; lists of tensors and of numbers stay lists.
CallArg = (
    TensorArg
    | list[TensorArg]
    | list[int]
    | list[float]
    | torch.dtype
    | bool
    | int
    | float
    | str
    | None
)
# Arguments of one operator call by parameter name.
CallArgs = dict[str, CallArg]


@dataclass(frozen=True, slots=True)
class Pointer:
    """Kernel parameter: address of an operator argument, or of one in a list of tensors."""

    argument: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """Kernel parameter: address of an output of the operator."""

    index: int = 0


@dataclass(frozen=True, slots=True)
class Scratch:
    """Kernel parameter: address of memory of this launch of the plan.

    Attributes:
        name: kernels of a tactic share scratch by name.
        num_bytes: size.
        fill: byte that the memory holds before the first launch; a kernel that needs it again must
            restore it. None: contents are undefined, and launches of a plan may share the memory.
    """

    name: str
    num_bytes: int
    fill: int | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Kernel parameter: address of a table of 64-bit device addresses, [element][argument].

    Attributes:
        arguments: names of arguments that are lists of tensors of one length. An element that a
            packing of the tactic packs stands there packed.
    """

    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InputPointer:
    """Kernel parameter: address of an input of the step that is no argument of the operator.

    Wide steps may leave rows from `num_tokens` on undefined, which no operator's result needs.

    Attributes:
        name: e.g. "num_tokens".
    """

    name: str


@dataclass(frozen=True, slots=True)
class Int32:
    """Kernel parameter: a 32-bit integer."""

    value: int


@dataclass(frozen=True, slots=True)
class Float32:
    """Kernel parameter: a float."""

    value: float


@dataclass(frozen=True, slots=True)
class Peers:
    """Kernel parameter: address of the `Peers` of `all_reduce/push.cuh`, ways to the other ranks.

    Every rank has one inbox, which others write to. All launches that have this parameter share it,
    over all steps of an engine, in the order in which they run, which is the same on all ranks.

    Attributes:
        num_bytes: most that a launch sends to each rank, or receives from each.
    """

    num_bytes: int


Param = Pointer | Output | Scratch | Table | InputPointer | Peers | Int32 | Float32


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One kernel of a tactic.

    Attributes:
        source: CUDA C++ file; includes are resolved beside it and in `plugins/`.
        entry: name of its extern "C" kernel.
        defines: macros, compile-time constants of shapes and variants.
        grid: blocks.
        block: threads.
        cluster: blocks per cluster in x; 1 for none.
        smem_bytes: dynamic shared memory.
        params: in the kernel's order.
        pdl: whether it may start before its predecessor has ended; such a kernel waits
            (griddepcontrol.wait) before it touches anything a predecessor writes or reads. That
            may be the same launch, so its outputs and scratch are among it.
        cooperative: whether all blocks must be resident at once.
    """

    source: Path
    entry: str
    defines: tuple[tuple[str, int | float | str], ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: tuple[Param, ...]
    cluster: int = 1
    smem_bytes: int = 0
    pdl: bool = True
    cooperative: bool = False


@dataclass(frozen=True, slots=True)
class Packing:
    """How a tactic wants weights: several arguments become one buffer under the first one's name.

    Of arguments that are lists, the tensors at the same place become one buffer.

    Attributes:
        arguments: weights that are read, e.g. ("codes", "scales").
        name: of the layout, e.g. "nvfp4_chunks"; equal names must mean equal bytes.
        pack: their tensors, one of each argument, to uint8 [num_bytes].
        num_bytes: size of the result for given shapes, one of each argument.
        cuts_stacks: whether stacks of matrices [L, N, K] may be packed some matrices at a time, one
            result behind the other.
        row_unit: a matrix [N, K] may be packed a multiple of this many rows at a time likewise; 0:
            only as a whole.
    """

    arguments: tuple[str, ...]
    name: str
    pack: Callable[..., Tensor]
    num_bytes: Callable[[Sequence[TensorArg]], int]
    cuts_stacks: bool = False
    row_unit: int = 0


@dataclass(frozen=True, slots=True)
class Tactic:
    """One way to run an operator call.

    Attributes:
        name: unique for the operator, e.g. "w4a16_132x3".
        kernels: in order; each sees what the ones before it wrote.
        bytes: least bytes that must cross device memory (weights once, activations once).
        flops: multiply-adds times two.
        packings: weights that are not read as the reference's layout.

    Raises:
        ValueError: kernels want different scratch by the same name.
    """

    name: str
    kernels: tuple[KernelLaunch, ...]
    bytes: int
    flops: int
    packings: tuple[Packing, ...] = field(default=())

    def __post_init__(self) -> None:
        known: dict[str, Scratch] = {}
        for param in (param for kernel in self.kernels for param in kernel.params):
            if isinstance(param, Scratch) and known.setdefault(param.name, param) != param:
                raise ValueError(f"tactic {self.name}: {param} and {known[param.name]}")


FindTactics = Callable[[str, CallArgs], list[Tactic]]


def tensor_arg(args: CallArgs, name: str) -> TensorArg:
    """The tensor argument `name`, which must be there."""
    value = args[name]
    assert isinstance(value, TensorArg), f"argument {name} is no tensor"
    return value


def tensor_list_arg(args: CallArgs, name: str) -> list[TensorArg]:
    """The tensors of the list argument `name`, which must be there."""
    value = args[name]
    assert isinstance(value, list), f"argument {name} is no list"
    tensors = [item for item in value if isinstance(item, TensorArg)]
    assert len(tensors) == len(value), f"argument {name} is no list of tensors"
    return tensors


def number_list_arg(args: CallArgs, name: str) -> list[float]:
    """The numbers of the list argument `name`, which must be there."""
    value = args[name]
    assert isinstance(value, list), f"argument {name} is no list"
    numbers = [float(item) for item in value if not isinstance(item, TensorArg)]
    assert len(numbers) == len(value), f"argument {name} is no list of numbers"
    return numbers


def number_arg(args: CallArgs, name: str) -> float:
    """The number `name`, which must be there."""
    value = args[name]
    assert isinstance(value, int | float), f"argument {name} is no number"
    return float(value)
