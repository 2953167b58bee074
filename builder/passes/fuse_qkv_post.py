"""Query/key/value post-processing + state write -> qkv_post.

Everything between the projections and attention is elementwise in a head, so one operator clips,
scales, convolves and normalises, and writes keys and values where attention reads them. That puts
the write before the attention that the definition puts it behind, where `kv_order` allows it.
"""

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from inkrt.builder.kv_order import may_write_first, write_of
from inkrt.builder.rewrite import (
    are_users_after,
    arguments,
    behind_views,
    calls,
    erase,
    insert_call,
    insert_getitem,
    is_call,
    is_reshape,
    shape_of,
)
from inkrt.builder.trace import StepGraph

_STEP = ("position", "num_tokens", "slot")


@dataclass(frozen=True, slots=True)
class _Clip:
    """[log_scale of] l2_clip of the heads of rows; a floor of 0 for no log_scale."""

    rows: Node
    scale: Node | None
    threshold: float
    n_floor: int
    alpha: float
    position: Node | None


@dataclass(frozen=True, slots=True)
class _ConvNorm:
    """l2_clip or rms_norm of the heads of a convolution: their arguments and the convolution."""

    norm: dict[str, Any]
    conv: dict[str, Any]
    node: Node


def fuse_qkv_post(graph: StepGraph) -> StepGraph:
    """Fuse the chains into every `relative_attention` call where the write may move ahead."""
    replaced: set[Node] = set()
    for node in calls(graph.module.graph, "relative_attention"):
        write, chains = write_of(node), _chains_of(node)
        if write is not None and chains is not None and may_write_first(arguments(node)):
            replaced |= _fuse(node, write, *chains)
    if replaced:
        # The old chains end in operators that write state, which dead code elimination keeps.
        graph.module.graph.eliminate_dead_code(  # once: it goes through the whole graph
            is_impure_node=lambda node: node not in replaced and node.is_impure()
        )
    return graph


def _chains_of(node: Node) -> tuple[_Clip, _ConvNorm, _ConvNorm, _Clip] | None:
    """What has to happen to q, k, v and rel before attention, if it is what qkv_post does."""
    attention = arguments(node)
    if not all(are_users_after(attention[name], node) for name in ("q", "k", "v", "rel")):
        return None
    q, rel = _clip_of(attention["q"]), _clip_of(attention["rel"])
    k, v = _conv_norm_of(attention["k"], "l2_clip"), _conv_norm_of(attention["v"], "rms_norm")
    if q is None or rel is None or k is None or v is None:
        return None
    is_fit = (
        (q.n_floor, q.alpha, q.position) == (rel.n_floor, rel.alpha, rel.position)
        and q.position in (None, attention["position"])
        and q.scale is not None
        and rel.scale is not None
        and k.norm["scale"] is None
        and k.norm["threshold"] == q.threshold
        and v.norm["weight"] is None
        and v.norm["dtype"] == v.node.meta["val"].dtype
        and k.node.target is v.node.target
        and all(chain.conv[name] is attention[name] for chain in (k, v) for name in _STEP)
        and all(chain.conv.get("is_scaled", True) for chain in (k, v))
    )
    return (q, k, v, rel) if is_fit else None


def _clip_of(value: Node) -> _Clip | None:
    n_floor, alpha, position = 0, 0.0, None
    if is_call(value, "log_scale"):
        log_scale = arguments(value)
        n_floor, alpha = log_scale["n_floor"], log_scale["alpha"]
        value, position = log_scale["x"], log_scale["position"]
    if not is_call(value, "l2_clip"):
        return None
    clip = arguments(value)
    rows = _rows_of(clip["x"])
    if rows is None:
        return None
    return _Clip(rows, clip["scale"], clip["threshold"], n_floor, alpha, position)


def _conv_norm_of(value: Node, norm: str) -> _ConvNorm | None:
    """The chain that ends in `value`, if nothing else reads what is between, or the state.

    The convolution moves to the attention: a second reader would see the state written too early.
    """
    if not is_call(value, norm):
        return None
    args = arguments(value)
    heads, conv = args["x"], _rows_of(args["x"])
    if not (is_call(conv, "short_conv") or is_call(conv, "dynamic_short_conv")):
        return None
    assert conv is not None
    is_alone = list(conv.users) == [heads] and list(heads.users) == [value]
    conv_args = arguments(conv)
    return (
        _ConvNorm(args, conv_args, conv)
        if is_alone and len(conv_args["state"].users) == 1
        else None
    )


def _rows_of(heads: Node) -> Node | None:
    """The rows [T, n * d] that `heads` [T, n, d] is a plain view of."""
    rows = behind_views(heads)
    is_view = rows is not heads and shape_of(rows)[0] == shape_of(heads)[0]
    return rows if is_view and len(shape_of(rows)) == 2 and is_reshape(heads, rows) else None


def _fuse(node: Node, write: Node, q: _Clip, k: _ConvNorm, v: _ConvNorm, rel: _Clip) -> set[Node]:
    """Put the call in; gives the convolutions that it replaces."""
    attention = arguments(node)
    is_dynamic = is_call(k.node, "dynamic_short_conv")
    conv_weight = "static_weight" if is_dynamic else "weight"
    fused = insert_call(
        node,
        "qkv_post",
        {
            "q": q.rows,
            "k": k.conv["x"],
            "v": v.conv["x"],
            "rel": rel.rows,
            "q_scale": q.scale,
            "rel_scale": rel.scale,
            "k_conv_weight": k.conv[conv_weight],
            "v_conv_weight": v.conv[conv_weight],
            "k_dynamic": k.conv.get("dynamic_weight"),
            "v_dynamic": v.conv.get("dynamic_weight"),
            "k_conv_state": k.conv["state"],
            "v_conv_state": v.conv["state"],
            "k_cache": attention["k_cache"],
            "v_cache": attention["v_cache"],
            "page_table": attention["page_table"],
            "position": attention["position"],
            "num_tokens": attention["num_tokens"],
            "slot": attention["slot"],
            "qk_threshold": q.threshold,
            "rel_threshold": rel.threshold,
            "log_n_floor": q.n_floor,
            "log_alpha": q.alpha,
            "eps": v.norm["eps"],
        },
        node,
    )
    for index, name in enumerate(("q", "k", "v", "rel")):
        attention[name].replace_all_uses_with(insert_getitem(fused, index))
    erase([write])
    return {k.node, v.node}
