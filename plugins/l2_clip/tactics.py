"""How `l2_clip` runs on a GPU: a few lanes a head."""

from pathlib import Path

import torch

from inkrt.plugins.tactic import (
    CallArgs,
    Float32,
    Int32,
    Output,
    Pointer,
    Tactic,
    number_arg,
    tensor_arg,
)
from inkrt.plugins.vector import HEAD_WIDTHS, THREADS, bytes_of, has_kernels, launch


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """Heads of 4 to 128 bf16 values, a power of two."""
    x, has_scale = tensor_arg(args, "x"), args["scale"] is not None
    num_rows, heads, head = x.shape
    fits = has_kernels(target, x) and head in (4, 8, *HEAD_WIDTHS)
    if not fits or (has_scale and tensor_arg(args, "scale").dtype != torch.bfloat16):
        return []
    kernel = launch(
        Path(__file__).parent / "l2_clip.cu",
        "l2_clip",
        (("HEADS", heads), ("HEAD", head), ("HAS_SCALE", int(has_scale))),
        (
            Pointer("x"),
            Pointer("scale" if has_scale else "x"),
            Output(),
            Int32(num_rows * heads),
            Float32(number_arg(args, "threshold")),
        ),
        blocks=-(-num_rows * heads * head // (4 * THREADS)),
    )
    return [Tactic("head_a_job", (kernel,), 2 * bytes_of(args, "x") + bytes_of(args, "scale"), 0)]
