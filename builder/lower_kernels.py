"""Lowering a launch to kernels: a tactic's parameters become tensors of the plan.

Weights that a tactic reads in a layout of its own are noted here; packing writes them in that
layout, and every launch of every step that reads such a weight must want the same one.
"""

from dataclasses import dataclass, field
from typing import Protocol

from inkrt.builder.compile import Compiler
from inkrt.errors import BuildError
from inkrt.plugins.tactic import (
    Float32,
    Int32,
    KernelLaunch,
    Output,
    Packing,
    Param,
    Pointer,
    Scratch,
    Tactic,
    TensorArg,
)
from inkrt.runtime.plan import (
    Argument,
    FloatParam,
    IntParam,
    Kernel,
    KernelParam,
    Ref,
    Refs,
    TensorParam,
    TensorSpec,
)


@dataclass(slots=True)
class PackedWeights:
    """Layouts that the plans of an engine want for weights.

    Attributes:
        packings: packing and the weights it reads, by the name of the first of them.
    """

    packings: dict[str, tuple[Packing, tuple[str, ...]]] = field(default_factory=dict)

    def add(self, packing: Packing, storages: tuple[str, ...]) -> None:
        """Note that a launch reads `storages` in the layout of `packing`.

        Raises:
            BuildError: another launch wants another layout.
        """
        known = self.packings.setdefault(storages[0], (packing, storages))
        if known[0].name != packing.name or known[1] != storages:
            raise BuildError(
                f"weight {storages[0]} is read as {known[0].name} and as {packing.name}; "
                f"one engine can hold one layout only, exclude one of the tactics"
            )


class Memory(Protocol):
    """What a lowering gives to allocate from."""

    specs: list[TensorSpec]

    def add_temporary(self, name: str, num_bytes: int) -> int:
        """A uint8 tensor for this launch alone; gives its index."""
        ...

    def add_scratch(self, name: str, num_bytes: int, fill: int) -> int:
        """A uint8 tensor that keeps its content from run to run; gives its index."""
        ...

    def add_packed(self, name: str, storage: str, num_bytes: int) -> int:
        """A packed weight; gives its index."""
        ...


class KernelLowering:
    """Lowers the launches of one plan."""

    def __init__(self, memory: Memory, compiler: Compiler, packed: PackedWeights) -> None:
        self._memory = memory
        self._compiler = compiler
        self._packed = packed
        self._packed_index: dict[str, int] = {}

    def lower(
        self,
        tactic: Tactic,
        args: dict[str, Argument],
        outputs: tuple[int, ...],
        shapes: dict[str, TensorArg],
    ) -> tuple[Kernel, ...]:
        """Kernels of a launch.

        Args:
            tactic: what to lower.
            args: of the launch, by parameter name.
            outputs: tensors that the launch writes, in order.
            shapes: of the tensor arguments that are no lists.
        """
        replaced = self._pack(tactic, args, shapes)
        scratch: dict[str, int] = {}

        def lower_param(param: Param) -> KernelParam:
            if isinstance(param, Int32):
                return IntParam(param.value)
            if isinstance(param, Float32):
                return FloatParam(param.value)
            if isinstance(param, Output):
                return TensorParam(outputs[param.index])
            if isinstance(param, Scratch):
                if param.name not in scratch:
                    scratch[param.name] = self._scratch(param)
                return TensorParam(scratch[param.name])
            if param.argument in replaced:
                return TensorParam(replaced[param.argument])
            return TensorParam(_pointer(param, args[param.argument]))

        return tuple(
            self._kernel(kernel, tuple(lower_param(param) for param in kernel.params))
            for kernel in tactic.kernels
        )

    def _kernel(self, kernel: KernelLaunch, params: tuple[KernelParam, ...]) -> Kernel:
        return Kernel(
            cubin=self._compiler.compile(kernel),
            entry=kernel.entry,
            grid=kernel.grid,
            block=kernel.block,
            cluster=kernel.cluster,
            smem_bytes=kernel.smem_bytes,
            pdl=kernel.pdl,
            cooperative=kernel.cooperative,
            params=params,
        )

    def _scratch(self, param: Scratch) -> int:
        if param.fill is None:
            return self._memory.add_temporary(param.name, param.num_bytes)
        return self._memory.add_scratch(param.name, param.num_bytes, param.fill)

    def _pack(
        self, tactic: Tactic, args: dict[str, Argument], shapes: dict[str, TensorArg]
    ) -> dict[str, int]:
        """Index of the packed weight for the first argument of every packing."""
        replaced = {}
        for packing in tactic.packings:
            storages = tuple(self._weight(args[name]) for name in packing.arguments)
            self._packed.add(packing, storages)
            if storages[0] not in self._packed_index:
                num_bytes = packing.num_bytes([shapes[name] for name in packing.arguments])
                self._packed_index[storages[0]] = self._memory.add_packed(
                    packing.name, storages[0], num_bytes
                )
            replaced[packing.arguments[0]] = self._packed_index[storages[0]]
        return replaced

    def _weight(self, argument: Argument) -> str:
        assert isinstance(argument, Ref), "only a single tensor can be packed"
        spec = self._memory.specs[argument.tensor]
        assert spec.space == "weight", f"{spec.name} is packed but no weight"
        return spec.storage


def _pointer(param: Pointer, argument: Argument) -> int:
    if isinstance(argument, Refs):
        return argument.tensors[param.index]
    assert isinstance(argument, Ref), f"kernel parameter {param.argument} is not a tensor"
    return argument.tensor
