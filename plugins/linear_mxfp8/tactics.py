"""How `linear_mxfp8` runs on a GPU: a stream of row tiles, or tiled products."""

from inkrt.plugins.tactic import CallArgs, Output, Pointer, Tactic, tensor_arg
from inkrt.plugins.w4a16.parts import is_supported
from inkrt.plugins.w4a16.quant_tactics import Matrix, Products, linear_products


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernels for bf16 activations."""
    x = tensor_arg(args, "x")
    if not is_supported(target, x):
        return []
    num_tokens, width = x.shape
    rows = tensor_arg(args, "codes").shape[0]
    matrix = Matrix(rows, 0, Pointer("codes"), None, Output(0))
    products = Products("mxfp8", width, (Pointer("x"),), (matrix,), bool(args["partial"]))
    return linear_products(num_tokens, products, weights="codes", scales="exponents")
