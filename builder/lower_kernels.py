"""Lowering a launch to kernels: a tactic's parameters become tensors of the plan.

Weights that a tactic reads in a layout of its own are noted here; packing writes them in that
layout, and every launch of every step that reads such a weight must want the same one.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from inkrt.builder.compile import Compiler
from inkrt.errors import BuildError
from inkrt.plugins.tactic import (
    Float32,
    InputPointer,
    Int32,
    KernelLaunch,
    Output,
    Packing,
    Param,
    Peers,
    Scratch,
    Table,
    Tactic,
    TensorArg,
)
from inkrt.runtime.plan import (
    Argument,
    FloatParam,
    IntParam,
    Kernel,
    KernelParam,
    PeersParam,
    Ref,
    Refs,
    TableParam,
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
    inputs: dict[str, int]

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
    ) -> tuple[Kernel, ...]:
        """Kernels of a launch.

        Args:
            tactic: what to lower.
            args: of the launch, by parameter name.
            outputs: tensors that the launch writes, in order.
        """
        packed = self._pack(tactic, args)
        scratch: dict[str, int] = {}

        def tensors_of(name: str) -> tuple[int, ...]:
            return packed[name] if name in packed else _tensors(name, args[name])

        def lower_param(param: Param) -> KernelParam:
            if isinstance(param, Peers | Int32 | Float32):
                return _fixed(param)
            if isinstance(param, Output):
                return TensorParam(outputs[param.index])
            if isinstance(param, InputPointer):
                return TensorParam(self._memory.inputs[param.name])
            if isinstance(param, Scratch):
                if param.name not in scratch:
                    scratch[param.name] = self._scratch(param)
                return TensorParam(scratch[param.name])
            if isinstance(param, Table):
                rows = zip(*(tensors_of(name) for name in param.arguments), strict=True)
                return TableParam(tuple(index for row in rows for index in row))
            return TensorParam(tensors_of(param.argument)[param.index])

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

    def _pack(self, tactic: Tactic, args: dict[str, Argument]) -> dict[str, tuple[int, ...]]:
        """Indices of the packed weights, one per element, for every packing's first argument."""
        packed = {}
        for packing in tactic.packings:
            elements = zip(*(_tensors(name, args[name]) for name in packing.arguments), strict=True)
            indices = tuple(self._pack_weights(packing, weights) for weights in elements)
            packed[packing.arguments[0]] = indices
        return packed

    def _pack_weights(self, packing: Packing, weights: tuple[int, ...]) -> int:
        """Index of the weight that `weights` are packed to."""
        specs = [self._memory.specs[index] for index in weights]
        assert all(spec.space == "weight" for spec in specs), f"{packing.name} of what is no weight"
        storages = tuple(spec.storage for spec in specs)
        self._packed.add(packing, storages)
        if storages[0] not in self._packed_index:
            shapes = [TensorArg(spec.shape, getattr(torch, spec.dtype)) for spec in specs]
            self._packed_index[storages[0]] = self._memory.add_packed(
                packing.name, storages[0], packing.num_bytes(shapes)
            )
        return self._packed_index[storages[0]]


def _fixed(param: Peers | Int32 | Float32) -> KernelParam:
    """A parameter that no tensor of the call is part of."""
    if isinstance(param, Peers):
        return PeersParam(param.num_bytes)
    return IntParam(param.value) if isinstance(param, Int32) else FloatParam(param.value)


def _tensors(name: str, argument: Argument) -> tuple[int, ...]:
    """The tensors of an argument, which is a tensor or a list of them."""
    if isinstance(argument, Refs):
        return argument.tensors
    assert isinstance(argument, Ref), f"argument {name}, which a kernel reads, is no tensor"
    return (argument.tensor,)
