"""How `moe_conv_mix` runs on several ranks: the launches of both, of which the first sends.

With weights, that launch goes on with them beside the mix, which hands it its results; both must
fit a multiprocessor.
"""

from dataclasses import replace

from inkrt.plugins.allreduce_conv_mix.pushed import pushed_pairs
from inkrt.plugins.moe.projecting import Projecting, projecting
from inkrt.plugins.moe.tactics import find_tactics as find_moe
from inkrt.plugins.moe.variants import MIX_BESIDE_BYTES
from inkrt.plugins.registry import MAX_VERIFY_TOKENS
from inkrt.plugins.tactic import CallArgs, KernelLaunch, Scratch, Tactic, tensor_arg
from inkrt.plugins.w4a16.packing import bf16_packing
from inkrt.plugins.w4a16.parts import is_supported

# Of a thread, beside those of the experts: 768 x 64 + 128 x 128 of a multiprocessor's 65,536.
MIX_REGISTERS = 128


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """Every way of `moe` with every way of the mix; none for one rank or wider steps."""
    x = tensor_arg(args, "x")
    num_tokens, width = x.shape
    if not is_supported(target, x) or num_tokens > MAX_VERIFY_TOKENS:
        return []
    projects = projecting(args)
    senders = find_moe(target, {**args, "partial": True}, projects)
    pairs = pushed_pairs(target, args, senders, width)
    if projects is None:
        return pairs
    num_values = sum(projects.rows) * width
    other = 2 * num_tokens * (projects.num_queries * width + sum(projects.rows))
    return [
        replace(
            pair,
            name=f"{pair.name}_streams",
            kernels=(*pair.kernels[:-1], _handing(pair.kernels[-1], pair.kernels[-2], projects)),
            bytes=pair.bytes + 2 * num_values + other,
            flops=pair.flops + 2 * num_tokens * num_values,
            packings=(*pair.packings, bf16_packing("weights", "plain")),
        )
        for pair in pairs
        if pair.name.endswith("_slices")  # a cluster does not fit beside experts
    ]


def _handing(mix: KernelLaunch, sender: KernelLaunch, projects: Projecting) -> KernelLaunch:
    """The mix that hands its results to the launch before it."""
    assert mix.smem_bytes <= MIX_BESIDE_BYTES, "both stand on a multiprocessor"
    (turns,) = (
        param for param in sender.params if isinstance(param, Scratch) and param.name == "turns"
    )
    return replace(
        mix,
        defines=(*mix.defines, ("HANDS", 1), ("REGISTERS", MIX_REGISTERS)),
        params=(*mix.params, projects.mixed, projects.soon, turns),
    )
