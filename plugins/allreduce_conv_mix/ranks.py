"""How `allreduce_conv_mix` runs on several ranks: the sum, and what one rank does with it."""

from dataclasses import replace
from pathlib import Path

import torch

from inkrt.plugins.all_reduce import tactics as all_reduce
from inkrt.plugins.all_reduce.launches import ERROR, MAX_BLOCKS, MAX_RANKS
from inkrt.plugins.registry import MAX_VERIFY_TOKENS
from inkrt.plugins.tactic import (
    CallArgs,
    FindTactics,
    KernelLaunch,
    Output,
    Param,
    Peers,
    Pointer,
    Scratch,
    Tactic,
    TensorArg,
    number_arg,
    tensor_arg,
)

_TAPS = 4
# Names of kernels with the exchange, by the way of one rank.
_FUSED = {"slice_a_block": "push_in_slices", "row_a_cluster": "push_in_cluster"}


def find_tactics(target: str, args: CallArgs, of_one_rank: FindTactics) -> list[Tactic]:
    """The sum within the kernel where that shares rows of up to 8 tokens; and in front of it.

    Bits are the same.

    Args:
        target: e.g. "sm_90a".
        args: of the call, for 2 to 8 ranks.
        of_one_rank: finds tactics of a single rank, those that have a slice a block first.
    """
    partial, num_ranks = tensor_arg(args, "partial"), int(number_arg(args, "tp_size"))
    num_rows, width = partial.shape
    if not 2 <= num_ranks <= MAX_RANKS or partial.dtype != torch.float32:
        return []
    summed = TensorArg(partial.shape, torch.bfloat16)
    alone = of_one_rank(target, {**args, "partial": summed, "tp_size": 1})
    in_front = all_reduce.find_tactics(
        target, {"x": partial, "dtype": torch.bfloat16, "tp_size": num_ranks}
    )
    if not alone or not in_front:
        return []
    extra = 4 * num_rows * width
    sum_in_scratch = Scratch("summed", 2 * num_rows * width)
    (push,) = in_front[0].kernels
    push = _moved(push, {Pointer("x"): Pointer("partial"), Output(0): sum_in_scratch})
    within: list[Tactic] = []
    behind: list[Tactic] = []
    for way in alone:
        first = way.kernels[0]
        if way.name in _FUSED and len(way.kernels) == 1 and first.grid[0] <= MAX_BLOCKS:
            fused = _fused(first, num_ranks, num_rows, width)
            within.append(Tactic(_FUSED[way.name], (fused,), way.bytes + extra, 0))
        if way.name == "row_a_block" and num_rows <= MAX_VERIFY_TOKENS:
            continue
        name = "push_in_front" if not behind else f"push_in_front_{way.name}"
        rest = tuple(_moved(kernel, {Pointer("partial"): sum_in_scratch}) for kernel in way.kernels)
        behind.append(Tactic(name, (push, *rest), way.bytes + 2 * extra, 0))
    # Of several tokens, every block receives the rows of up to four.
    return [*behind, *within] if num_rows >= _TAPS else [*within, *behind]


def _fused(kernel: KernelLaunch, num_ranks: int, num_rows: int, width: int) -> KernelLaunch:
    """The kernel of one rank with the exchange: it has its parameters, and the way to others."""
    params = kernel.params if ERROR in kernel.params else (*kernel.params, ERROR)
    return replace(
        kernel,
        source=Path(__file__).parent / "ranks.cu",
        entry="conv_mix_ranks",
        defines=(*kernel.defines, ("RANKS", num_ranks), ("ROWS", min(num_rows, _TAPS))),
        params=(*params, Peers(4 * num_rows * width)),
    )


def _moved(kernel: KernelLaunch, moves: dict[Param, Param]) -> KernelLaunch:
    """A kernel whose parameters are others."""
    return replace(kernel, params=tuple(moves.get(param, param) for param in kernel.params))
