"""Helpers for passes: reading calls by parameter name, looking through views, inserting calls."""

import operator
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


def is_reshape(value: Any, source: Node) -> bool:
    """Whether `value`, `source` or a view of it, has all of its elements in their order."""
    if behind_views(value) is not behind_views(source):
        return False
    tensor, base = value.meta["val"], source.meta["val"]
    return bool(
        tensor.is_contiguous()
        and base.is_contiguous()
        and tensor.storage_offset() == base.storage_offset()
        and tensor.numel() == base.numel()
    )


def are_users_after(node: Node, place: Node) -> bool:
    """Whether every user of `node` but `place` itself comes after `place`.

    Only then can an operator that is inserted at `place` take the place of `node`.
    """
    return all(user is place or place < user for user in node.users)


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


def set_argument(node: Node, name: str, value: Any) -> None:
    """Change one argument of an operator call and infer its shapes anew; readers are not told."""
    assert isinstance(node.target, torch._ops.OpOverload)
    args = arguments(node) | {name: value}
    node.args, node.kwargs = (), args
    node.meta["val"] = node.target(**map_arg(args, lambda argument: argument.meta["val"]))


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
