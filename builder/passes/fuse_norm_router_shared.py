"""add_rms_norm + router projection + shared gate/up and activation -> norm_router_shared.

All that an expert layer computes before its experts are known reads the same norm, so it is one
launch with the norm folded in. It ends at the logits, where `flint_moe` begins.
"""

from inkrt.builder.projection import (
    add_norm_arguments,
    add_norm_of,
    projection_of,
    replace_outputs,
)
from inkrt.builder.rewrite import arguments, calls, insert_call, insert_getitem, is_call
from inkrt.builder.trace import StepGraph


def fuse_norm_router_shared(graph: StepGraph) -> StepGraph:
    """Fuse what is in front of every `flint_moe`."""
    for node in calls(graph.module.graph, "flint_moe"):
        moe = arguments(node)
        z, router, activation = moe["x"], projection_of(moe["logits"]), moe["shared"]
        if router is None or not is_call(activation, "silu_mul"):
            continue
        gate_up = projection_of(arguments(activation)["gate_up"])
        add = add_norm_of(z)
        if add is None or gate_up is None or router.x is not z or gate_up.x is not z:
            continue
        if router.partial or gate_up.partial or router.scales is not None:
            continue
        fused = insert_call(
            add,
            "norm_router_shared",
            {
                **add_norm_arguments(add),
                "router": router.weight,
                **gate_up.weight_arguments("shared_gate_up"),
                "eps": arguments(add)["eps"],
            },
            node,
        )
        outputs = [insert_getitem(fused, index) for index in range(4)]
        replace_outputs(add, dict(enumerate(outputs[:2])))
        moe["logits"].replace_all_uses_with(outputs[2])
        activation.replace_all_uses_with(outputs[3])
    graph.module.graph.eliminate_dead_code()
    return graph
