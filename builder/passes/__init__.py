"""Graph passes, one file each; `PASSES` is their order."""

from collections.abc import Callable

from inkrt.builder.passes.eliminate_dead_code import eliminate_dead_code
from inkrt.builder.passes.fuse_allreduce_conv_mix import fuse_allreduce_conv_mix
from inkrt.builder.passes.fuse_dense_mlp import fuse_dense_mlp
from inkrt.builder.passes.fuse_flint_moe import fuse_flint_moe
from inkrt.builder.passes.fuse_lm_head_sample import fuse_lm_head_sample
from inkrt.builder.passes.fuse_moe import fuse_moe
from inkrt.builder.passes.fuse_norm_qkv_rope import fuse_norm_qkv_rope
from inkrt.builder.passes.fuse_norm_router_shared import fuse_norm_router_shared
from inkrt.builder.passes.fuse_qkv_post import fuse_qkv_post
from inkrt.builder.passes.place_collectives import place_collectives
from inkrt.builder.trace import StepGraph

Pass = Callable[[StepGraph], StepGraph]

PASSES: tuple[Pass, ...] = (
    place_collectives,
    fuse_qkv_post,
    fuse_moe,
    fuse_allreduce_conv_mix,
    fuse_norm_qkv_rope,
    fuse_flint_moe,
    fuse_norm_router_shared,
    fuse_dense_mlp,
    fuse_lm_head_sample,
    eliminate_dead_code,
)
