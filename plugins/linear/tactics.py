"""How `linear` runs on a GPU: the w4a16 linear kernel, with bf16 weights."""

from inkrt.plugins.tactic import CallArgs, Pointer, Tactic, tensor_arg
from inkrt.plugins.w4a16.parts import is_supported
from inkrt.plugins.w4a16.shapes import Dims
from inkrt.plugins.w4a16.tactics import linear


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernel for bf16 activations and a rounded result."""
    x = tensor_arg(args, "x")
    if not is_supported(target, x) or args["partial"]:
        return []
    num_tokens, width = x.shape
    # The kernel reads no global scale of bf16 weights.
    names = {"codes": Pointer("weight"), "global_scale": Pointer("x")}
    rows = tensor_arg(args, "weight").shape[0]
    return [linear(Dims(bf16=True), num_tokens, rows=rows, width=width, names=names)]
