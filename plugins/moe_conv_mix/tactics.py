"""How `moe_conv_mix` runs on several ranks: the launches of both, of which the first sends."""

from inkrt.plugins.allreduce_conv_mix.pushed import pushed_pairs
from inkrt.plugins.moe.tactics import find_tactics as find_moe
from inkrt.plugins.registry import MAX_VERIFY_TOKENS
from inkrt.plugins.tactic import CallArgs, Tactic, tensor_arg
from inkrt.plugins.w4a16.parts import is_supported


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """Every way of `moe` with every way of the mix; none for one rank or wider steps."""
    x = tensor_arg(args, "x")
    num_tokens, width = x.shape
    if not is_supported(target, x) or num_tokens > MAX_VERIFY_TOKENS:
        return []
    return pushed_pairs(target, args, find_moe(target, {**args, "partial": True}), width)
