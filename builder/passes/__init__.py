"""Graph passes, one file each; `PASSES` is their order.

`passes_for` adds those that make sense for some targets only.
"""

from collections.abc import Callable
from functools import wraps
from typing import Literal

from inkrt.builder.passes.eliminate_dead_code import eliminate_dead_code
from inkrt.builder.passes.fuse_allreduce_conv_mix import fuse_allreduce_conv_mix
from inkrt.builder.passes.fuse_attention_gate import fuse_attention_gate
from inkrt.builder.passes.fuse_dense_mlp import fuse_dense_mlp
from inkrt.builder.passes.fuse_flint_layers import fuse_flint_layers
from inkrt.builder.passes.fuse_flint_moe import fuse_flint_moe
from inkrt.builder.passes.fuse_linear_group import fuse_linear_group
from inkrt.builder.passes.fuse_lm_head_sample import fuse_lm_head_sample
from inkrt.builder.passes.fuse_moe import fuse_moe
from inkrt.builder.passes.fuse_norm_qkv_rope import fuse_norm_qkv_rope
from inkrt.builder.passes.fuse_norm_router_shared import fuse_norm_router_shared
from inkrt.builder.passes.fuse_pushed_sums import fuse_pushed_sums
from inkrt.builder.passes.fuse_qkv_post import fuse_qkv_post
from inkrt.builder.passes.place_collectives import place_collectives
from inkrt.builder.trace import StepGraph

Pass = Callable[[StepGraph], StepGraph]
TargetPass = Callable[[StepGraph, str], StepGraph]

PASSES: tuple[Pass, ...] = (
    place_collectives,
    fuse_qkv_post,
    fuse_attention_gate,
    fuse_moe,
    fuse_allreduce_conv_mix,
    fuse_norm_qkv_rope,
    fuse_flint_moe,
    fuse_norm_router_shared,
    fuse_dense_mlp,
    fuse_lm_head_sample,
    fuse_linear_group,
    eliminate_dead_code,
)

# Behind the fusions. Of a target's kernels they ask whether what they would make can run.
TARGET_PASSES: tuple[TargetPass, ...] = (fuse_flint_layers,)
Sums = Literal["mix", "pushed"]
_SUM_PASSES: dict[Sums, tuple[TargetPass, ...]] = {
    "mix": (),
    "pushed": (fuse_pushed_sums,),
}


def passes_for(
    target: str, *, keeps_intermediates: bool = False, sums: Sums = "mix"
) -> tuple[Pass, ...]:
    """The passes of a build, in order.

    Args:
        target: what plans are lowered for; operators' references need no passes of their own.
        keeps_intermediates: whether a parity report will read what every launch of the common
            passes wrote, which nothing may merge then.
        sums: "pushed", products of several ranks send their parts of a sum themselves.
    """
    if target == "cpu" or keeps_intermediates:
        return PASSES
    chosen = (*TARGET_PASSES, *_SUM_PASSES[sums])
    return (*PASSES[:-1], *(_bind(run_pass, target) for run_pass in chosen), PASSES[-1])


def _bind(run_pass: TargetPass, target: str) -> Pass:
    """A pass for one target, under its own name."""

    @wraps(run_pass)
    def run(graph: StepGraph) -> StepGraph:
        return run_pass(graph, target)

    return run
