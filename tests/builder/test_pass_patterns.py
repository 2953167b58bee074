"""Graphs that a fusion must leave alone, each one change away from the one that it takes.

Every case is run before and after the pass: the call stays unfused and no bit changes.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_run import assert_same_run, copies, run_graph, step_inputs
from small_model import VERIFY3, rank_states, rank_weights, small_graph
from torch import Tensor
from torch.fx import Node

from inkrt.builder.passes.place_collectives import place_collectives
from inkrt.builder.rewrite import arguments, behind_views, calls, insert_call, set_argument
from inkrt.builder.trace import StepGraph

Change = Callable[[StepGraph], object]


def attention(graph: StepGraph, layer: int = 0) -> Node:
    return calls(graph.module.graph, "relative_attention")[layer]


def argument(node: Node, *path: str) -> Node:
    """Follow arguments by name; views are looked through on the way."""
    for name in path:
        node = arguments(behind_views(node))[name]
    return node


def tap(graph: StepGraph, node: Node) -> None:
    """Make a node an output of the graph, so that it has one more reader."""
    output = graph.module.graph.output_node()
    output.args = ((*output.args[0], node),)  # type: ignore[misc]


def insert_aten(before: Node, target: Any, *args: Any) -> Node:
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args)
    values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
    node.meta["val"] = target(*values)
    return node


def read_before(graph: StepGraph, node: Node, place: Node) -> None:
    """Put a reader of `node` right before `place`, and make what it reads an output."""
    seen = insert_aten(place, torch.ops.aten.alias.default, node)
    copy = insert_call(
        place,
        "rms_norm",
        {"x": seen, "weight": None, "eps": 1e-6, "dtype": torch.float32},
        node,
    )
    tap(graph, copy)


def other_heads(graph: StepGraph) -> None:
    """Queries whose heads are interleaved in the rows instead of standing one after the other."""
    clip = argument(attention(graph), "q")
    view = arguments(clip)["x"]
    num_tokens, num_heads, size = view.meta["val"].shape
    rows = behind_views(view)
    aten = torch.ops.aten
    interleaved = insert_aten(clip, aten.view.default, rows, [num_tokens, size, num_heads])
    set_argument(clip, "x", insert_aten(clip, aten.transpose.int, interleaved, 1, 2))


def other_write(graph: StepGraph) -> None:
    """The cache gets values where attention reads keys."""
    write = calls(graph.module.graph, "kv_write")[0]
    set_argument(write, "k", arguments(write)["v"])


def shared_conv_state(graph: StepGraph) -> None:
    """Keys and values are convolved through one ring."""
    node = attention(graph)
    k_conv, v_conv = (behind_views(argument(node, x, "x")) for x in ("k", "v"))
    set_argument(v_conv, "state", arguments(k_conv)["state"])


QKV: dict[str, Change] = {
    "key convolution has a second reader": lambda g: tap(
        g, behind_views(argument(attention(g), "k", "x"))
    ),
    "value heads have a second reader": lambda g: tap(g, argument(attention(g), "v", "x")),
    "cache has a third reader": lambda g: tap(g, argument(attention(g), "k_cache")),
    "value cache has a third reader": lambda g: tap(g, argument(attention(g), "v_cache")),
    "convolution states are one": shared_conv_state,
    "queries are clipped without a scale": lambda g: set_argument(
        argument(attention(g), "q"), "scale", None
    ),
    "keys are clipped elsewhere": lambda g: set_argument(
        argument(attention(g), "k"), "threshold", 1.0
    ),
    "queries are read before": lambda g: read_before(g, argument(attention(g), "q"), attention(g)),
    "heads are interleaved": other_heads,
    "keys are no clip": lambda g: set_argument(attention(g), "k", argument(attention(g), "k", "x")),
    "relative states are not scaled": lambda g: set_argument(
        attention(g, 1), "rel", argument(attention(g, 1), "rel", "x")
    ),
    "another floor": lambda g: set_argument(argument(attention(g, 1), "rel"), "n_floor", 60),
    "the write is another": other_write,
    "there is no write": lambda g: g.module.graph.erase_node(calls(g.module.graph, "kv_write")[0]),
}


def mix(graph: StepGraph, index: int = 1) -> Node:
    """A mixture; the one at index 1 has three queries."""
    return calls(graph.module.graph, "residual_mix")[index]


def norm(graph: StepGraph) -> Node:
    (reader,) = list(mix(graph).users)[2].users
    return reader


def replace_source(graph: StepGraph, change: Callable[[list[Node]], list[Node]]) -> None:
    set_argument(mix(graph), "sources", change(list(arguments(mix(graph))["sources"])))


def add(graph: StepGraph) -> Node:
    return arguments(mix(graph))["sources"][-1]


def same_query_twice(graph: StepGraph) -> None:
    set_argument(list(mix(graph).users)[2], "index", 1)


def unselected(graph: StepGraph) -> None:
    """A norm of all outputs at once."""
    node = calls(graph.module.graph, "residual_mix")[0]
    (select,) = node.users
    (reader,) = select.users
    set_argument(reader, "x", node)
    with graph.module.graph.inserting_after(reader):
        view = graph.module.graph.call_function(torch.ops.aten.select.int, (reader, 0, 0))
    view.meta["val"] = reader.meta["val"][0]
    reader.replace_all_uses_with(view, delete_user_cb=lambda user: user is not view)
    graph.module.graph.erase_node(select)


MIX: dict[str, Change] = {
    "convolution has a second reader": lambda g: tap(g, arguments(add(g))["update"]),
    "convolution state has a second reader": lambda g: tap(g, argument(add(g), "update", "state")),
    "convolution is the residual": lambda g: set_argument(
        add(g), "residual", arguments(add(g))["update"]
    ),
    "mixture has a reader that is no norm": lambda g: tap(g, mix(g)),
    "output has a reader that is no norm": lambda g: tap(g, list(mix(g).users)[1]),
    "norms have different epsilons": lambda g: set_argument(norm(g), "eps", 1e-3),
    "a norm has no weight": lambda g: set_argument(norm(g), "weight", None),
    "two norms of one output": same_query_twice,
    "norm of all outputs": unselected,
    "residual is not the last source": lambda g: replace_source(g, lambda x: x[::-1]),
    "residual is two sources": lambda g: replace_source(g, lambda x: [x[-1], *x]),
    "residual is read before": lambda g: read_before(g, add(g), mix(g)),
}


def second_router(graph: StepGraph, *names: str) -> None:
    """Let experts take these from another router."""
    experts = calls(graph.module.graph, "experts")[0]
    router = arguments(experts)["routing_weights"].args[0]
    args = arguments(router) | {"scale": 1.5}
    other = insert_call(experts, "router", args, router)
    for index, name in enumerate(("routing_weights", "expert_ids")):
        if name in names:
            with graph.module.graph.inserting_before(experts):
                part = graph.module.graph.call_function(
                    arguments(experts)[name].target, (other, index)
                )
            part.meta["val"] = other.meta["val"][index]
            set_argument(experts, name, part)


def other_input(graph: StepGraph) -> None:
    """The router sees what the attention saw."""
    experts = calls(graph.module.graph, "experts")[0]
    router = arguments(experts)["routing_weights"].args[0]
    set_argument(router, "x", argument(calls(graph.module.graph, "linear")[0], "x"))


MOE: dict[str, Change] = {
    "weights are another router's": lambda g: second_router(g, "routing_weights"),
    "ids are another router's": lambda g: second_router(g, "expert_ids"),
    "router has another input": other_input,
}


def logits(graph: StepGraph) -> Node:
    return argument(calls(graph.module.graph, "sample")[0], "logits")


def later_columns(graph: StepGraph) -> None:
    head = behind_views(argument(logits(graph), "x"))
    with graph.module.graph.inserting_after(head):
        crop = graph.module.graph.call_function(torch.ops.aten.slice.Tensor, (head, 1, 5, 490))
    crop.meta["val"] = head.meta["val"][:, 5:490]
    set_argument(logits(graph), "x", crop)
    sample = calls(graph.module.graph, "sample")[0]
    set_argument(sample, "logits", logits(graph))


HEAD: dict[str, Change] = {
    "logits are later columns": later_columns,
    "logits are not capped": lambda g: set_argument(
        calls(g.module.graph, "sample")[0], "logits", _float_logits(g)
    ),
    "logits are read before": lambda g: read_before(
        g, logits(g), calls(g.module.graph, "sample")[0]
    ),
}


def _float_logits(graph: StepGraph) -> Node:
    sample = calls(graph.module.graph, "sample")[0]
    raw = argument(logits(graph), "x")
    args = {"residual": None, "update": raw, "dtype": torch.float32}
    return insert_call(sample, "residual_add", args, raw)


CASES = [
    pytest.param(name, operator, change, id=f"{name}: {case}")
    for name, operator, cases in (
        ("fuse_qkv_post", "qkv_post", QKV),
        ("fuse_moe", "moe", MOE),
        ("fuse_allreduce_conv_mix", "allreduce_conv_mix", MIX),
        ("fuse_lm_head_sample", "lm_head_sample", HEAD),
    )
    for case, change in cases.items()
]
NORMALLY = {"qkv_post": 3, "moe": 3, "allreduce_conv_mix": 6, "lm_head_sample": 1}


def assert_one_stays_unfused(
    graph: StepGraph,
    operator: str,
    normally: int,
    weights: list[dict[str, Tensor]],
    states: list[dict[str, Tensor]],
    inputs: dict[str, Tensor],
) -> None:
    """The fusion leaves out one place of `normally`, and keeps every bit."""
    graph.module.graph.lint()
    written = copies(states)
    expected = (run_graph(graph, weights, written, inputs), written)
    name = f"fuse_{operator}"
    getattr(import_module(f"inkrt.builder.passes.{name}"), name)(graph)
    graph.module.graph.lint()
    assert normally - len(calls(graph.module.graph, operator)) == 1
    assert_same_run(graph, expected, weights, states, inputs)


@pytest.mark.parametrize(("name", "operator", "change"), CASES)
def test_stays_unfused_and_right(
    checkpoint: Path, name: str, operator: str, change: Change
) -> None:
    weights, states, inputs = rank_weights(checkpoint, 1), rank_states(1), step_inputs(3, 3)
    graph = small_graph(VERIFY3, 1)
    change(graph)
    graph.module.graph.lint()
    written = copies(states)
    expected = (run_graph(graph, weights, written, inputs), written)
    getattr(import_module(f"inkrt.builder.passes.{name}"), name)(graph)
    graph.module.graph.lint()
    num_unfused = NORMALLY[operator] - len(calls(graph.module.graph, operator))
    assert num_unfused == 1
    assert_same_run(graph, expected, weights, states, inputs)


ON_RANKS: dict[str, tuple[str, Change]] = {
    "the sum has a second reader": (
        "allreduce_conv_mix",
        lambda g: tap(g, calls(g.module.graph, "all_reduce")[0]),
    ),
    "the convolved is no sum over ranks": (
        "allreduce_conv_mix",
        lambda g: set_argument(arguments(add(g))["update"], "x", argument(mix(g, 0), "sources")[0]),
    ),
    "logits of one rank": (
        "lm_head_sample",
        lambda g: set_argument(logits(g), "x", argument(logits(g), "x", "x")),
    ),
}


@pytest.mark.parametrize("case", ON_RANKS)
def test_stays_unfused_and_right_on_two_ranks(checkpoint: Path, case: str) -> None:
    operator, change = ON_RANKS[case]
    weights, states, inputs = rank_weights(checkpoint, 2), rank_states(2), step_inputs(3, 3)
    graph = place_collectives(small_graph(VERIFY3, 2))
    change(graph)
    assert_one_stays_unfused(graph, operator, NORMALLY[operator], weights, states, inputs)
