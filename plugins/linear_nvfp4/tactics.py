"""How `linear_nvfp4` runs on a GPU: the w4a16 linear kernel."""

from inkrt.plugins.tactic import CallArgs, Tactic, tensor_arg
from inkrt.plugins.w4a16.parts import is_supported
from inkrt.plugins.w4a16.shapes import Dims
from inkrt.plugins.w4a16.tactics import linear


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernel for bf16 activations and a rounded result."""
    x = tensor_arg(args, "x")
    if not is_supported(target, x) or args["partial"]:
        return []
    num_tokens, width = x.shape
    return [linear(Dims(), num_tokens, rows=tensor_arg(args, "codes").shape[0], width=width)]
