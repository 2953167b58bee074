"""router + experts -> moe: one operator decides and runs, so that a kernel can overlap the two."""

import operator
from typing import Any

from torch.fx import Node

from inkrt.builder.rewrite import arguments, calls, insert_call, is_call
from inkrt.builder.trace import StepGraph


def fuse_moe(graph: StepGraph) -> StepGraph:
    """Fuse each `experts` call with the `router` call whose outputs it reads."""
    for node in calls(graph.module.graph, "experts"):
        experts = arguments(node)
        router_node = _router_of(experts)
        if router_node is None:
            continue
        router = arguments(router_node)
        fused = insert_call(
            node,
            "moe",
            {
                "x": experts["x"],
                "router_weight": router["weight"],
                "router_bias": router["bias"],
                **{
                    f"{name}{part}": experts[f"{name}{part}"]
                    for name in ("gate_up", "down")
                    for part in ("", "_scales", "_global_scale")
                },
                "rank": experts["rank"],
                "top_k": router["top_k"],
                "route_scale": router["scale"],
                "gate_softcap": experts["gate_softcap"],
                "up_softcap": experts["up_softcap"],
                "partial": experts["partial"],
            },
            node,
        )
        node.replace_all_uses_with(fused)
    graph.module.graph.eliminate_dead_code()
    return graph


def _router_of(experts: dict[str, Any]) -> Node | None:
    """The router that gives weights and ids from the very input that the experts read."""
    weights, ids = experts["routing_weights"], experts["expert_ids"]
    if weights.target is not operator.getitem or ids.target is not operator.getitem:
        return None
    node, index = weights.args
    if not is_call(node, "router") or index != 0 or ids.args != (node, 1):
        return None
    return node if arguments(node)["x"] is experts["x"] else None
