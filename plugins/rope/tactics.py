"""How `rope` runs on a GPU: four pairs a thread."""

from pathlib import Path

import torch

from inkrt.plugins.tactic import (
    CallArgs,
    Int32,
    Output,
    Pointer,
    Tactic,
    number_arg,
    tensor_arg,
)
from inkrt.plugins.vector import blocks_for, bytes_of, count, has_kernels, launch


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """Heads of a multiple of eight bf16 values."""
    x, theta = tensor_arg(args, "x"), number_arg(args, "theta")
    num_rows, heads, head = x.shape
    if not has_kernels(target, x) or head % 8:
        return []
    exponents = torch.arange(0, head, 2, dtype=torch.float32) / head
    frequencies = (1.0 / theta**exponents).tolist()
    kernel = launch(
        Path(__file__).parent / "rope.cu",
        "rope",
        (
            ("HEADS", heads),
            ("HEAD", head),
            ("INV_FREQ", ",".join(f"{value.hex()}f" for value in frequencies)),
        ),
        (Pointer("x"), Pointer("position"), Output(), Int32(num_rows * heads)),
        blocks=blocks_for(count(x) // 8),
    )
    return [Tactic("four_pairs_a_thread", (kernel,), 2 * bytes_of(args, "x"), 0)]
