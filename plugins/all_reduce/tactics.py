"""How `all_reduce` runs on several GPUs: one push of float32 parts, see `lamport.cuh`."""

from pathlib import Path

import torch

from inkrt.plugins.all_reduce.launches import ERROR, MAX_RANKS, grid_of, is_wide, live_tokens
from inkrt.plugins.tactic import (
    GPU_TARGETS,
    CallArgs,
    KernelLaunch,
    Output,
    Peers,
    Pointer,
    Tactic,
    number_arg,
    tensor_arg,
)


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernel for 2 to 8 ranks and rows of a multiple of 4 values; no other."""
    x, dtype = tensor_arg(args, "x"), args["dtype"]
    num_tokens, width = x.shape
    num_ranks = int(number_arg(args, "tp_size"))
    fits = 2 <= num_ranks <= MAX_RANKS and width % 4 == 0
    if target not in GPU_TARGETS or not fits:
        return []
    is_bf16 = dtype == torch.bfloat16
    num_bytes = 4 * num_tokens * width
    grid = grid_of(num_bytes // 16)
    kernel = KernelLaunch(
        source=Path(__file__).parent / "all_reduce.cu",
        entry="all_reduce",
        defines=(
            ("RANKS", num_ranks), ("NUM_TOKENS", num_tokens), ("WIDTH", width),
            ("THREADS", grid.threads), ("OUT_BF16", int(is_bf16)),
            ("IS_WIDE", int(is_wide(num_tokens))),
        ),
        grid=(grid.blocks, 1, 1),
        block=(grid.threads, 1, 1),
        params=(
            Pointer("x"), Output(0), Peers(num_bytes), live_tokens(num_tokens, Pointer("x")), ERROR,
        ),
    )  # fmt: skip
    moved = num_bytes + (2 if is_bf16 else 4) * num_tokens * width
    return [Tactic("push", (kernel,), moved, (num_ranks - 1) * num_tokens * width)]
