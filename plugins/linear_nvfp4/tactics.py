"""How `linear_nvfp4` runs on a GPU: the w4a16 linear kernel, or a stream of row tiles."""

from inkrt.plugins.tactic import CallArgs, Output, Pointer, Tactic, tensor_arg
from inkrt.plugins.w4a16.parts import is_supported
from inkrt.plugins.w4a16.quant_tactics import Matrix, Products, linear_products
from inkrt.plugins.w4a16.shapes import MULTIPROCESSORS, Dims
from inkrt.plugins.w4a16.tactics import linear


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernels for bf16 activations.

    A block a row tile, where all blocks run at once, K is whole chunks and the result is rounded;
    else a stream of tiles, whose packing is another. T does not matter for the choice, as all steps
    read one packing.
    """
    x = tensor_arg(args, "x")
    if not is_supported(target, x):
        return []
    num_tokens, width = x.shape
    rows, is_float = tensor_arg(args, "codes").shape[0], bool(args["partial"])
    if width % 256 == 0 and rows <= 16 * MULTIPROCESSORS and rows % 8 == 0 and not is_float:
        return [linear(Dims(), num_tokens, rows=rows, width=width)]
    matrix = Matrix(rows, 0, Pointer("codes"), Pointer("global_scale"), Output(0))
    products = Products("nvfp4", width, (Pointer("x"),), (matrix,), is_float)
    return linear_products(num_tokens, products, weights="codes", scales="scales")
