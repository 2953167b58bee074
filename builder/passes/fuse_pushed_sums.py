"""linear or moe + allreduce_conv_mix -> linear_conv_mix, moe_conv_mix, where ranks share the sum.

The two become one launch of a plan, whose first kernels send each rank's part of the sum to all,
so that they are tuned, timed and cut as one: the second half alone would wait for words that nobody
sends.
"""

from torch.fx import Node

from inkrt.builder.rewrite import arguments, calls, insert_call, is_call
from inkrt.builder.tactics import call_args, find_tactics
from inkrt.builder.trace import StepGraph


def fuse_pushed_sums(graph: StepGraph, target: str) -> StepGraph:
    """Fuse every mix of several ranks with the product before it, if the target has kernels."""
    for mix in calls(graph.module.graph, "allreduce_conv_mix"):
        _fuse(mix, target)
    graph.module.graph.eliminate_dead_code()
    return graph


def _fuse(mix: Node, target: str) -> None:
    args = arguments(mix)
    partial = args.pop("partial")
    names = [name for name in ("linear", "moe") if is_call(partial, name)]
    if args["tp_size"] == 1 or not names or len(partial.users) > 1:
        return
    product = arguments(partial)
    if not product.pop("partial"):
        return
    name = f"{names[0]}_conv_mix"
    if not find_tactics(name, target, call_args(product | args)):
        return
    fused = insert_call(mix, name, product | args, partial)
    mix.replace_all_uses_with(fused)
    mix.graph.erase_node(mix)
