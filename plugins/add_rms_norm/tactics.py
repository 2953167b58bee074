"""How `add_rms_norm` runs on a GPU: one block a token."""

from pathlib import Path

import torch

from inkrt.plugins.tactic import (
    GPU_TARGETS,
    CallArgs,
    Float32,
    KernelLaunch,
    Output,
    Pointer,
    Tactic,
    number_arg,
    tensor_arg,
)


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernel for bf16 rows of a multiple of 256 values up to 8192; no other."""
    x = tensor_arg(args, "x")
    num_tokens, hidden = x.shape
    fits = x.dtype == torch.bfloat16 and args["dtype"] == torch.bfloat16
    if target not in GPU_TARGETS or not fits or hidden % 256 or hidden > 8192:
        return []
    has_delta = args["delta"] is not None
    kernel = KernelLaunch(
        source=Path(__file__).parent / "add_rms_norm.cu",
        entry="add_rms_norm",
        defines=(("HIDDEN", hidden), ("HAS_DELTA", int(has_delta))),
        grid=(num_tokens, 1, 1),
        block=(hidden // 8, 1, 1),
        params=(
            Pointer("x"),
            Pointer("delta" if has_delta else "x"),
            Pointer("weight"),
            Output(0),
            Output(1),
            Float32(number_arg(args, "eps")),
        ),
    )
    return [Tactic("row_a_block", (kernel,), (4 + has_delta) * 2 * num_tokens * hidden, 0)]
