"""linear + all_gather + crop [+ softcap] + sample -> lm_head_sample.

The fused operator never has to write the logits of all ranks before it chooses; on several ranks it
exchanges what the choice needs. Logits without a softcap must be in float32 already, as `sample`
takes no others.
"""

from torch.fx import Node

from inkrt.builder.projection import Projection, projection_of
from inkrt.builder.rewrite import (
    are_users_after,
    arguments,
    behind_views,
    calls,
    insert_call,
    insert_getitem,
    is_call,
    shape_of,
)
from inkrt.builder.trace import StepGraph

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "position", "num_tokens", "last_row")


def fuse_lm_head_sample(graph: StepGraph) -> StepGraph:
    """Fuse each `sample` call with the projection of its logits."""
    for node in calls(graph.module.graph, "sample"):
        sample = arguments(node)
        logits, cap = sample["logits"], 0.0
        columns = logits
        if is_call(logits, "softcap"):
            softcap = arguments(logits)
            columns, cap = softcap["x"], softcap["cap"]
        head = _head_of(columns, graph.tp_size)
        if head is None or not are_users_after(logits, node):
            continue
        fused = insert_call(
            node,
            "lm_head_sample",
            {
                "x": head.x,
                **head.weight_arguments("weight"),
                "vocab_size": shape_of(logits)[-1],
                "cap": cap,
                "logits_dtype": columns.meta["val"].dtype,
                **{name: sample[name] for name in SAMPLING},
                "tp_size": graph.tp_size,
            },
            node,
        )
        node.replace_all_uses_with(insert_getitem(fused, 0))
        logits.replace_all_uses_with(
            insert_getitem(fused, 1),
            delete_user_cb=lambda user: user is not node,  # noqa: B023
        )
    graph.module.graph.eliminate_dead_code()
    return graph


def _head_of(logits: Node, tp_size: int) -> Projection | None:
    """The projection whose first columns, of all ranks, are `logits`."""
    node = behind_views(logits)
    whole, crop = node.meta["val"], logits.meta["val"]
    is_crop = (
        crop.dim() == 2
        and len(crop) == len(whole)
        and crop.stride() == whole.stride()
        and crop.storage_offset() == whole.storage_offset()
    )
    if tp_size > 1:
        if not is_call(node, "all_gather"):
            return None
        node = arguments(node)["x"]
    return projection_of(node) if is_crop else None
