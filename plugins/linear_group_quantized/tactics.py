"""How `linear_group_quantized` runs on a GPU: one stream of all tiles, or tiled products."""

from inkrt.plugins.tactic import (
    CallArgs,
    Output,
    Pointer,
    Tactic,
    number_list_arg,
    tensor_list_arg,
)
from inkrt.plugins.w4a16.parts import is_supported
from inkrt.plugins.w4a16.quant_tactics import Matrix, Products, linear_products


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernels for bf16 activations."""
    xs, weights = tensor_list_arg(args, "xs"), tensor_list_arg(args, "weights")
    if not is_supported(target, xs[0]):
        return []
    num_tokens, width = xs[0].shape
    is_nvfp4 = bool(tensor_list_arg(args, "global_scales"))
    input_of = [int(index) for index in number_list_arg(args, "input_of")]
    matrices = [
        Matrix(weight.shape[0], input_of[i], Pointer("weights", i), None, Output(i), is_plain=True)
        for i, weight in enumerate(weights)
    ]
    for i, codes in enumerate(tensor_list_arg(args, "codes")):
        scale = Pointer("global_scales", i) if is_nvfp4 else None
        number = len(weights) + i
        matrices.append(
            Matrix(codes.shape[0], input_of[number], Pointer("codes", i), scale, Output(number))
        )
    products = Products(
        "nvfp4" if is_nvfp4 else "mxfp8",
        width,
        tuple(Pointer("xs", i) for i in range(len(xs))),
        tuple(matrices),
    )
    return linear_products(num_tokens, products, weights="codes", scales="scales", plain="weights")
