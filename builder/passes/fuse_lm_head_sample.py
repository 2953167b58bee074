"""linear + all_gather + crop + softcap + sample -> lm_head_sample.

The fused operator never has to write the logits of all ranks before it chooses; on several ranks it
exchanges what the choice needs.
"""

from inkrt.builder.rewrite import (
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
        softcap_node = sample["logits"]
        if not is_call(softcap_node, "softcap"):
            continue
        softcap = arguments(softcap_node)
        head_node = behind_views(softcap["x"])
        if is_call(head_node, "all_gather"):
            head_node = arguments(head_node)["x"]
        if not is_call(head_node, "linear"):
            continue
        head = arguments(head_node)
        fused = insert_call(
            node,
            "lm_head_sample",
            {
                "x": head["x"],
                "weight": head["weight"],
                "vocab_size": shape_of(softcap_node)[-1],
                "cap": softcap["cap"],
                **{name: sample[name] for name in SAMPLING},
                "tp_size": graph.tp_size,
            },
            node,
        )
        node.replace_all_uses_with(insert_getitem(fused, 0))
        softcap_node.replace_all_uses_with(
            insert_getitem(fused, 1),
            delete_user_cb=lambda user: user is not node,  # noqa: B023
        )
    return graph
