"""How `allreduce_conv_mix` runs on several ranks: the sum, and what one rank does with it."""

from dataclasses import replace
from pathlib import Path

import torch

from inkrt.plugins.all_reduce import tactics as all_reduce
from inkrt.plugins.all_reduce.launches import MAX_BLOCKS, MAX_RANKS
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


def find_tactics(target: str, args: CallArgs, of_one_rank: FindTactics) -> list[Tactic]:
    """The sum within the kernel of a slice a block where that kernel takes the step; and in front.

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
    tactics = []
    first = alone[0].kernels[0]
    if dict(first.defines)["SPLIT"] and len(alone[0].kernels) == 1 and first.grid[0] <= MAX_BLOCKS:
        fused = _fused(first, num_ranks, num_rows, width)
        tactics.append(Tactic("push_in_slices", (fused,), alone[0].bytes + extra, 0))
    sum_in_scratch = Scratch("summed", 2 * num_rows * width)
    (push,) = in_front[0].kernels
    push = _moved(push, {Pointer("x"): Pointer("partial"), Output(0): sum_in_scratch})
    rest = tuple(
        _moved(kernel, {Pointer("partial"): sum_in_scratch}) for kernel in alone[0].kernels
    )
    tactics.append(Tactic("push_in_front", (push, *rest), alone[0].bytes + 2 * extra, 0))
    return tactics


def _fused(kernel: KernelLaunch, num_ranks: int, num_rows: int, width: int) -> KernelLaunch:
    """The kernel of one rank with the exchange: it has the same parameters, and one more."""
    return replace(
        kernel,
        source=Path(__file__).parent / "ranks.cu",
        entry="conv_mix_ranks",
        defines=(*kernel.defines, ("RANKS", num_ranks), ("ROWS", min(num_rows, _TAPS))),
        params=(*kernel.params, Peers(4 * num_rows * width)),
    )


def _moved(kernel: KernelLaunch, moves: dict[Param, Param]) -> KernelLaunch:
    """A kernel whose parameters are others."""
    return replace(kernel, params=tuple(moves.get(param, param) for param in kernel.params))
