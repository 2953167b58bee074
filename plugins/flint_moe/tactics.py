"""How `flint_moe` runs on a GPU: the second and third of the w4a16 expert kernels."""

from inkrt.plugins.tactic import CallArgs, Output, Param, Pointer, Tactic, number_arg, tensor_arg
from inkrt.plugins.w4a16.parts import experts, is_supported, matrix_names
from inkrt.plugins.w4a16.shapes import Dims


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernels for bf16 activations and all experts on one rank."""
    x = tensor_arg(args, "x")
    if not is_supported(target, x) or args["partial"] or args["rank"] is not None:
        return []
    num_tokens, hidden = x.shape
    num_experts, double_width, _ = tensor_arg(args, "gate_up").shape
    is_bf16 = args["gate_up_scales"] is None
    if is_bf16 and args["gate_up_global_scale"] is not None:
        return []  # decoded NVFP4, which runs on the CPU only
    dims = Dims(
        hidden=hidden,
        experts=num_experts,
        top_k=int(number_arg(args, "top_k")),
        width=double_width // 2,
        shared_width=tensor_arg(args, "shared").shape[1],
        bf16=is_bf16,
    )
    names: dict[str, Param] = {
        "z": Pointer("x"),
        "logits": Pointer("logits"),
        "shared_hidden": Pointer("shared"),
        "out": Output(0),
    }
    for name in ("gate_up", "down", "shared_down"):
        names |= matrix_names(
            f"{name}_codes", f"{name}_scales", f"{name}_scale", name, is_bf16=is_bf16
        )
    return [experts(dims, num_tokens, names=names)]
