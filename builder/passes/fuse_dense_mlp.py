"""add_rms_norm + gate/up projection + activation + down projection -> dense_mlp.

The MLP of a layer without experts, with the norm folded into the projection that reads it. An MLP
whose input has other readers, as a shared expert's has, is left alone.
"""

from itertools import pairwise

from inkrt.builder.projection import (
    add_norm_arguments,
    add_norm_of,
    projection_of,
    replace_outputs,
)
from inkrt.builder.rewrite import arguments, calls, insert_call, insert_getitem
from inkrt.builder.trace import StepGraph


def fuse_dense_mlp(graph: StepGraph) -> StepGraph:
    """Fuse around every `silu_mul` between two projections."""
    for node in calls(graph.module.graph, "silu_mul"):
        gate_up = projection_of(arguments(node)["gate_up"])
        down = projection_of(next(iter(node.users), None))
        add = add_norm_of(gate_up.x) if gate_up is not None else None
        if gate_up is None or down is None or add is None or gate_up.partial:
            continue
        chain = (gate_up.x, gate_up.node, node, down.node)
        if any(list(before.users) != [after] for before, after in pairwise(chain)):
            continue
        fused = insert_call(
            add,
            "dense_mlp",
            {
                **add_norm_arguments(add),
                **gate_up.weight_arguments("gate_up"),
                **down.weight_arguments("down"),
                "eps": arguments(add)["eps"],
                "partial": down.partial,
            },
            down.node,
        )
        replace_outputs(add, {0: insert_getitem(fused, 0)})
        down.node.replace_all_uses_with(insert_getitem(fused, 1))
    graph.module.graph.eliminate_dead_code()
    return graph
