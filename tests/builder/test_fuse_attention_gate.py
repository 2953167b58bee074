"""The attention's gate becomes an argument of it, wherever its projection stands."""

from collections.abc import Callable
from pathlib import Path

import pytest
from graph_run import assert_same_run, copies, run_graph, step_inputs
from small_model import DECODE, VERIFY3, rank_states, rank_weights, small_graph
from test_pass_patterns import attention, tap
from torch.fx import Node

from inkrt.builder.passes.fuse_attention_gate import fuse_attention_gate
from inkrt.builder.passes.fuse_qkv_post import fuse_qkv_post
from inkrt.builder.rewrite import arguments, calls, insert_call, is_call
from inkrt.builder.trace import StepGraph

Change = Callable[[StepGraph], None]


def gate(graph: StepGraph) -> Node:
    return calls(graph.module.graph, "sigmoid_gate")[0]


def writes(graph: StepGraph) -> list[str]:
    """Calls that write state, in order."""
    return [node.name for node in graph.module.graph.nodes if node.is_impure()]


@pytest.mark.parametrize("is_in_front", [False, True])
@pytest.mark.parametrize("is_posted", [False, True])
def test_gate_is_fused(checkpoint: Path, is_in_front: bool, is_posted: bool) -> None:
    """Before and behind fuse_qkv_post; the projection in front of the attention or behind it."""
    weights, states, inputs = rank_weights(checkpoint, 1), rank_states(1), step_inputs(3, 2)
    graph = small_graph(VERIFY3, 1)
    if is_posted:
        fuse_qkv_post(graph)
    if is_in_front:
        for node in calls(graph.module.graph, "relative_attention"):
            (view,) = node.users
            (reader,) = view.users
            projection = arguments(reader)["gate"]
            assert is_call(projection, "linear")
            assert node < projection
            node.prepend(projection)
    graph.module.graph.lint()
    written = copies(states)
    expected = (run_graph(graph, weights, written, inputs), written)
    before = writes(graph)
    fuse_attention_gate(graph)
    graph.module.graph.lint()
    assert calls(graph.module.graph, "sigmoid_gate") == []
    for node in calls(graph.module.graph, "relative_attention"):
        assert is_call(arguments(node)["gate"], "linear")
        assert arguments(node)["gate"] < node
    assert writes(graph) == before
    assert_same_run(graph, expected, weights, states, inputs)


def read_twice(graph: StepGraph) -> None:
    tap(graph, attention(graph))


def read_ungated(graph: StepGraph) -> None:
    tap(graph, arguments(gate(graph))["x"])


def gate_of_gated(graph: StepGraph) -> None:
    """The gate needs the attention."""
    node = gate(graph)
    args = arguments(node)
    node.args, node.kwargs = (), args | {"gate": insert_call(node, "sigmoid_gate", args, node)}


def gate_of_norm(graph: StepGraph) -> None:
    """Something stands between the attention and the gate."""
    node = gate(graph)
    x = arguments(node)["x"]
    args = {"x": x, "weight": None, "eps": 1e-6, "dtype": x.meta["val"].dtype}
    node.args, node.kwargs = (), arguments(node) | {"x": insert_call(node, "rms_norm", args, node)}


@pytest.mark.parametrize("change", [read_twice, read_ungated, gate_of_gated, gate_of_norm])
def test_stays_unfused_and_right(checkpoint: Path, change: Change) -> None:
    weights, states, inputs = rank_weights(checkpoint, 1), rank_states(1), step_inputs(1, 1)
    graph = small_graph(DECODE, 1)
    change(graph)
    graph.module.graph.lint()
    written = copies(states)
    expected = (run_graph(graph, weights, written, inputs), written)
    normally = len(calls(small_graph(DECODE, 1).module.graph, "relative_attention"))
    fuse_attention_gate(graph)
    graph.module.graph.lint()
    fused = [
        node
        for node in calls(graph.module.graph, "relative_attention")
        if arguments(node).get("gate") is not None
    ]
    assert len(fused) == normally - 1
    assert_same_run(graph, expected, weights, states, inputs)
