"""all_reduce + short_conv + residual_add + residual_mix [+ rms_norms] -> allreduce_conv_mix.

The boundary between two sub-layers: the sum over ranks, the short convolution of its result, the
update of the residual stream, and the normed mixtures that the next sub-layer reads. All of it is
per token and narrow, so on a GPU it is one kernel that a rank's partial sums go into and the next
projection's inputs come out of. Where messages enter mixtures before these are normed, the mixtures
themselves come out.
"""

import torch
from torch.fx import Node

from inkrt.builder.rewrite import (
    are_users_after,
    arguments,
    calls,
    insert_call,
    insert_getitem,
    insert_select,
    is_call,
)
from inkrt.builder.trace import StepGraph


def fuse_allreduce_conv_mix(graph: StepGraph) -> StepGraph:
    """Fuse from every short convolution whose result joins a residual stream that is mixed next."""
    for conv in calls(graph.module.graph, "short_conv"):
        add = _add_of(conv, graph.tp_size)
        if add is None:
            continue
        for mix in add.users:
            norms = _norms_of(mix, add, conv.meta["val"].dtype)
            if norms is not None:
                _fuse(graph, conv, add, mix, norms)
                break
    graph.module.graph.eliminate_dead_code()
    return graph


def _add_of(conv: Node, tp_size: int) -> Node | None:
    """The one reader of a convolution, if it adds it to the residual stream.

    The convolution moves to the mixture, so nothing else may read its state. On several ranks its
    input must be a sum that is reduced for it alone.
    """
    args = arguments(conv)
    if len(args["state"].users) != 1 or len(conv.users) != 1:
        return None
    if not args.get("is_scaled", True) or args["num_tokens"] is None:
        return None
    if tp_size > 1 and not (is_call(args["x"], "all_reduce") and len(args["x"].users) == 1):
        return None
    (add,) = conv.users
    is_update = is_call(add, "residual_add") and arguments(add)["residual"] is not conv
    return add if is_update else None


def _norms_of(mix: Node, add: Node, dtype: torch.dtype) -> list[Node] | None:
    """The norms of a mixture's outputs in the order of its queries, if it can be fused with `add`.

    The residual must be the last source, and each output must be read by a norm and nothing else;
    or there are no norms, and `gated_input` alone reads them.
    """
    if not is_call(mix, "residual_mix") or not are_users_after(add, mix):
        return None
    sources = arguments(mix)["sources"]
    if sources[-1] is not add or add in sources[:-1]:
        return None
    return _read_norms(mix, dtype)


def _read_norms(mix: Node, dtype: torch.dtype) -> list[Node] | None:
    """See `_norms_of`, for the mixture alone."""
    if all(is_call(user, "gated_input") for user in mix.users):
        return []
    norm_of: dict[int, Node] = {}
    for select in mix.users:
        if select.target is not torch.ops.aten.select.int or len(select.users) != 1:
            return None
        (norm,) = select.users
        if not is_call(norm, "rms_norm") or arguments(select)["dim"] != 0:
            return None
        norm_of[arguments(select)["index"]] = norm
    num_queries = len(mix.meta["val"])
    if len(mix.users) != num_queries or set(norm_of) != set(range(num_queries)):
        return None
    norms = [norm_of[index] for index in range(num_queries)]
    args = [arguments(norm) for norm in norms]
    is_uniform = all(
        x["weight"] is not None and x["dtype"] == dtype and x["eps"] == args[0]["eps"] for x in args
    )
    return norms if is_uniform else None


def _fuse(graph: StepGraph, conv: Node, add: Node, mix: Node, norms: list[Node]) -> None:
    conv_args, add_args, mix_args = arguments(conv), arguments(add), arguments(mix)
    partial = conv_args["x"]
    if graph.tp_size > 1:
        partial = arguments(partial)["x"]
    norm_args = [arguments(norm) for norm in norms]
    selects = [args["x"] for args in norm_args]
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
            "norm_eps": norm_args[0]["eps"] if norms else mix_args["eps"],
            "residual_dtype": add_args["dtype"],
            "dtype": conv.meta["val"].dtype,
            "tp_size": graph.tp_size,
        },
        conv,
    )
    normed = insert_getitem(fused, 1)
    if not norms:
        mix.replace_all_uses_with(normed)
    for index, norm in enumerate(norms):
        norm.replace_all_uses_with(insert_select(normed, index))
    add.replace_all_uses_with(insert_getitem(fused, 0), delete_user_cb=lambda user: user is not mix)
    for node in (*norms, *selects, mix, add, conv):
        node.graph.erase_node(node)
