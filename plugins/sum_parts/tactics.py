"""How `sum_parts` runs on a GPU: four values a thread."""

from pathlib import Path

import torch

from inkrt.plugins.tactic import (
    GPU_TARGETS,
    CallArgs,
    Int32,
    Output,
    Pointer,
    Tactic,
    tensor_list_arg,
)
from inkrt.plugins.vector import blocks_for, bytes_of, count, is_dense, launch

_MOST_PARTS = 8


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """Up to eight parts of a multiple of four values."""
    parts = tensor_list_arg(args, "parts")
    size, is_float32 = count(parts[0]), args["dtype"] == torch.float32
    fits = len(parts) <= _MOST_PARTS and size % 4 == 0 and all(is_dense(part) for part in parts)
    if target not in GPU_TARGETS or not fits:
        return []
    kernel = launch(
        Path(__file__).parent / "sum_parts.cu",
        "sum_parts",
        (("PARTS", len(parts)), ("OUT_FLOAT32", int(is_float32))),
        (
            *(Pointer("parts", index) for index in range(len(parts))),
            *[Pointer("parts")] * (_MOST_PARTS - len(parts)),
            Output(),
            Int32(size // 4),
        ),
        blocks=blocks_for(size // 4),
    )
    moved = bytes_of(args, "parts") + size * (4 if is_float32 else 2)
    return [Tactic("four_a_thread", (kernel,), moved, (len(parts) - 1) * size)]
