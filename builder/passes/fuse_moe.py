"""router + experts -> moe: one operator decides and runs, so that a kernel can overlap the two."""

from inkrt.builder.rewrite import arguments, calls, insert_call, is_call
from inkrt.builder.trace import StepGraph


def fuse_moe(graph: StepGraph) -> StepGraph:
    """Fuse each `experts` call with the `router` call whose outputs it reads."""
    for node in calls(graph.module.graph, "experts"):
        experts = arguments(node)
        router_node = experts["routing_weights"].args[0]
        if not is_call(router_node, "router"):
            continue
        router = arguments(router_node)
        fused = insert_call(
            node,
            "moe",
            {
                "x": experts["x"],
                "router_weight": router["weight"],
                "router_bias": router["bias"],
                "gate_up": experts["gate_up"],
                "down": experts["down"],
                "top_k": router["top_k"],
                "route_scale": router["scale"],
                "gate_softcap": experts["gate_softcap"],
                "up_softcap": experts["up_softcap"],
                "partial": experts["partial"],
            },
            node,
        )
        node.replace_all_uses_with(fused)
    return graph
