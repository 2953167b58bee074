"""How `linear` runs on a GPU: a w4a16 kernel for bf16 weights."""

from inkrt.plugins.tactic import CallArgs, Output, Pointer, Tactic, tensor_arg
from inkrt.plugins.w4a16.parts import is_supported
from inkrt.plugins.w4a16.ring_tactics import Group, linear_group
from inkrt.plugins.w4a16.shapes import MULTIPROCESSORS, Dims
from inkrt.plugins.w4a16.tactics import linear


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernels for bf16 activations.

    A block a row tile, where all blocks run at once, or a stream of tiles; bits are equal.
    """
    x = tensor_arg(args, "x")
    if not is_supported(target, x):
        return []
    num_tokens, width = x.shape
    rows = tensor_arg(args, "weight").shape[0]
    weight, is_float = Pointer("weight"), bool(args["partial"])
    is_one_wave = width % 256 == 0 and rows % 8 == 0 and rows <= 16 * MULTIPROCESSORS
    if is_one_wave and not is_float:
        # The kernel reads no global scale of bf16 weights.
        names = {"codes": weight, "global_scale": Pointer("x")}
        return [linear(Dims(bf16=True), num_tokens, rows=rows, width=width, names=names)]
    group = Group(width, (rows,), (Pointer("x"),), (0,), (weight,), (Output(0),), is_float)
    return linear_group(num_tokens, group, weight="weight")
