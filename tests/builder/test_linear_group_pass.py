"""What `fuse_linear_group` takes into a group and what it leaves alone, without changing a bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from graph_run import assert_same_run, copies, run_graph, step_inputs
from small_model import VERIFY3, rank_states, rank_weights, small_graph
from torch.fx import Node

from inkrt.builder.passes.fuse_linear_group import fuse_linear_group
from inkrt.builder.rewrite import arguments, calls, insert_call, set_argument
from inkrt.builder.trace import StepGraph

aten = torch.ops.aten


def layer_linears(graph: StepGraph) -> list[Node]:
    """Of the first layer: q, rel, k, v, sink, gate, and the output projection."""
    return calls(graph.module.graph, "linear")[:7]


def insert_aten(before: Node, target: Callable[..., torch.Tensor], *args: object) -> Node:
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta["val"] = target(*(a.meta["val"] if isinstance(a, Node) else a for a in args))
    return node


def sizes(graph: StepGraph) -> list[int]:
    """Weights of every group, in order."""
    return [len(arguments(node)["weights"]) for node in calls(graph.module.graph, "linear_group")]


def nothing(graph: StepGraph) -> None:
    pass


def later_input(graph: StepGraph) -> None:
    """The gate's input is a view that is made right in front of it."""
    gate = layer_linears(graph)[5]
    set_argument(gate, "x", insert_aten(gate, aten.alias.default, arguments(gate)["x"]))


def partial_gate(graph: StepGraph) -> None:
    """The gate stays in float32, and is rounded by an operator of its own."""
    gate = layer_linears(graph)[5]
    readers = list(gate.users)
    set_argument(gate, "partial", True)
    args = {"x": gate, "dtype": torch.bfloat16, "tp_size": 1}
    rounded = insert_call(gate.next, "all_reduce", args, gate)
    for reader in readers:
        reader.replace_input_with(gate, rounded)


def strided_input(graph: StepGraph) -> None:
    """The gate's input has the others' shape, but its rows are columns."""
    first, gate = layer_linears(graph)[0], layer_linears(graph)[5]
    columns = insert_aten(first, aten.view.default, arguments(gate)["x"], [60, 3])
    set_argument(gate, "x", insert_aten(first, aten.t.default, columns))


def many(graph: StepGraph) -> None:
    """Four more products of the input, which are outputs of the graph."""
    query, output = layer_linears(graph)[0], graph.module.graph.output_node()
    for _ in range(4):
        node = insert_call(output, "linear", arguments(query), query)
        output.args = ((*output.args[0], node),)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (nothing, [6, 4, 2, 2, 6]),
        (later_input, [5, 4, 2, 2, 6]),
        (partial_gate, [5, 4, 2, 2, 6]),
        (strided_input, [5, 4, 2, 2, 6]),
        (many, [8, 4, 2, 2, 6, 2]),
    ],
)
def test_groups(checkpoint: Path, change: Callable[[StepGraph], None], first: list[int]) -> None:
    """Groups of the layers, of which the second has three inputs that three calls make."""
    weights, states = rank_weights(checkpoint, 1), rank_states(1)
    inputs = step_inputs(3, 3)
    graph = small_graph(VERIFY3, 1)
    change(graph)
    graph.module.graph.lint()
    written = copies(states)
    expected = (run_graph(graph, weights, written, inputs), written)
    fuse_linear_group(graph)
    graph.module.graph.lint()
    assert sizes(graph) == first
    assert_same_run(graph, expected, weights, states, inputs)
