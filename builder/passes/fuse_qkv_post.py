"""Query/key/value post-processing + state write -> qkv_post.

Everything between the projections and attention is elementwise in a head, so one operator clips,
scales, convolves and normalises, and writes keys and values where attention reads them. That puts
the write before the attention that the definition puts it behind; this is legal where the step's
own positions share no ring row with a position that its queries look back to.
"""

from typing import Any

from torch.fx import Node

from inkrt.builder.rewrite import (
    arguments,
    behind_views,
    calls,
    erase,
    insert_call,
    insert_getitem,
    is_call,
    shape_of,
)
from inkrt.builder.trace import StepGraph


def fuse_qkv_post(graph: StepGraph) -> StepGraph:
    """Fuse the chains into every `relative_attention` call where the write may move ahead."""
    writes = {arguments(node)["k_cache"]: node for node in calls(graph.module.graph, "kv_write")}
    for node in calls(graph.module.graph, "relative_attention"):
        attention = arguments(node)
        write = writes.get(attention["k_cache"])
        if write is not None and _may_write_first(attention):
            _fuse(node, attention, write)
    return graph


def _may_write_first(attention: dict[str, Any]) -> bool:
    if attention["page_table"] is not None:
        return True  # pages hold every position
    num_tokens, ring = shape_of(attention["q"])[0], shape_of(attention["k_cache"])[1]
    return bool(num_tokens + attention["window"] - 1 <= ring)


def _fuse(node: Node, attention: dict[str, Any], write: Node) -> None:
    q, rel = _clip_chain(attention["q"]), _clip_chain(attention["rel"])
    k = arguments(attention["k"])
    v = arguments(attention["v"])
    k_conv, v_conv = behind_views(k["x"]), behind_views(v["x"])
    k_args, v_args = arguments(k_conv), arguments(v_conv)
    is_dynamic = is_call(k_conv, "dynamic_short_conv")
    conv_weight = "static_weight" if is_dynamic else "weight"
    fused = insert_call(
        node,
        "qkv_post",
        {
            "q": q["x"],
            "k": k_args["x"],
            "v": v_args["x"],
            "rel": rel["x"],
            "q_scale": q["scale"],
            "rel_scale": rel["scale"],
            "k_conv_weight": k_args[conv_weight],
            "v_conv_weight": v_args[conv_weight],
            "k_dynamic": k_args.get("dynamic_weight"),
            "v_dynamic": v_args.get("dynamic_weight"),
            "k_conv_state": k_args["state"],
            "v_conv_state": v_args["state"],
            "k_cache": attention["k_cache"],
            "v_cache": attention["v_cache"],
            "page_table": attention["page_table"],
            "position": attention["position"],
            "num_tokens": attention["num_tokens"],
            "slot": attention["slot"],
            "qk_threshold": q["threshold"],
            "rel_threshold": rel["threshold"],
            "log_n_floor": q["n_floor"],
            "log_alpha": q["alpha"],
            "eps": v["eps"],
        },
        node,
    )
    for index, name in enumerate(("q", "k", "v", "rel")):
        attention[name].replace_all_uses_with(insert_getitem(fused, index))
    # The old chains end in operators that write state, which dead code elimination keeps.
    erase([write])
    node.graph.eliminate_dead_code(is_impure_node=lambda other: _is_kept(other, (k_conv, v_conv)))


def _clip_chain(value: Node) -> dict[str, Any]:
    """Arguments of [log_scale of] l2_clip of a view of a projection, with the projection as x."""
    chain: dict[str, Any] = {"n_floor": 0, "alpha": 0.0}
    if is_call(value, "log_scale"):
        log_scale = arguments(value)
        chain = {"n_floor": log_scale["n_floor"], "alpha": log_scale["alpha"]}
        value = log_scale["x"]
    clip = arguments(value)
    return chain | {
        "x": behind_views(clip["x"]),
        "scale": clip["scale"],
        "threshold": clip["threshold"],
    }


def _is_kept(node: Node, replaced: tuple[Node, ...]) -> bool:
    return node not in replaced and node.is_impure()
