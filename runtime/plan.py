"""The plan: one lowered step as an ordered list of launches over named tensors.

This module owns the types of what an engine executes and knows neither how plans are made
(builder) nor how they run (runtime.executor). Every rank of an engine runs the same plan.
"""

from typing import Literal

from msgspec import Struct

Space = Literal["weight", "state", "arena", "input"]


class TensorSpec(Struct, frozen=True):
    """Where a tensor lives.

    Attributes:
        name: graph name, for people; unique in a plan.
        dtype: torch spelling without the prefix: "bfloat16", "float32", "int32", "int64".
        shape: in elements.
        strides: in elements.
        space: the memory it lives in.
        storage: weight, state or input name; empty in the arena.
        offset: bytes from the start of the storage (arena: from the start of the arena).
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


class DType(Struct, frozen=True, tag="dtype"):
    """An argument that is a dtype, spelled as in `TensorSpec.dtype`."""

    name: str


Argument = Ref | Refs | Const | DType


class Launch(Struct, frozen=True):
    """One plugin call.

    Attributes:
        op: plugin name without namespace.
        tactic: how it runs on the engine's target; "reference" on the CPU.
        args: by parameter name of the plugin's reference.
        outputs: indices in `Plan.tensors`, in the order the reference returns them.
        module: path of the module it comes from, e.g. "layers.5.attn"; for people.
        bytes: least bytes moved through memory, counting each tensor argument and output once.
    """

    op: str
    tactic: str
    args: dict[str, Argument]
    outputs: tuple[int, ...]
    module: str
    bytes: int


class Plan(Struct, frozen=True):
    """A step that an executor can run.

    Attributes:
        name: "decode", "verify4", "prefill64".
        num_tokens: rows T that the step takes; a call may use fewer (`num_tokens` input).
        num_rows: rows R of its outputs: T, or 1 where only the last row is wanted.
        tensors: everything that launches refer to.
        launches: in execution order.
        arena_bytes: size of the scratch memory.
        inputs: input name to tensor index.
        outputs: "tokens" int32 [R] and "logits" float32 [R, vocabulary].
    """

    name: str
    num_tokens: int
    num_rows: int
    tensors: tuple[TensorSpec, ...]
    launches: tuple[Launch, ...]
    arena_bytes: int
    inputs: dict[str, int]
    outputs: dict[str, int]


DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "int32": 4, "int64": 8}
