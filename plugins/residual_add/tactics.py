"""How `residual_add` runs on a GPU: four values a thread."""

from pathlib import Path

import torch

from inkrt.plugins.tactic import CallArgs, Int32, Output, Pointer, Tactic, TensorArg, tensor_arg
from inkrt.plugins.vector import blocks_for, bytes_of, count, has_kernels, is_dense, launch


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """A bf16 update of any width that is a multiple of four."""
    update, residual = tensor_arg(args, "update"), args["residual"]
    kind = 0
    if isinstance(residual, TensorArg):
        kind = 2 if residual.dtype == torch.float32 else 1
        if not is_dense(residual):
            return []
    if not has_kernels(target, update):
        return []
    is_float32 = args["dtype"] == torch.float32
    kernel = launch(
        Path(__file__).parent / "residual_add.cu",
        "residual_add",
        (("RESIDUAL", kind), ("OUT_FLOAT32", int(is_float32))),
        (
            Pointer("residual" if kind else "update"),
            Pointer("update"),
            Output(),
            Int32(count(update) // 4),
        ),
        blocks=blocks_for(count(update) // 4),
    )
    size = bytes_of(args, "update", "residual") + count(update) * (4 if is_float32 else 2)
    return [Tactic("four_a_thread", (kernel,), size, 0)]
