"""The plan: one lowered step as an ordered list of launches over named tensors.

This module owns the types of what an engine executes and knows neither how plans are made
(builder) nor how they run (runtime.executor). Every rank of an engine runs the same plan.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Literal

from msgspec import Struct

Space = Literal["weight", "state", "arena", "input", "scratch"]


class TensorSpec(Struct, frozen=True):
    """Where a tensor lives.

    Attributes:
        name: graph name, for people; unique in a plan.
        dtype: torch spelling without the prefix: "bfloat16", "float32", "int32", "int64",
            "uint8".
        shape: in elements.
        strides: in elements.
        space: the memory it lives in. Scratch belongs to one launch of one plan and keeps its
            content from run to run.
        storage: weight, state or input name; empty in the arena and in scratch, but for `LOOSE`.
        offset: bytes from the start of the storage, arena or scratch.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    space: Space
    storage: str
    offset: int


class Ref(Struct, frozen=True, tag="ref"):
    """An argument that is one tensor: its index in `Plan.tensors`."""

    tensor: int


class Refs(Struct, frozen=True, tag="refs"):
    """An argument that is a list of tensors."""

    tensors: tuple[int, ...]


class Const(Struct, frozen=True, tag="const"):
    """An argument known at build time."""

    value: bool | int | float | str | None


class Numbers(Struct, frozen=True, tag="numbers"):
    """An argument that is a list of numbers."""

    values: tuple[int | float, ...]


class DType(Struct, frozen=True, tag="dtype"):
    """An argument that is a dtype, spelled as in `TensorSpec.dtype`."""

    name: str


Argument = Ref | Refs | Const | Numbers | DType


class TensorParam(Struct, frozen=True, tag="tensor"):
    """Kernel parameter: address of a tensor, by its index in `Plan.tensors`."""

    tensor: int


class TableParam(Struct, frozen=True, tag="table"):
    """Kernel parameter: address of a table of the 64-bit addresses of tensors, row by row.

    Attributes:
        tensors: indices in `Plan.tensors`.
    """

    tensors: tuple[int, ...]


class PeersParam(Struct, frozen=True, tag="peers"):
    """Kernel parameter: address of the rank's table of peers, one for all launches of an engine.

    Attributes:
        num_bytes: most that the launch sends to each other rank.
    """

    num_bytes: int


class IntParam(Struct, frozen=True, tag="int"):
    """Kernel parameter: int32."""

    value: int


class FloatParam(Struct, frozen=True, tag="float"):
    """Kernel parameter: float32."""

    value: float


KernelParam = TensorParam | TableParam | PeersParam | IntParam | FloatParam


class Kernel(Struct, frozen=True):
    """One kernel of a launch on a GPU; see `plugins.tactic.KernelLaunch` for what is not said here.

    Attributes:
        cubin: name of the compiled code in the engine file.
        entry: of the kernel in it.
        grid: blocks in x, y, z.
        block: threads in x, y, z.
        cluster: blocks per cluster in x; 1 for none.
    """

    cubin: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: int
    smem_bytes: int
    pdl: bool
    cooperative: bool
    params: tuple[KernelParam, ...]


class Fill(Struct, frozen=True):
    """Bytes of the scratch memory that hold `value` before the first run."""

    offset: int
    size: int
    value: int


class Launch(Struct, frozen=True):
    """One plugin call.

    Attributes:
        op: plugin name without namespace.
        tactic: how it runs on the engine's target; "reference" on the CPU.
        args: by parameter name of the plugin's reference.
        outputs: indices in `Plan.tensors`, in the order the reference returns them.
        module: path of the module it comes from, e.g. "layers.5.attn"; for people.
        bytes: least bytes moved through memory; without a tactic's own count, every tensor argument
            and output once.
        kernels: what runs on a GPU, in order; empty on the CPU.
    """

    op: str
    tactic: str
    args: dict[str, Argument]
    outputs: tuple[int, ...]
    module: str
    bytes: int
    kernels: tuple[Kernel, ...] = ()


