"""Lowering: a fused graph becomes a plan.

A node is a view, which costs nothing, or a call of one of our operators, which becomes a launch.
Anything else is a build error: an engine never falls back to eager torch.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from inkrt.builder.compile import Compiler
from inkrt.builder.lower_kernels import KernelLowering, PackedWeights
from inkrt.builder.memory import ALIGNMENT, Lifetime, plan_arena
from inkrt.builder.rewrite import VIEW_OPS, arguments, module_path
from inkrt.builder.tactics import TacticChooser, choose_tactic
from inkrt.builder.trace import StepGraph
from inkrt.errors import BuildError
from inkrt.plugins.registry import NAMESPACE, Plugin, plugins
from inkrt.runtime.plan import (
    DTYPE_BYTES,
    Argument,
    Const,
    DType,
    Fill,
    Kernel,
    Launch,
    Numbers,
    Plan,
    Ref,
    Refs,
    Space,
    TensorSpec,
)


@dataclass(slots=True)
class Target:
    """What plans are lowered for.

    Attributes:
        name: "cpu" or a GPU architecture.
        compiler: collects the cubins of all plans; None on the CPU.
        packed: collects the layouts of weights of all plans.
        shares_arena: whether tensors that are never needed at once share memory.
        chooser: chooses tactics; None takes the first ones.
    """

    name: str
    compiler: Compiler | None = None
    packed: PackedWeights = field(default_factory=PackedWeights)
    shares_arena: bool = True
    chooser: TacticChooser | None = None


def lower(graph: StepGraph, target: Target | None = None) -> Plan:
    """Lower a graph after all passes, for the CPU if no target is given.

    Raises:
        BuildError: a node is neither a view nor one of our operators, or an operator has no kernel
            for the target.
    """
    return _Lowering(graph, target or Target("cpu")).plan()


def start_compiling(graph: StepGraph, target: Target) -> None:
    """Begin to compile what `lower` will want for a graph after all passes, on a GPU target.

    Raises:
        BuildError: an operator has no kernel for the target.
    """
    if target.compiler is None:
        return
    chooser = target.chooser or TacticChooser(target.name)
    for node, plugin in operator_nodes(graph):
        target.compiler.start(choose_tactic(node, plugin, target.name, chooser).kernels)


def operator_nodes(graph: StepGraph) -> Iterator[tuple[Node, Plugin]]:
    """Calls of operators of ours, in order."""
    for node in graph.module.graph.nodes:
        if _is_operator(node):
            yield node, plugins()[_name_of(node)]


def _is_operator(node: Node) -> bool:
    """Whether the node calls an operator of ours."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == NAMESPACE


