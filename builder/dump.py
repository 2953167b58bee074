"""Graphs as text, for people and for the snapshot tests of passes."""

import operator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from inkrt.builder.rewrite import arguments, module_path
from inkrt.builder.trace import StepGraph

_SHORT = {
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


def graph_text(graph: StepGraph) -> str:
    """One line per call: `%name: f32[2, 3] = ink::op(x=%a, eps=1e-06)  # module path`.

    Weights and state read as `weight(name)` and `state(name)`.
    """
    names = {name: f"weight({target})" for name, target in graph.weights.items()}
    names |= {name: f"state({target})" for name, target in graph.state.items()}
    lines = []
    for node in graph.module.graph.nodes:
        if node.op == "placeholder":
            if node.name not in names:
                lines.append(f"input %{node.name}: {_type(node.meta['val'])}")
        elif node.op == "output":
            lines.append(f"return {_value(node.args[0], names)}")
        else:
            lines.append(_line(node, names))
    return "\n".join(lines) + "\n"


def write_graph(folder: Path, number: int, name: str, graph: StepGraph) -> None:
    """Write `<step>.<number>.<pass>.txt` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{graph.step.name}.{number:02}.{name}.txt"
    path.write_text(graph_text(graph), encoding="utf-8")


def _line(node: Node, names: dict[str, str]) -> str:
    if node.target is operator.getitem:
        call = f"{_value(node.args[0], names)}.{node.args[1]}"
    elif not isinstance(node.target, torch._ops.OpOverload):
        # Nothing that can be lowered, but people dump graphs to see what is wrong with them.
        call = f"{node.op} {node.target}({_value(node.args, names)})"
    else:
        values = ", ".join(
            f"{key}={_value(value, names)}" for key, value in arguments(node).items()
        )
        call = f"{node.target._schema.name}({values})"
    path = module_path(node)
    comment = f"  # {path}" if path else ""
    value = node.meta.get("val")
    typed = f": {_type(value)}" if value is not None else ""
    return f"%{node.name}{typed} = {call}{comment}"


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_dtype(value.dtype)}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(_type(item) for item in value) + ")"
    return type(value).__name__


def _dtype(dtype: torch.dtype) -> str:
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def _value(value: Any, names: dict[str, str]) -> str:
    if isinstance(value, Node):
        return names.get(value.name, f"%{value.name}")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item, names) for item in value) + "]"
    if isinstance(value, torch.dtype):
        return _dtype(value)
    return repr(value)
