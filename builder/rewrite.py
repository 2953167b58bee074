"""Helpers for passes: reading calls by parameter name, looking through views, inserting calls."""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node, map_arg

from inkrt.plugins.registry import plugins

VIEW_OPS = frozenset(
    {
        torch.ops.aten.alias.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.expand.default,
        torch.ops.aten.permute.default,
        torch.ops.aten.select.int,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.squeeze.dim,
        torch.ops.aten.t.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.view.default,
    }
)


def is_call(node: object, name: str) -> bool:
    """Whether `node` calls the operator `ink::name`."""
    return (
        isinstance(node, Node) and node.op == "call_function" and node.target is plugins()[name].op
    )


def calls(graph: torch.fx.Graph, name: str) -> list[Node]:
    """All calls of `ink::name`, in order."""
    return [node for node in graph.nodes if is_call(node, name)]


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operator call by parameter name, defaults left out."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def behind_views(value: Any) -> Any:
    """The node that `value` is a view of, or `value` itself."""
    while isinstance(value, Node) and value.target in VIEW_OPS:
        value = value.args[0]
    return value


def users_behind_views(node: Node) -> Iterator[Node]:
    """The nodes that use `node` or a view of it, views left out."""
    for user in node.users:
        if user.target in VIEW_OPS:
            yield from users_behind_views(user)
        else:
            yield user


def module_path(node: Node) -> str:
    """Path of the module that the node was traced in, e.g. `layers.5.attn`; empty for the root."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""


def insert_call(before: Node, name: str, args: dict[str, Any], origin: Node) -> Node:
    """Insert a call of `ink::name` with its shapes inferred, as if traced where `origin` was.

    Args:
        before: the new node comes right before this one.
        name: operator name.
        args: by parameter name; all that have no default.
        origin: gives the module path.
    """
    op = plugins()[name].op
    with before.graph.inserting_before(before):
        node = before.graph.create_node("call_function", op, kwargs=args, name=name)
    values = map_arg(args, lambda argument: argument.meta["val"])
    node.meta["val"] = op(**values)
    node.meta["nn_module_stack"] = origin.meta.get("nn_module_stack", {})
    return node


def insert_getitem(source: Node, index: int) -> Node:
    """The output `index` of a call with several outputs, right after the last one inserted."""
    last = source
    while (following := last.next).target is operator.getitem and following.args[0] is source:
        last = following
    with source.graph.inserting_after(last):
        node = source.graph.call_function(operator.getitem, (source, index))
    node.meta["val"] = source.meta["val"][index]
    node.meta["nn_module_stack"] = source.meta.get("nn_module_stack", {})
    return node


def insert_select(source: Node, index: int) -> Node:
    """`source[index]` along dimension 0, a view, right after `source`."""
    select = torch.ops.aten.select.int
    with source.graph.inserting_after(source):
        node = source.graph.call_function(select, (source, 0, index))
    node.meta["val"] = select(source.meta["val"], 0, index)
    node.meta["nn_module_stack"] = source.meta.get("nn_module_stack", {})
    return node


def shape_of(node: Node) -> tuple[int, ...]:
    """Shape of a node's single output."""
    return tuple(node.meta["val"].shape)


def erase(nodes: list[Node]) -> None:
    """Erase nodes without users in the given order, even if they write state."""
    for node in nodes:
        node.graph.erase_node(node)
