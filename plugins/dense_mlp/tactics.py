"""How `dense_mlp` runs on a GPU: two w4a16 kernels."""

from inkrt.plugins.tactic import CallArgs, Output, Pointer, Tactic, number_arg, tensor_arg
from inkrt.plugins.w4a16.parts import is_supported, matrix_names
from inkrt.plugins.w4a16.shapes import Dims
from inkrt.plugins.w4a16.tactics import dense_mlp


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernels for bf16 activations and a rounded result."""
    x = tensor_arg(args, "x")
    if not is_supported(target, x) or args["partial"]:
        return []
    num_tokens, hidden = x.shape
    is_bf16 = args["gate_up_scales"] is None
    dense_width = tensor_arg(args, "gate_up").shape[0] // 2
    has_delta = args["delta"] is not None
    names = {
        "delta": Pointer("delta" if has_delta else "x"),
        "residual": Output(0),
        "out": Output(1),
        **matrix_names("codes", "scales", "global_scale", "gate_up", is_bf16=is_bf16),
        **matrix_names("down_codes", "down_scales", "down_scale", "down", is_bf16=is_bf16),
    }
    return [
        dense_mlp(
            Dims(hidden=hidden, dense_width=dense_width, bf16=is_bf16),
            num_tokens,
            eps=number_arg(args, "eps"),
            has_delta=has_delta,
            names=names,
        )
    ]