def _name_of(node: Node) -> str:
    """Name of the operator of ours that the node calls."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return str(node.target._schema.name.split("::")[1])


class _Lowering:
    """State of one lowering: tensors and launches so far, and who needs which bytes until when."""

    def __init__(self, graph: StepGraph, target: Target) -> None:
        self.graph = graph
        self.target = target
        self.kernels = (
            KernelLowering(self, target.compiler, target.packed) if target.compiler else None
        )
        self.chooser = target.chooser or TacticChooser(target.name)
        self.scratch_bytes = 0
        self.fills: list[Fill] = []
        self.specs: list[TensorSpec] = []
        self.inputs: dict[str, int] = {}
        self.index_of: dict[Node, int] = {}
        self.outputs_of: dict[Node, tuple[int, ...]] = {}
        self.launches: list[Launch] = []
        # Arena tensors that views share: index of a tensor to the index of the one that owns bytes.
        self.owner: dict[int, int] = {}
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}

    def plan(self) -> Plan:
        outputs: dict[str, int] = {}
        for node in self.graph.module.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                outputs = {
                    name: self.index_of[value]
                    for name, value in zip(self.graph.outputs, node.args[0], strict=False)
                }
            elif node.op == "call_function":
                self._call(node)
            else:
                raise BuildError(f"{_where(node)}: graph node {node.op} cannot be lowered")
        for index in outputs.values():
            self.last[self.owner[index]] = len(self.launches)
        arena_bytes = self._place()
        step = self.graph.step
        return Plan(
            name=step.name,
            num_tokens=step.num_tokens,
            num_rows=step.num_rows,
            tensors=tuple(self.specs),
            launches=tuple(self.launches),
            arena_bytes=arena_bytes,
            inputs=self.inputs,
            outputs=outputs,
            scratch_bytes=self.scratch_bytes,
            fills=tuple(self.fills),
        )

    def add_temporary(self, name: str, num_bytes: int) -> int:
        """See `Memory`."""
        index = self._add_bytes(name, num_bytes, "arena")
        self.owner[index] = index
        self.first[index] = self.last[index] = len(self.launches)
        return index

    def add_scratch(self, name: str, num_bytes: int, fill: int) -> int:
        """See `Memory`."""
        offset = -(-self.scratch_bytes // ALIGNMENT) * ALIGNMENT
        self.scratch_bytes = offset + num_bytes
        self.fills.append(Fill(offset, num_bytes, fill))
        return self._add_bytes(name, num_bytes, "scratch", offset=offset)

    def add_packed(self, name: str, storage: str, num_bytes: int) -> int:
        """See `Memory`."""
        return self._add_bytes(name, num_bytes, "weight", storage=storage)

    def _add_bytes(
        self, name: str, num_bytes: int, space: Space, *, storage: str = "", offset: int = 0
    ) -> int:
        unique = f"{name}.{len(self.specs)}"
        spec = TensorSpec(unique, "uint8", (num_bytes,), (1,), space, storage, offset)
        self.specs.append(spec)
        return len(self.specs) - 1

    def _placeholder(self, node: Node) -> None:
        if node.name in self.graph.weights:
            index = self._add(node, node.meta["val"], "weight", self.graph.weights[node.name])
        elif node.name in self.graph.state:
            index = self._add(node, node.meta["val"], "state", self.graph.state[node.name])
        else:
            if node.name not in self.graph.inputs:
                raise BuildError(
                    f"{node.name} is neither a weight, a state buffer nor an input of a step; a "
                    f"tensor that the module makes itself must become a parameter"
                )
            index = self._add(node, node.meta["val"], "input", node.name)
            self.inputs[node.name] = index
        self.index_of[node] = index

    def _call(self, node: Node) -> None:
        if node.target is operator.getitem:
            source, position = node.args
            self.index_of[node] = self.outputs_of[source][position]  # type: ignore[index]
        elif node.target in VIEW_OPS:
            self._view(node)
        elif node.target is torch.ops.aten._assert_tensor_metadata.default:
            pass  # export puts it before conversions, which are refused under their own name
        elif _is_operator(node):
            self._launch(node)
        else:
            raise BuildError(
                f"{_where(node)}: {node.target} is neither a view nor an operator of ours; there "
                f"is no fallback to eager torch, express it with an {NAMESPACE}:: operator"
            )

    def _view(self, node: Node) -> None:
        base = self.index_of[node.args[0]]  # type: ignore[index]
        value = node.meta["val"]
        spec, base_value = self.specs[base], node.args[0].meta["val"]  # type: ignore[union-attr]
        shift = value.storage_offset() - base_value.storage_offset()
        index = self._add(
            node,
            value,
            spec.space,
            spec.storage,
            offset=spec.offset + shift * DTYPE_BYTES[spec.dtype],
        )
        if base in self.owner:
            self.owner[index] = self.owner[base]
        self.index_of[node] = index

    def _launch(self, node: Node) -> None:
        plugin = plugins()[_name_of(node)]
        args = {key: self._argument(value) for key, value in arguments(node).items()}
        value = node.meta["val"]
        values: tuple[Tensor, ...] = () if value is None else (value,)
        if isinstance(value, tuple | list):
            values = tuple(value)
        outputs = []
        for number, result in enumerate(values):
            suffix = f".{number}" if len(values) > 1 else ""
            index = self._add(node, result, "arena", "", suffix=suffix)
            self.owner[index] = index
            self.first[index] = self.last[index] = len(self.launches)
            outputs.append(index)
        self.outputs_of[node] = tuple(outputs)
        if len(outputs) == 1:
            self.index_of[node] = outputs[0]
        tactic_name = "reference"
        kernels: tuple[Kernel, ...] = ()
        num_bytes = self._bytes(args) + sum(_num_bytes(self.specs[i]) for i in outputs)
        if self.kernels is not None:
            tactic = choose_tactic(node, plugin, self.target.name, self.chooser)
            tactic_name, num_bytes = tactic.name, tactic.bytes
            kernels = self.kernels.lower(tactic, args, tuple(outputs))
        self.launches.append(
            Launch(
                op=plugin.name,
                tactic=tactic_name,
                args=args,
                outputs=tuple(outputs),
                module=module_path(node),
                bytes=num_bytes,
                kernels=kernels,
            )
        )

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, Node):
            return Ref(self._use(value))
        if isinstance(value, list | tuple) and all(isinstance(item, Node) for item in value):
            return Refs(tuple(self._use(item) for item in value))
        if isinstance(value, list | tuple) and all(isinstance(x, int | float) for x in value):
            return Numbers(tuple(value))
        if isinstance(value, torch.dtype):
            return DType(str(value).removeprefix("torch."))
        if value is None or isinstance(value, bool | int | float | str):
            return Const(value)
        raise BuildError(f"operator argument {value!r} cannot stand in a plan")

    def _use(self, node: Node) -> int:
        index = self.index_of[node]
        if index in self.owner:
            self.last[self.owner[index]] = len(self.launches)
        return index

    def _bytes(self, args: dict[str, Argument]) -> int:
        total = 0
        for argument in args.values():
            if isinstance(argument, Ref):
                total += _num_bytes(self.specs[argument.tensor])
            elif isinstance(argument, Refs):
                total += sum(_num_bytes(self.specs[index]) for index in argument.tensors)
        return total

    def _add(
        self,
        node: Node,
        value: Tensor,
        space: Space,
        storage: str,
        *,
        offset: int = 0,
        suffix: str = "",
    ) -> int:
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise BuildError(f"{_where(node)}: dtype {dtype} cannot stand in a plan")
        self.specs.append(
            TensorSpec(
                name=node.name + suffix,
                dtype=dtype,
                shape=tuple(value.shape),
                strides=tuple(value.stride()),
                space=space,
                storage=storage,
                offset=offset,
            )
        )
        return len(self.specs) - 1

    def _place(self) -> int:
        """Fix the offsets of arena tensors; views keep their distance to the tensor they view."""
        owners = sorted(self.first)
        lifetimes = [
            Lifetime(_num_bytes(self.specs[index]), self.first[index], self.last[index])
            if self.target.shares_arena
            else Lifetime(_num_bytes(self.specs[index]), 0, len(self.launches))
            for index in owners
        ]
        placed, arena_bytes = plan_arena(lifetimes)
        offset_of = dict(zip(owners, placed, strict=True))
        for index, owner in self.owner.items():
            spec = self.specs[index]
            self.specs[index] = TensorSpec(
                name=spec.name,
                dtype=spec.dtype,
                shape=spec.shape,
                strides=spec.strides,
                space=spec.space,
                storage=spec.storage,
                offset=spec.offset + offset_of[owner],
            )
        return arena_bytes


def _num_bytes(spec: TensorSpec) -> int:
    """Bytes of a tensor's elements, each counted once (a broadcast dimension has stride 0)."""
    count = 1
    for size, stride in zip(spec.shape, spec.strides, strict=True):
        count *= size if stride else 1
    return count * DTYPE_BYTES[spec.dtype]


def _where(node: Node) -> str:
    return f"{module_path(node) or 'model'}, node {node.name}"
