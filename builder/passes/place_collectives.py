"""Tensor-parallel placement of collectives: sum up what row-parallel operators give in parts.

Where ranks share a weight along the dimension that its operator sums over, each rank computes a
part of the sum. The part stays in float32, an all-reduce right behind the operator adds the parts
and rounds once, and the fusions then look for a better place for it. Two parts that are added to
each other are added before they are reduced: one exchange and one rounding instead of two.
"""

import torch
from torch.fx import Node

from inkrt.builder.rewrite import arguments, calls, erase, insert_call, is_call, set_argument
from inkrt.builder.trace import StepGraph
from inkrt.errors import BuildError

# Operators that can give partial sums, and the weight that decides it.
PARTIAL_OPS = {
    "linear": "weight",
    "linear_nvfp4": "codes",
    "linear_mxfp8": "codes",
    "experts": "down",
    "swiglu_experts": "down",
}


def place_collectives(graph: StepGraph) -> StepGraph:
    """Make row-parallel operators partial and insert `all_reduce` behind each.

    Raises:
        BuildError: a row-parallel weight is read by no operator that can give partial sums.
    """
    if graph.tp_size == 1:
        return graph
    unplaced = set(graph.row_parallel)
    for name, weight in PARTIAL_OPS.items():
        for node in calls(graph.module.graph, name):
            parameter = graph.weights.get(arguments(node)[weight].name)
            if parameter not in graph.row_parallel:
                continue
            unplaced.discard(parameter)
            set_argument(node, "partial", True)
            _reduce(graph, node)
    if unplaced:
        raise BuildError(
            f"row-parallel weight {min(unplaced)} is summed over by none of "
            f"{', '.join(PARTIAL_OPS)}, so its partial sums would not be added up; correct the "
            f"module"
        )
    for node in calls(graph.module.graph, "residual_add"):
        _add_before_reducing(graph, node)
    return graph


def _reduce(graph: StepGraph, node: Node) -> None:
    """Let the readers of a rank's part read the sum of all ranks' parts."""
    readers = list(node.users)
    args = {"x": node, "dtype": graph.dtype, "tp_size": graph.tp_size}
    reduced = insert_call(node.next, "all_reduce", args, node)
    for reader in readers:
        reader.replace_input_with(node, reduced)


def _add_before_reducing(graph: StepGraph, node: Node) -> None:
    """Turn a sum of two reduced parts, which nothing else reads, into the reduced sum of both."""
    args = arguments(node)
    terms = [args["residual"], args["update"]]
    if args["dtype"] != graph.dtype or terms[0] is terms[1]:
        return
    if not all(is_call(term, "all_reduce") and list(term.users) == [node] for term in terms):
        return
    for name, term in zip(("residual", "update"), terms, strict=True):
        set_argument(node, name, arguments(term)["x"])
    set_argument(node, "dtype", torch.float32)
    erase(terms)
    _reduce(graph, node)
