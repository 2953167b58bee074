"""Gate of the attention's output -> relative_attention, whose kernel ends with it.

The gate is computed from the attention's input, so what it needs moves in front of the attention
where it stands behind. Nothing that touches state moves: writes of keys and values stay in order.
"""

from typing import Any

from torch.fx import Node

from inkrt.builder.rewrite import (
    arguments,
    behind_views,
    calls,
    is_call,
    is_reshape,
    set_argument,
    shape_of,
)
from inkrt.builder.trace import StepGraph
from inkrt.plugins.registry import plugins


def fuse_attention_gate(graph: StepGraph) -> StepGraph:
    """Fuse each `sigmoid_gate` with the `relative_attention` that only it reads."""
    for node in calls(graph.module.graph, "sigmoid_gate"):
        args = arguments(node)
        attention = behind_views(args["x"])
        if not is_call(attention, "relative_attention") or not _is_only_gated(attention, node):
            continue
        needed = _needed_behind(args["gate"], attention)
        if needed is None or arguments(attention).get("gate") is not None:
            continue
        for moved in needed:
            attention.prepend(moved)
        set_argument(attention, "gate", args["gate"])
        node.replace_all_uses_with(args["x"])
        node.graph.erase_node(node)
    return graph


def _is_only_gated(attention: Node, gate: Node) -> bool:
    """Whether the gate takes the attention's heads as rows, and nothing else reads them."""
    args = arguments(gate)
    rows, num_rows = args["x"], shape_of(attention)[0]
    width = attention.meta["val"].numel() // num_rows
    value: Any = rows
    while value is not attention:
        if len(value.users) != 1:
            return False
        value = value.args[0]
    return (
        len(attention.users) == 1
        and is_reshape(rows, attention)
        and shape_of(rows) == shape_of(args["gate"]) == (num_rows, width)
        and args["gate"].meta["val"].dtype == attention.meta["val"].dtype
        and args["gate"].meta["val"].is_contiguous()
    )


def _needed_behind(gate: Node, attention: Node) -> list[Node] | None:
    """What stands behind the attention and the gate needs, in order; None if it cannot move."""
    needed: set[Node] = set()
    open_nodes = [gate]
    while open_nodes:
        node = open_nodes.pop()
        if node in needed or node < attention:
            continue
        if node is attention or _touches_state(node):
            return None
        needed.add(node)
        open_nodes.extend(node.all_input_nodes)
    return [node for node in attention.graph.nodes if node in needed]


def _touches_state(node: Node) -> bool:
    """Whether a node writes, or reads what another one writes."""
    return node.is_impure() or any(
        source in _written_by(user) for source in node.all_input_nodes for user in source.users
    )


def _written_by(node: Node) -> list[Node]:
    """State that a call of one of our operators writes."""
    written: list[Node] = []
    for plugin in plugins().values():
        if plugin.op is node.target:
            for name in plugin.mutates:
                value = arguments(node)[name]
                written += value if isinstance(value, list | tuple) else [value]
    return written
