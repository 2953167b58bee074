"""Graphs of steps as ONNX models, which other tools can show, check and compile.

An operator of ours `ink::name` is `name` of the domain `ai.ink`, a view the standard operator that
gives the same values. A model holds no weights. Names of its values:

    tokens, position, ...   inputs of the step
    weight.NAME             weights, inputs too; NAME as in the engine
    state.NAME              state buffers, inputs too
    state.NAME@1, @2, ...   the same after the first, second, ... operator that writes it
    output.NAME             outputs of the step; so is the last version of every written buffer

ONNX values never change, so an operator that writes state gives new versions of what it writes,
and the next reader takes these: the order of writes and reads stands in the edges.

The arguments of an operator's schema are attributes of their names; one that is None is left out.
ONNX knows inputs by their place only, and a list has any number of them: the attribute
`input_names` says which argument each is (`x`, or `blocks[0]`), `writes` which of these the last
outputs are new versions of.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from inkrt.builder.onnx_aten import add_aten
from inkrt.builder.onnx_model import Attribute, OnnxModel, onnx_type
from inkrt.builder.rewrite import VIEW_OPS, arguments, module_path
from inkrt.builder.trace import StepGraph
from inkrt.errors import BuildError
from inkrt.plugins.registry import NAMESPACE, Plugin, plugins

if TYPE_CHECKING:
    from onnx import ModelProto


def write_steps(folder: Path, graphs: Iterable[StepGraph], plain: Iterable[StepGraph]) -> None:
    """Write graphs as `<step>.onnx` into `folder`, replacing those of an earlier build.

    Args:
        folder: is made if it is not there.
        graphs: of all steps.
        plain: of steps that have a form in standard operators too, in that; they are written as
            `<step>.standard.onnx`.

    Raises:
        BuildError: the folder cannot be written, or see `to_onnx`.
    """
    files = {
        f"{graph.step.name}.{ending}": to_onnx(graph).SerializeToString(deterministic=True)
        for ending, group in (("onnx", graphs), ("standard.onnx", plain))
        for graph in group
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise BuildError(
            f"onnx folder {folder} cannot be written ({error.strerror}); name another one"
        ) from error


def to_onnx(graph: StepGraph) -> "ModelProto":
    """A graph as an ONNX model without weights.

    Raises:
        BuildError: a node is neither an operator of ours nor an ATen operator that has a rule, or
            state is written through a view.
    """
    return _Export(graph).model()


class _Export:
    """One export: the model so far, and how often each buffer has been written."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.onnx = OnnxModel(graph.step.name)
        self.writes: dict[Node, int] = {}

    def model(self) -> "ModelProto":
        for node in self.graph.module.graph.nodes:
            self.onnx.begin(node.name, module_path(node))
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                self._outputs(node)
            elif node.op == "call_function":
                self._call(node)
            else:
                raise BuildError(f"{_where(node)}: graph node {node.op} cannot be exported")
        return self.onnx.finish()

    def _placeholder(self, node: Node) -> None:
        name = node.name
        if name in self.graph.weights:
            name = f"weight.{self.graph.weights[name]}"
        elif name in self.graph.state:
            name = f"state.{self.graph.state[name]}"
        self.onnx.add_input(node, name)

    def _outputs(self, node: Node) -> None:
        values = node.args[0]
        assert isinstance(values, list | tuple)
        for name, value in zip(self.graph.outputs, values, strict=False):
            assert isinstance(value, Node)
            self.onnx.add_node("Identity", [self.onnx.name_of(value)], [f"output.{name}"])
            self.onnx.add_output(f"output.{name}", value.meta["val"])
        for buffer in self.writes:
            self.onnx.add_output(self.onnx.name_of(buffer), buffer.meta["val"])

    def _call(self, node: Node) -> None:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE:
            self._operator(node, plugins()[target._schema.name.split("::")[1]])
        elif not self.onnx.has(node):  # else the result of an operator of ours, chosen by number
            if node.target in VIEW_OPS:
                self._require_fixed(node)
            add_aten(self.onnx, node, _where(node))

    def _require_fixed(self, node: Node) -> None:
        """A view of state would have to follow what is written later."""
        base = node.args[0]
        assert isinstance(base, Node)
        if base.name in self.graph.state:
            raise BuildError(
                f"{_where(node)}: a view of state {self.graph.state[base.name]} cannot be "
                f"exported; give the operator the whole buffer"
            )

    def _operator(self, node: Node, plugin: Plugin) -> None:
        inputs, attributes, written = self._arguments(node, plugin)
        outputs = []
        for name, value, readers in _results(node):
            outputs.append(name)
            self.onnx.add_value(name, value)
            for reader in readers:
                self.onnx.set_name(reader, name)
        if written:
            attributes["writes"] = [name for name, _ in written]
        for _, buffer in written:
            if buffer in self.writes:  # what it was until now is no output
                self.onnx.add_value(self.onnx.name_of(buffer), buffer.meta["val"])
            self.writes[buffer] = self.writes.get(buffer, 0) + 1
            name = f"state.{self.graph.state[buffer.name]}@{self.writes[buffer]}"
            outputs.append(name)
            self.onnx.set_name(buffer, name)
        attributes["input_names"] = [name for name, _ in inputs]
        values = [value for _, value in inputs]
        self.onnx.add_operator(plugin.name, plugin.version, values, outputs, attributes)

    def _arguments(
        self, node: Node, plugin: Plugin
    ) -> tuple[list[tuple[str, str]], dict[str, Attribute], list[tuple[str, Node]]]:
        """Inputs with their names in the operator's schema, attributes, and buffers it writes."""
        assert isinstance(node.target, torch._ops.OpOverload)
        given = arguments(node)
        inputs: list[tuple[str, str]] = []
        attributes: dict[str, Attribute] = {}
        written: list[tuple[str, Node]] = []
        for argument in node.target._schema.arguments:
            name = argument.name
            value = given.get(name, argument.default_value)
            tensors = {name: value}
            if isinstance(value, list | tuple):
                tensors = {f"{name}[{i}]": item for i, item in enumerate(value)}
            nodes = {key: item for key, item in tensors.items() if isinstance(item, Node)}
            inputs += [(key, self.onnx.name_of(item)) for key, item in nodes.items()]
            if name in plugin.mutates:
                written += [(key, self._buffer(node, item)) for key, item in nodes.items()]
            if not nodes and value is not None and "Tensor" not in str(argument.type):
                attributes[name] = _attribute(value, str(argument.type))
        return inputs, attributes, written

    def _buffer(self, node: Node, written: Node) -> Node:
        if written.name not in self.graph.state:
            raise BuildError(f"{_where(node)}: it writes {written.name}, which is no state buffer")
        return written


def _results(node: Node) -> list[tuple[str, Tensor, list[Node]]]:
    """Name and type of every result of an operator, and the nodes that stand for it."""
    value = node.meta["val"]
    if value is None:
        return []
    if isinstance(value, Tensor):
        return [(node.name, value, [node])]
    return [
        (f"{node.name}.{i}", item, [user for user in node.users if user.args[1] == i])
        for i, item in enumerate(value)
    ]


def _attribute(value: Any, kind: str) -> Attribute:
    """A value of an operator's schema as an ONNX attribute; numbers there are float32 or int64."""
    if isinstance(value, torch.dtype):
        return onnx_type(value)
    if isinstance(value, list | tuple):
        return [float(x) if "float" in kind else int(x) for x in value]
    if isinstance(value, str):
        return value
    return float(value) if "float" in kind else int(value)


def _where(node: Node) -> str:
    return f"{module_path(node) or 'model'}, node {node.name}"