class Plan(Struct, frozen=True):
    """A step that an executor can run.

    Attributes:
        name: "decode", "verify4", "prefill64", "draft", "vision16".
        num_tokens: rows T that the step takes; a call may use fewer (`num_tokens` input).
        num_rows: rows R of its outputs: T, 1 where only the last row is wanted, or the drafts of a
            block.
        tensors: everything that launches refer to.
        launches: in execution order.
        arena_bytes: size of the memory that tensors share by lifetime.
        scratch_bytes: size of the memory that launches keep from run to run.
        fills: what scratch holds before the first run.
        inputs: input name to tensor index.
        outputs: "tokens" int32 [R] and "logits" float32 [R, vocabulary]; of a draft step with a
            confidence head, "confidences" float32 [R] too. Of a tower, "features" [R, D] alone.
    """

    name: str
    num_tokens: int
    num_rows: int
    tensors: tuple[TensorSpec, ...]
    launches: tuple[Launch, ...]
    arena_bytes: int
    inputs: dict[str, int]
    outputs: dict[str, int]
    scratch_bytes: int = 0
    fills: tuple[Fill, ...] = ()


def dangling(plan: Plan, cubins: Container[str]) -> str | None:
    """What a plan refers to but does not have, in words; None if all is there.

    Args:
        plan: to check.
        cubins: names of the code that is there.
    """
    count = len(plan.tensors)
    for launch in plan.launches:
        used = [*launch.outputs]
        for argument in launch.args.values():
            if isinstance(argument, Ref):
                used.append(argument.tensor)
            elif isinstance(argument, Refs):
                used.extend(argument.tensors)
        for kernel in launch.kernels:
            if kernel.cubin not in cubins:
                return f"step {plan.name}, {launch.op}: no code {kernel.cubin}"
            for param in kernel.params:
                if isinstance(param, TensorParam):
                    used.append(param.tensor)
                elif isinstance(param, TableParam):
                    used.extend(param.tensors)
        for index in used:
            if not 0 <= index < count:
                return f"step {plan.name}, {launch.op}: no tensor {index} of {count}"
    return None


def kernel_params(plan: Plan) -> Iterator[KernelParam]:
    """Parameters of all kernels of a plan."""
    for launch in plan.launches:
        for kernel in launch.kernels:
            yield from kernel.params


def slot_bytes(plans: Iterable[Plan]) -> int:
    """Size of what one rank sends another in one launch of the plans at most; 0 if none sends."""
    sizes = (p.num_bytes for x in plans for p in kernel_params(x) if isinstance(p, PeersParam))
    return -(-max(sizes, default=0) // INBOX_ALIGNMENT) * INBOX_ALIGNMENT


def inbox_bytes(plans: Iterable[Plan], num_ranks: int) -> int:
    """Bytes that a rank keeps so that others can send it something: inbox, state and addresses."""
    slot = slot_bytes(plans)
    table = (PEER_WORDS + 2 * num_ranks) * ADDRESS_BYTES
    return slot and INBOX_BUFFERS * num_ranks * slot + TURN_BYTES + table


def tables(plan: Plan) -> list[TableParam]:
    """The tables that a plan's kernels read, each once."""
    params = kernel_params(plan)
    return list(dict.fromkeys(param for param in params if isinstance(param, TableParam)))


def table_bytes(plan: Plan) -> int:
    """Bytes of a plan's tables."""
    return ADDRESS_BYTES * sum(len(table.tensors) for table in tables(plan))


ADDRESS_BYTES = 8
# Of an inbox: buffers that launches use in turn, and what slots are aligned to. In front of the
# addresses a table of peers has this many words. See `plugins/all_reduce/push.cuh`.
INBOX_BUFFERS, INBOX_ALIGNMENT, PEER_WORDS = 3, 256, 3
# Eight bytes for each block of the largest grid.
TURN_BYTES = 8 * 132
# Storage of scratch that an engine has no memory for: of launches that a benchmark makes up.
LOOSE = "loose"
# Storage of scratch that is the state of rounds of speculation, one for all plans of a rank.
ROUND_STATE_STORAGE = "round state"
DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "int32": 4, "int64": 8, "uint8": 1}


def weight_specs(plans: Mapping[str, Plan]) -> dict[str, TensorSpec]:
    """How the plans of an engine read every weight, by its name: packed, where kernels do."""
    specs: dict[str, TensorSpec] = {}
    for plan in plans.values():
        for spec in plan.tensors:
            is_packed = spec.dtype == "uint8" and len(spec.shape) == 1
            is_whole = spec.offset == 0 and spec.storage not in specs
            if spec.space == "weight" and (is_packed or is_whole):
                specs[spec.storage] = spec
    return specs
