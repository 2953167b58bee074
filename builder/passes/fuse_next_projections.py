"""moe_conv_mix + linear_group -> moe_conv_mix with weights, where a GPU streams both in one launch.

The experts' last kernel then asks for the next layer's input projections as soon as its own weights
leave room, and multiplies them when the mix, which runs beside it, hands over their inputs.
"""

import operator

import torch
from torch.fx import Node

from inkrt.builder.rewrite import arguments, calls, insert_call, insert_getitem, is_call
from inkrt.builder.tactics import call_args, find_tactics
from inkrt.builder.trace import StepGraph


def fuse_next_projections(graph: StepGraph, target: str) -> StepGraph:
    """Fuse every mix behind experts with the products of its results, if the target has kernels."""
    for mix in calls(graph.module.graph, "moe_conv_mix"):
        _fuse(mix, target)
    graph.module.graph.eliminate_dead_code()
    return graph


def _fuse(mix: Node, target: str) -> None:
    queries = _queries(mix)
    groups = {user for query in queries for user in query.users if is_call(user, "linear_group")}
    if len(groups) != 1:
        return
    (group,) = groups
    of_group = arguments(group)
    if not set(of_group["xs"]) <= set(queries):
        return
    args = arguments(mix)
    assert not args["weights"], "fused already"
    args["weights"] = of_group["weights"]
    args["query_of"] = [queries[of_group["xs"][index]] for index in of_group["input_of"]]
    if not find_tactics("moe_conv_mix", target, call_args(args)):
        return
    fused = insert_call(mix, "moe_conv_mix", args, mix)
    for item in list(mix.users):
        assert item.target is operator.getitem
        item.args = (fused, item.args[1])
    products = _products(insert_getitem(fused, 2), group)
    for item in list(group.users):
        index = item.args[1]
        assert isinstance(index, int)
        item.replace_all_uses_with(products[index])
        mix.graph.erase_node(item)
    for item in sorted(set(fused.users), reverse=True):  # those of the mix stood behind it
        if item.target is operator.getitem:
            fused.append(item)
    graph = mix.graph
    graph.erase_node(group)
    graph.erase_node(mix)


def _products(whole: Node, group: Node) -> list[Node]:
    """Views of one vector with the results of a `linear_group`, in its order; behind the vector."""
    aten = torch.ops.aten
    found, start = [], 0
    place = whole
    for product in group.meta["val"]:
        size = list(product.shape)
        end = start + product.numel()
        for target, source, more in (
            (aten.slice.Tensor, whole, (0, start, end)), (aten.view.default, None, (size,)),
        ):  # fmt: skip
            args = (source if source is not None else place, *more)
            with whole.graph.inserting_after(place):
                node = whole.graph.call_function(target, args)
            node.meta["val"] = target(args[0].meta["val"], *more)
            node.meta["nn_module_stack"] = group.meta.get("nn_module_stack", {})
            place = node
        found.append(place)
        start = end
    return found


def _queries(mix: Node) -> dict[Node, int]:
    """Results of a mix's queries, by the nodes that select them."""
    found = {}
    for item in mix.users:
        if item.target is not operator.getitem or item.args[1] != 1:
            continue
        for user in item.users:
            if user.target is torch.ops.aten.select.int and user.args[1] == 0:
                query = user.args[2]
                assert isinstance(query, int)
                found[user] = query
    return found
