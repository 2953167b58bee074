"""Several linear of what one call gives -> linear_group.

The input projections of a layer read the outputs of one call, so a GPU can stream all of their
weights in one launch. The group stands where the first of them stood; a later one joins it if its
input is there by then. A product has no effect beside its result and its input is never written
again, so it may move ahead of whatever stands between.
"""

import operator

from torch.fx import Node

from inkrt.builder.rewrite import (
    arguments,
    behind_views,
    calls,
    insert_call,
    insert_getitem,
    shape_of,
)
from inkrt.builder.trace import StepGraph
from inkrt.plugins.linear_group.op import MAX_INPUTS, MAX_WEIGHTS


def fuse_linear_group(graph: StepGraph) -> StepGraph:
    """Fuse all linears of the outputs of each call, at most MAX_WEIGHTS at a time."""
    groups: list[list[Node]] = []
    for node in calls(graph.module.graph, "linear"):
        if _producer(node) is None:
            continue
        group = next((group for group in groups if _fits(node, group)), None)
        if group is None:
            groups.append([node])
        else:
            group.append(node)
    for group in groups:
        if len(group) > 1:
            _fuse(group)
    graph.module.graph.eliminate_dead_code()
    return graph


def _producer(node: Node) -> Node | None:
    """The call that makes the input of a linear; None if the linear cannot be in a group."""
    args = arguments(node)
    x = args["x"]
    if args["partial"] or not x.meta["val"].is_contiguous():
        return None
    producer = behind_views(x)
    if producer.target is operator.getitem:
        producer = producer.args[0]
    # Placeholders are weights, inputs and state, which may be written.
    return producer if producer.op == "call_function" else None


def _fits(node: Node, group: list[Node]) -> bool:
    """Whether a linear can move to the first of a group that has room."""
    first, x = group[0], arguments(node)["x"]
    inputs = {arguments(other)["x"] for other in group} | {x}
    return (
        len(group) < MAX_WEIGHTS
        and len(inputs) <= MAX_INPUTS
        and _producer(node) is _producer(first)
        and shape_of(x) == shape_of(arguments(first)["x"])
        and x.meta["val"].dtype == arguments(first)["x"].meta["val"].dtype
        and x < first
    )


def _fuse(group: list[Node]) -> None:
    inputs = list(dict.fromkeys(arguments(node)["x"] for node in group))
    fused = insert_call(
        group[0],
        "linear_group",
        {
            "xs": inputs,
            "weights": [arguments(node)["weight"] for node in group],
            "input_of": [inputs.index(arguments(node)["x"]) for node in group],
        },
        group[0],
    )
    for number, node in enumerate(group):
        node.replace_all_uses_with(insert_getitem(fused, number))
