"""all_reduce + short_conv + residual_add + residual_mix + rms_norm(s) -> allreduce_conv_mix.

The boundary between two sub-layers: the sum over ranks, the short convolution of its result, the
update of the residual stream, and the normed mixtures that the next sub-layer reads. All of it is
per token and narrow, so on a GPU it is one kernel that a rank's partial sums go into and the next
projection's inputs come out of.
"""

from torch.fx import Node

from inkrt.builder.rewrite import (
    arguments,
    calls,
    insert_call,
    insert_getitem,
    insert_select,
    is_call,
    users_behind_views,
)
from inkrt.builder.trace import StepGraph


def fuse_allreduce_conv_mix(graph: StepGraph) -> StepGraph:
    """Fuse from every short convolution whose result joins a residual stream that is mixed next."""
    for conv in calls(graph.module.graph, "short_conv"):
        users = list(conv.users)
        if len(users) != 1 or not is_call(users[0], "residual_add"):
            continue
        mix = _mix_of(users[0])
        if mix is not None:
            _fuse(graph, conv, users[0], mix)
    return graph


def _mix_of(add: Node) -> Node | None:
    """The mixture whose last source is this residual and whose outputs go to norms only."""
    for user in add.users:
        if not is_call(user, "residual_mix"):
            continue
        sources = arguments(user)["sources"]
        is_last = sources[-1] is add and add not in sources[:-1]
        if is_last and all(is_call(norm, "rms_norm") for norm in users_behind_views(user)):
            return user
    return None


def _fuse(graph: StepGraph, conv: Node, add: Node, mix: Node) -> None:
    conv_args, add_args, mix_args = arguments(conv), arguments(add), arguments(mix)
    partial = conv_args["x"]
    tp_size = 1
    if is_call(partial, "all_reduce"):
        partial, tp_size = arguments(partial)["x"], graph.tp_size
    # One select and one norm per query, in the order of the queries.
    selects = sorted(mix.users, key=lambda select: arguments(select)["index"])
    norms = [next(iter(select.users)) for select in selects]
    norm_args = [arguments(norm) for norm in norms]
    fused = insert_call(
        mix,
        "allreduce_conv_mix",
        {
            "partial": partial,
            "conv_weight": conv_args["weight"],
            "conv_state": conv_args["state"],
            "position": conv_args["position"],
            "num_tokens": conv_args["num_tokens"],
            "slot": conv_args["slot"],
            "residual": add_args["residual"],
            "sources": list(mix_args["sources"][:-1]),
            "queries": mix_args["queries"],
            "norm_weights": [args["weight"] for args in norm_args],
            "mix_eps": mix_args["eps"],
            "norm_eps": norm_args[0]["eps"],
            "residual_dtype": add_args["dtype"],
            "dtype": norm_args[0]["dtype"],
            "tp_size": tp_size,
        },
        conv,
    )
    normed = insert_getitem(fused, 1)
    for index, norm in enumerate(norms):
        norm.replace_all_uses_with(insert_select(normed, index))
    add.replace_all_uses_with(insert_getitem(fused, 0), delete_user_cb=lambda user: user is not mix)
    for node in (*norms, *selects, mix, add, conv):
        node.graph.erase_node(node)
