"""add_rms_norm + projection + head norms [+ rope] + state write -> norm_qkv_rope.

Everything from the residual stream to the attention of a layer without convolutions. The norm is
folded into the projection that reads it, so that a GPU needs one launch; keys and values are
written where they are made, ahead of the attention, where `kv_order` allows it. A long prefill step
over a ring keeps the definition's order and operators.
"""

from dataclasses import dataclass

from torch.fx import Node

from inkrt.builder.kv_order import may_write_first, write_of
from inkrt.builder.projection import (
    Projection,
    add_norm_arguments,
    add_norm_of,
    projection_of,
    replace_outputs,
)
from inkrt.builder.rewrite import (
    VIEW_OPS,
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


@dataclass(frozen=True, slots=True)
class _Heads:
    """[rope of] rms_norm of the heads of some columns; theta 0 for no rope."""

    norm: Node
    columns: Node
    theta: float


def fuse_norm_qkv_rope(graph: StepGraph) -> StepGraph:
    """Fuse the chain in front of every `sink_attention` where the write may move ahead."""
    fused = []
    for node in calls(graph.module.graph, "sink_attention"):
        write = write_of(node)
        if write is not None and may_write_first(arguments(node)):
            fused.append(_fuse(node, write))
    if any(fused):
        graph.module.graph.eliminate_dead_code()  # once: it goes through the whole graph
    return graph


def _fuse(node: Node, write: Node) -> bool:
    """Fuse what is in front of `node`; gives whether it is what norm_qkv_rope does."""
    attention = arguments(node)
    q, k = (_heads_of(attention[name], attention["position"]) for name in ("q", "k"))
    rows = projection_of(behind_views(attention["v"]))
    add = add_norm_of(rows.x) if rows is not None else None
    if q is None or k is None or rows is None or add is None:
        return False
    if not _is_whole(rows, q, k, node, write) or list(rows.x.users) != [rows.node]:
        return False
    norms = [arguments(add), arguments(q.norm), arguments(k.norm)]
    is_uniform = len({(norm["eps"], norm["dtype"]) for norm in norms}) == 1
    if not is_uniform or q.theta != k.theta or rows.partial:
        return False
    fused = insert_call(
        add,
        "norm_qkv_rope",
        {
            **add_norm_arguments(add),
            **rows.weight_arguments("qkv"),
            "q_norm": norms[1]["weight"],
            "k_norm": norms[2]["weight"],
            "k_cache": attention["k_cache"],
            "v_cache": attention["v_cache"],
            "page_table": attention["page_table"],
            "position": attention["position"],
            "num_tokens": attention["num_tokens"],
            "slot": attention["slot"],
            "eps": norms[0]["eps"],
            "rope_theta": q.theta,
        },
        node,
    )
    replace_outputs(add, {0: insert_getitem(fused, 0)})
    for index, name in enumerate(("q", "k", "v"), start=1):
        attention[name].replace_all_uses_with(insert_getitem(fused, index))
    erase([write])
    return True


def _heads_of(value: Node, position: Node) -> _Heads | None:
    theta = 0.0
    if is_call(value, "rope"):
        rope = arguments(value)
        if rope["position"] is not position:
            return None
        value, theta = rope["x"], rope["theta"]
    if not is_call(value, "rms_norm") or arguments(value)["weight"] is None:
        return None
    return _Heads(value, arguments(value)["x"], theta)


def _is_whole(rows: Projection, q: _Heads, k: _Heads, node: Node, write: Node) -> bool:
    """Whether queries, keys and values are the columns of `rows`, in this order, and all readers.

    The values are those of the attention `node`.
    """
    value = arguments(node)["v"]
    first = 0
    for columns in (q.columns, k.columns, value):
        if behind_views(columns) is not rows.node or not _are_heads(columns, rows.node, first):
            return False
        _, num_heads, head_dim = shape_of(columns)
        first += num_heads * head_dim
    wanted = {q.norm, k.norm, node, write}
    return first == shape_of(rows.node)[1] and _readers(rows.node) == wanted


def _are_heads(columns: Node, rows: Node, first: int) -> bool:
    """Whether `columns` [T, n, d] are n * d columns of `rows` [T, N] from column `first` on."""
    part, whole = columns.meta["val"], rows.meta["val"]
    if part.dim() != 3 or len(part) != len(whole):
        return False
    stride = part.stride(0) if len(part) > 1 else whole.stride(0)  # means nothing in one row
    return bool(
        whole.is_contiguous()
        and (stride, part.stride(1), part.stride(2)) == (whole.stride(0), part.shape[2], 1)
        and part.storage_offset() - whole.storage_offset() == first
    )


def _readers(node: Node) -> set[Node]:
    """The users of a node, looking through views."""
    readers: set[Node] = set()
    for user in node.users:
        readers |= _readers(user) if user.target in VIEW_OPS else {user}
    return readers
