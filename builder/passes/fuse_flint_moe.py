"""router_top_k + swiglu_experts + shared down projection + addition -> flint_moe.

One operator chooses, runs and adds up, so that a kernel can start the shared expert while it
chooses, and neither ids nor the two terms of the sum go through memory.
"""

import operator
from typing import Any

import torch
from torch.fx import Node

from inkrt.builder.projection import projection_of
from inkrt.builder.rewrite import arguments, calls, insert_call, is_call
from inkrt.builder.trace import StepGraph

_WEIGHTS = tuple(
    f"{weight}{suffix}"
    for weight in ("gate_up", "down")
    for suffix in ("", "_scales", "_global_scale")
)


def fuse_flint_moe(graph: StepGraph) -> StepGraph:
    """Fuse each addition of routed experts and a projection."""
    for node in calls(graph.module.graph, "residual_add"):
        add = arguments(node)
        routed, shared = add["residual"], projection_of(add["update"])
        if shared is None or not is_call(routed, "swiglu_experts"):
            continue
        experts = arguments(routed)
        router = _router_of(experts)
        partial = experts["partial"]
        dtype = torch.float32 if partial else experts["x"].meta["val"].dtype
        is_alone = list(routed.users) == [node] and list(shared.node.users) == [node]
        if router is None or not is_alone or shared.partial != partial or add["dtype"] != dtype:
            continue
        fused = insert_call(
            node,
            "flint_moe",
            {
                "x": experts["x"],
                "logits": router["logits"],
                "shared": shared.x,
                **{name: experts[name] for name in _WEIGHTS},
                **shared.weight_arguments("shared_down"),
                "rank": experts["rank"],
                "top_k": router["top_k"],
                "partial": partial,
            },
            routed,
        )
        node.replace_all_uses_with(fused)
    graph.module.graph.eliminate_dead_code()
    return graph


def _router_of(experts: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments of the `router_top_k` that gives both weights and ids."""
    weights, ids = experts["routing_weights"], experts["expert_ids"]
    if weights.target is not operator.getitem or ids.target is not operator.getitem:
        return None
    node, index = weights.args
    if not is_call(node, "router_top_k") or index != 0 or ids.args != (node, 1):
        return None
    assert isinstance(node, Node)
    return arguments(node)
