"""Several linear of what one call gives -> linear_group, or linear_group_quantized.

The input projections of a layer read the outputs of one call, so a GPU can stream all of their
weights in one launch. The group stands where the first of them stood; a later one joins it if its
input is there by then. A product has no effect beside its result and its input is never written
again, so it may move ahead of whatever stands between. Quantized weights of a group have one form;
plain ones may stand beside them.
"""

import operator

from torch.fx import Node

from inkrt.builder.projection import Projection, projection_of
from inkrt.builder.rewrite import (
    behind_views,
    insert_call,
    insert_getitem,
    shape_of,
)
from inkrt.builder.trace import StepGraph
from inkrt.plugins.linear_group.op import MAX_INPUTS, MAX_WEIGHTS


def fuse_linear_group(graph: StepGraph) -> StepGraph:
    """Fuse all projections of the outputs of each call, at most MAX_WEIGHTS at a time."""
    groups: list[list[Projection]] = []
    for node in graph.module.graph.nodes:
        projection = projection_of(node)
        if projection is None or _producer(projection) is None:
            continue
        group = next((group for group in groups if _fits(projection, group)), None)
        if group is None:
            groups.append([projection])
        else:
            group.append(projection)
    for group in groups:
        if len(group) > 1:
            _fuse(group)
    graph.module.graph.eliminate_dead_code()
    return graph


def _producer(projection: Projection) -> Node | None:
    """The call that makes the input of a projection; None if it cannot be in a group."""
    x = projection.x
    if projection.partial or not x.meta["val"].is_contiguous():
        return None
    producer = behind_views(x)
    if producer.target is operator.getitem:
        producer = producer.args[0]
    # Placeholders are weights, inputs and state, which may be written.
    return producer if producer.op == "call_function" else None


def _fits(projection: Projection, group: list[Projection]) -> bool:
    """Whether a projection can move to the first of a group that has room."""
    first, x = group[0], projection.x
    inputs = {other.x for other in group} | {x}
    forms = {other.form for other in group} | {projection.form}
    return (
        len(group) < MAX_WEIGHTS
        and len(inputs) <= MAX_INPUTS
        and len(forms - {"plain"}) <= 1
        and _producer(projection) is _producer(first)
        and shape_of(x) == shape_of(first.x)
        and x.meta["val"].dtype == first.x.meta["val"].dtype
        and x < first.node
    )


def _fuse(group: list[Projection]) -> None:
    inputs = list(dict.fromkeys(projection.x for projection in group))
    plain = [projection for projection in group if projection.form == "plain"]
    quantized = [projection for projection in group if projection.form != "plain"]
    outputs = plain + quantized
    args = {
        "xs": inputs,
        "weights": [projection.weight for projection in plain],
        "input_of": [inputs.index(projection.x) for projection in outputs],
    }
    name = "linear_group"
    if quantized:
        name = "linear_group_quantized"
        args |= {
            "codes": [projection.weight for projection in quantized],
            "scales": [projection.scales for projection in quantized],
            "global_scales": [
                projection.global_scale
                for projection in quantized
                if projection.global_scale is not None
            ],
        }
    fused = insert_call(group[0].node, name, args, group[0].node)
    for number, projection in enumerate(outputs):
        projection.node.replace_all_uses_with(insert_getitem(fused, number))
