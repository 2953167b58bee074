"""How `moe_conv_mix` runs on several ranks: the launches of both, of which the first sends."""

from inkrt.plugins.allreduce_conv_mix.pushed import pushed_pairs
from inkrt.plugins.moe.tactics import find_tactics as find_moe
from inkrt.plugins.tactic import CallArgs, Tactic, tensor_arg


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """Every way of `moe` with every way of the mix; none for one rank or wider steps."""
    senders = find_moe(target, {**args, "partial": True})
    return pushed_pairs(target, args, senders, tensor_arg(args, "x").shape[1])
