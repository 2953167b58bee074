"""Runs traced graphs node by node on real tensors, all ranks in lockstep.

It shares nothing with lowering, memory planning or the executor: every node has tensors of its own.
"""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node, map_arg

from inkrt.builder.rewrite import arguments
from inkrt.builder.trace import StepGraph
from inkrt.plugins.registry import NAMESPACE, plugins

Tensors = dict[str, Tensor]


def run_graph(
    graph: StepGraph, weights: list[Tensors], states: list[Tensors], inputs: Tensors
) -> list[list[Tensor]]:
    """Outputs of every rank.

    Args:
        graph: of one rank; the same for all.
        weights: of every rank by parameter name.
        states: of every rank by buffer name; written in place.
        inputs: of the step by name, but for `rank`.
    """
    values: list[dict[Node, Any]] = [{} for _ in weights]
    for node in graph.module.graph.nodes:
        if node.op == "placeholder":
            for rank, known in enumerate(values):
                known[node] = _placeholder(graph, node.name, rank, weights, states, inputs)
        elif node.op == "output":
            return [[known[value] for value in node.args[0]] for known in values]
        else:
            assert node.op == "call_function", node.op
            results = _call(node, [_Known(known) for known in values])
            for known, result in zip(values, results, strict=True):
                known[node] = result
    raise AssertionError("a graph ends in its output")


class _Known:
    """Reads arguments on one rank."""

    def __init__(self, values: dict[Node, Any]) -> None:
        self.values = values

    def __call__(self, argument: Any) -> Any:
        return map_arg(argument, lambda node: self.values[node])


def _placeholder(
    graph: StepGraph,
    name: str,
    rank: int,
    weights: list[Tensors],
    states: list[Tensors],
    inputs: Tensors,
) -> Tensor:
    if name in graph.weights:
        return weights[rank][graph.weights[name]]
    if name in graph.state:
        return states[rank][graph.state[name]]
    return torch.tensor([rank], dtype=torch.int32) if name == "rank" else inputs[name]


def _call(node: Node, ranks: list[_Known]) -> list[Any]:
    if node.target is operator.getitem or node.target.namespace != NAMESPACE:  # type: ignore[union-attr]
        return [node.target(*read(node.args), **read(node.kwargs)) for read in ranks]  # type: ignore[operator]
    plugin = plugins()[node.target._schema.name.split("::")[1]]  # type: ignore[union-attr]
    of_ranks = [{name: read(value) for name, value in arguments(node).items()} for read in ranks]
    if plugin.collective is None:
        return [plugin.reference(**of_rank) for of_rank in of_ranks]
    payloads = [plugin.collective.payload(**of_rank) for of_rank in of_ranks]
    return [plugin.collective.combine(payloads, **of_rank) for of_rank in of_ranks]


def step_inputs(num_rows: int, num_tokens: int, position: int = 61) -> Tensors:
    """Inputs of a sampled step of `num_rows` rows, `num_tokens` of them real, on slot 1.

    By default it crosses an edge of pages (64), behind the start of the log scaling (50).
    """
    generator = torch.Generator().manual_seed(num_rows)
    tokens = torch.randint(512, (num_rows,), generator=generator, dtype=torch.int32)

    def one(value: float, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor([value], dtype=dtype)

    return {
        "tokens": tokens,
        "position": one(position),
        "num_tokens": one(num_tokens),
        "slot": one(1),
        "page_table": torch.tensor([6, 2, 5, 3], dtype=torch.int32),
        "temperature": one(0.9, torch.float32),
        "top_k": one(100),
        "top_p": one(0.95, torch.float32),
        "min_p": one(0.0, torch.float32),
        "seed": one(12345, torch.int64),
    }


def copies(states: list[Tensors]) -> list[Tensors]:
    """Copies of states that a run may write."""
    return [{name: value.clone() for name, value in state.items()} for state in states]


def assert_same_bits(got: Tensor, expected: Tensor, what: str) -> None:
    """Fail with the first difference."""
    assert got.dtype == expected.dtype, what
    assert got.shape == expected.shape, what
    if not torch.equal(got, expected):
        place = (got != expected).nonzero()[0].tolist()
        raise AssertionError(f"{what} differs at {place}: {got[*place]} != {expected[*place]}")


def assert_same_run(
    graph: StepGraph,
    expected: tuple[list[list[Tensor]], list[Tensors]],
    weights: list[Tensors],
    states: list[Tensors],
    inputs: Tensors,
) -> None:
    """Fail unless the graph gives these outputs and states, bit for bit."""
    states = copies(states)
    outputs = run_graph(graph, weights, states, inputs)
    for rank, (got, wanted) in enumerate(zip(outputs, expected[0], strict=True)):
        for index, pair in enumerate(zip(got, wanted, strict=True)):
            assert_same_bits(*pair, f"rank {rank} output {index}")
    for rank, (got, wanted) in enumerate(zip(states, expected[1], strict=True)):
        for name, value in got.items():
            assert_same_bits(value, wanted[name], f"rank {rank} state {name}")
