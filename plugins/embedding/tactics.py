"""How `embedding` runs on a GPU: a gather."""

import torch

from inkrt.plugins.tactic import GPU_TARGETS, CallArgs, Tactic, tensor_arg
from inkrt.plugins.w4a16.shapes import Dims
from inkrt.plugins.w4a16.tactics import embed


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The gather for bf16 rows of a multiple of eight values."""
    table, (num_tokens,) = tensor_arg(args, "table"), tensor_arg(args, "tokens").shape
    rows, hidden = table.shape
    fits = table.dtype == torch.bfloat16 and hidden % 8 == 0
    if target not in GPU_TARGETS or not fits:
        return []
    return [embed(Dims(hidden=hidden, vocab=rows), num_tokens)]
