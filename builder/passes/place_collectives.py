"""Tensor-parallel placement of collectives: reduce the partial sums of row-parallel operators.

The definition marks an operator whose result is this rank's share of a sum (`partial`). Its readers
need the whole sum, so an all-reduce goes right behind it; the fusions then look for a better place.
"""

from inkrt.builder.rewrite import arguments, calls, insert_call
from inkrt.builder.trace import StepGraph

PARTIAL_OPS = ("linear", "experts")


def place_collectives(graph: StepGraph) -> StepGraph:
    """Insert `all_reduce` behind every operator called with `partial`."""
    for name in PARTIAL_OPS:
        for node in calls(graph.module.graph, name):
            if not arguments(node)["partial"]:
                continue
            reduced = insert_call(
                node.next,
                "all_reduce",
                {"x": node, "dtype": graph.dtype, "tp_size": graph.tp_size},
                node,
            )
            node.replace_all_uses_with(reduced, delete_user_cb=lambda user: user is not reduced)  # noqa: B023
    return graph
