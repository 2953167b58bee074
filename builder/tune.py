"""Tactics of a launch of a finished plan, lowered again so that a benchmark can run each of them.

An engine's plans hold all that tactics ask of a call: shapes, dtypes and attributes. So no
checkpoint is needed. Nothing is run here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from inkrt.builder.compile import Compiler
from inkrt.builder.lower_kernels import KernelLowering, PackedWeights
from inkrt.builder.memory import ALIGNMENT
from inkrt.builder.tactics import find_tactics
from inkrt.builder.timing_cache import KernelDigests
from inkrt.errors import BuildError
from inkrt.plugins.tactic import CallArg, CallArgs, Tactic, TensorArg, strides_of_view
from inkrt.runtime.plan import (
    LOOSE,
    Argument,
    Const,
    DType,
    Fill,
    Launch,
    Numbers,
    Plan,
    Ref,
    Refs,
    TensorSpec,
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tactic, and a plan of the launches that were given, run its way.

    Attributes:
        tactic: its name.
        kernels: see `KernelDigests`.
        plan: its scratch is outside the engine's memory (`LOOSE`), `scratch_bytes` in all.
    """

    tactic: str
    kernels: str
    plan: Plan


class Tuner:
    """Lowers candidates for one target; what it compiles is in `cubins`, by name."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._compiler = Compiler(target)
        self._digests = KernelDigests(target)

    @property
    def cubins(self) -> dict[str, bytes]:
        """Code of all candidates so far."""
        return self._compiler.cubins

    def compile(self, plan: Plan, launches: Sequence[Launch]) -> None:
        """Compile every tactic of every launch side by side, which `candidates` would do in turn.

        Raises:
            BuildError: a kernel does not compile.
        """
        tactics = [tactic for launch in launches for tactic in self._tactics(plan, launch)]
        self._compiler.compile_all(kernel for tactic in tactics for kernel in tactic.kernels)

    def candidates(self, plan: Plan, launches: Sequence[Launch]) -> list[Candidate]:
        """Every tactic of launches of one kind, in the operator's order.

        Args:
            plan: gives the tensors that the launches refer to.
            launches: calls of one operator that differ in addresses only.

        Raises:
            BuildError: a tactic wants a layout of weights that the engine does not have.
        """
        return [
            Candidate(
                tactic.name, self._digests.of_tactic(tactic), self._lower(plan, launches, tactic)
            )
            for tactic in self._tactics(plan, launches[0])
        ]

    def _tactics(self, plan: Plan, launch: Launch) -> list[Tactic]:
        return find_tactics(launch.op, self._target, call_args_of(plan, launch))

    def _lower(self, plan: Plan, launches: Sequence[Launch], tactic: Tactic) -> Plan:
        memory = _Memory(list(plan.tensors), plan.inputs, _packed_weights(plan))
        lowering = KernelLowering(memory, self._compiler, PackedWeights())
        lowered = [
            msgspec.structs.replace(
                launch,
                tactic=tactic.name,
                kernels=lowering.lower(tactic, launch.args, launch.outputs),
            )
            for launch in launches
        ]
        return msgspec.structs.replace(
            plan,
            tensors=tuple(memory.specs),
            launches=tuple(lowered),
            scratch_bytes=memory.num_bytes,
            fills=tuple(memory.fills),
        )


def call_args_of(plan: Plan, launch: Launch) -> CallArgs:
    """The arguments of a launch as tactics saw them when it was lowered."""
    return {name: _call_arg(plan, value) for name, value in launch.args.items()}


def _call_arg(plan: Plan, value: Argument) -> CallArg:
    def tensor(index: int) -> TensorArg:
        spec = plan.tensors[index]
        strides = strides_of_view(spec.shape, spec.strides)
        return TensorArg(spec.shape, getattr(torch, spec.dtype), strides)

    if isinstance(value, Ref):
        return tensor(value.tensor)
    if isinstance(value, Refs):
        return [tensor(index) for index in value.tensors]
    if isinstance(value, Numbers):
        return list(value.values)
    if isinstance(value, DType):
        dtype: torch.dtype = getattr(torch, value.name)
        return dtype
    assert isinstance(value, Const)
    return value.value


@dataclass(slots=True)
class _Memory:
    """Tensors of an engine, and scratch of candidates behind one another outside of it."""

    specs: list[TensorSpec]
    inputs: dict[str, int]
    packed: dict[tuple[str, str, int], int]
    num_bytes: int = 0
    fills: list[Fill] = field(default_factory=list)

    def add_temporary(self, name: str, num_bytes: int) -> int:
        """See `lower_kernels.Memory`."""
        offset = -(-self.num_bytes // ALIGNMENT) * ALIGNMENT
        self.num_bytes = offset + num_bytes
        unique = f"{name}.{len(self.specs)}"
        self.specs.append(TensorSpec(unique, "uint8", (num_bytes,), (1,), "scratch", LOOSE, offset))
        return len(self.specs) - 1

    def add_scratch(self, name: str, num_bytes: int, fill: int) -> int:
        """See `lower_kernels.Memory`."""
        index = self.add_temporary(name, num_bytes)
        self.fills.append(Fill(self.specs[index].offset, num_bytes, fill))
        return index

    def add_packed(self, name: str, storage: str, num_bytes: int) -> int:
        """The engine's own packed weight."""
        index = self.packed.get((name, storage, num_bytes))
        if index is None:
            raise BuildError(f"the engine has no weight {storage} packed as {name}; build it again")
        return index


def _packed_weights(plan: Plan) -> dict[tuple[str, str, int], int]:
    """Tensors by packing, weight and size; those that are not packed do no harm."""
    return {
        (spec.name.rpartition(".")[0], spec.storage, spec.shape[0]): index
        for index, spec in enumerate(plan.tensors)
        if spec.space == "weight" and spec.dtype == "uint8" and len(spec.shape) == 1
    }
