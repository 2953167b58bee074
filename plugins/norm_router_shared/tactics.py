"""How `norm_router_shared` runs on a GPU: the first of the w4a16 expert kernels."""

from inkrt.plugins.tactic import CallArgs, Output, Pointer, Tactic, number_arg, tensor_arg
from inkrt.plugins.w4a16.parts import is_supported, matrix_names, router
from inkrt.plugins.w4a16.shapes import Dims


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernel for bf16 activations."""
    x = tensor_arg(args, "x")
    if not is_supported(target, x):
        return []
    num_tokens, hidden = x.shape
    is_bf16 = args["shared_gate_up_scales"] is None
    dims = Dims(
        hidden=hidden,
        experts=tensor_arg(args, "router").shape[0],
        shared_width=tensor_arg(args, "shared_gate_up").shape[0] // 2,
        bf16=is_bf16,
    )
    has_delta = args["delta"] is not None
    names = {
        **matrix_names(
            "shared_gate_up_codes",
            "shared_gate_up_scales",
            "shared_gate_up_scale",
            "shared_gate_up",
            is_bf16=is_bf16,
        ),
        "delta": Pointer("delta" if has_delta else "x"),
        "router_weight": Pointer("router"),
        "residual": Output(0),
        "z": Output(1),
        "logits": Output(2),
        "shared_hidden": Output(3),
    }
    return [router(dims, num_tokens, eps=number_arg(args, "eps"), has_delta=has_delta, names=names)]
