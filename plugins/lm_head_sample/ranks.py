"""How `lm_head_sample` runs on several ranks: logits of own rows, gathered by all.

A softcap takes every logit by itself, so a rank's head may apply it before the exchange.
"""

from dataclasses import replace

from inkrt.plugins.all_gather.tactics import gather, grid_of_rows
from inkrt.plugins.all_reduce.launches import MAX_RANKS
from inkrt.plugins.tactic import (
    CallArgs,
    FindTactics,
    KernelLaunch,
    Output,
    Param,
    Scratch,
    Tactic,
    number_arg,
    tensor_arg,
)
from inkrt.plugins.w4a16.sample_tactics import sample

_LOGITS = Output(1)


def find_tactics(target: str, args: CallArgs, of_one_rank: FindTactics) -> list[Tactic]:
    """Every head of one rank that ends in `sample`, for 2 to 8 ranks of whole fours of rows.

    Args:
        target: e.g. "sm_90a".
        args: of the call.
        of_one_rank: finds tactics of a single rank; the logits are their output 1.
    """
    num_tokens, rows = tensor_arg(args, "x").shape[0], tensor_arg(args, "weight").shape[0]
    num_ranks = int(number_arg(args, "tp_size"))
    if not 2 <= num_ranks <= MAX_RANKS or rows % 4:
        return []
    vocab_size = int(number_arg(args, "vocab_size"))
    tactics = []
    for tactic in of_one_rank(target, {**args, "tp_size": 1, "vocab_size": rows}):
        *heads, last = tactic.kernels
        if last.entry != "sample":
            continue
        own = Scratch("slice", 4 * num_tokens * rows)
        _, count = grid_of_rows(num_tokens, rows)
        best, row = (Scratch(f"{x}_of_all", 4 * num_tokens * count) for x in ("best", "row"))
        push = gather(num_ranks, num_tokens, rows, vocab_size, x=own, out=_LOGITS, best=(best, row))
        draw = sample(
            vocab_size, num_tokens, count, last_row=bool(args["last_row"]),
            names={"best": best, "row": row},
        )  # fmt: skip
        kernels = (*(_moved(kernel, own) for kernel in heads), push, draw)
        num_bytes = tactic.bytes + 8 * num_tokens * vocab_size
        tactics.append(replace(tactic, kernels=kernels, bytes=num_bytes))
    return tactics


def _moved(kernel: KernelLaunch, logits: Param) -> KernelLaunch:
    """A kernel that writes its logits elsewhere."""
    params = tuple(logits if param == _LOGITS else param for param in kernel.params)
    return replace(kernel, params=params)
