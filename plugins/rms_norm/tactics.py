"""How `rms_norm` runs on a GPU: a block a row."""

from pathlib import Path

import torch

from inkrt.plugins.tactic import (
    GPU_TARGETS,
    CallArgs,
    Float32,
    Output,
    Pointer,
    Tactic,
    number_arg,
    tensor_arg,
)
from inkrt.plugins.vector import bytes_of, count, is_dense, launch

_MOST_THREADS, _MOST_ROUNDS = 512, 4


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """Rows of a multiple of four values up to 8192; a weight must be bf16."""
    x, weight = tensor_arg(args, "x"), args["weight"]
    width = x.shape[-1]
    has_fit_weight = weight is None or tensor_arg(args, "weight").dtype == torch.bfloat16
    rounds = -(-width // (4 * _MOST_THREADS))
    fits = width % 4 == 0 and rounds <= _MOST_ROUNDS and has_fit_weight and is_dense(x)
    if target not in GPU_TARGETS or not fits:
        return []
    threads = -(-width // (4 * rounds * 32)) * 32
    kernel = launch(
        Path(__file__).parent / "rms_norm.cu",
        "rms_norm",
        (
            ("WIDTH", width),
            ("THREADS", threads),
            ("X_FLOAT32", int(x.dtype == torch.float32)),
            ("OUT_FLOAT32", int(args["dtype"] == torch.float32)),
            ("HAS_WEIGHT", int(weight is not None)),
        ),
        (
            Pointer("x"),
            Pointer("x" if weight is None else "weight"),
            Output(),
            Float32(number_arg(args, "eps")),
        ),
        blocks=count(x) // width,
        threads=threads,
    )
    return [Tactic("row_a_block", (kernel,), 2 * bytes_of(args, "x"), 0)]
