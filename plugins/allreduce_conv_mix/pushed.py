"""A product of several ranks and the mix behind it as one exchange: the product's launch sends.

Its last kernel stores float32 results into the inboxes of all ranks, and `ranks.cu` waits for
nothing else, so neither the end of that kernel nor a read of its result stands in between
(`all_reduce/push.cuh`).
"""

from dataclasses import replace
from itertools import product

import torch

from inkrt.plugins.all_reduce.launches import ERROR, MAX_BLOCKS
from inkrt.plugins.allreduce_conv_mix.tactics import find_tactics
from inkrt.plugins.registry import MAX_VERIFY_TOKENS
from inkrt.plugins.tactic import (
    CallArgs,
    InputPointer,
    Int32,
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
from inkrt.plugins.w4a16.shapes import MAX_SMEM

# Macros of a kernel that sends.
_SENDS: dict[str, tuple[tuple[str, int], ...]] = {
    "moe_experts": (("PUSHES", 1),),
    "ring_linear": (("RESULT", 3),),
}
# Ways of `allreduce_conv_mix` with the exchange inside, and what they are called behind a sender.
_RECEIVES = {"push_in_slices": "slices", "push_in_cluster": "cluster"}


def pushed_pairs(target: str, args: CallArgs, senders: list[Tactic], width: int) -> list[Tactic]:
    """Every way of the product with every way of the mix; none for wider steps or one rank.

    Args:
        target: e.g. "sm_90a".
        args: of both, but `partial`.
        senders: ways of the product whose result is one float32 tensor.
        width: of its rows.
    """
    num_rows, num_ranks = tensor_arg(args, "x").shape[0], int(number_arg(args, "tp_size"))
    if num_rows > MAX_VERIFY_TOKENS or num_ranks < 2:
        return []
    partial = TensorArg((num_rows, width), torch.float32)
    mixes = find_tactics(target, {**args, "partial": partial})
    peers = Peers(4 * num_rows * width)
    pairs = []
    for sender, mix in product(senders, mixes):
        if mix.name not in _RECEIVES or sender.kernels[-1].entry not in _SENDS:
            continue
        *before, last = sender.kernels
        (receiver,) = mix.kernels
        sending = _sending(last, num_ranks, peers)
        if sending.smem_bytes > MAX_SMEM:
            continue
        kernels = (*before, sending, _receiving(receiver))
        # The result is neither written nor read.
        num_bytes = sender.bytes + mix.bytes - 2 * peers.num_bytes
        name = f"{sender.name}_{_RECEIVES[mix.name]}"
        pairs.append(Tactic(name, kernels, num_bytes, sender.flops + mix.flops, sender.packings))
    return pairs


def _sending(kernel: KernelLaunch, num_ranks: int, peers: Peers) -> KernelLaunch:
    """The kernel with the way to all ranks in place of its result."""
    own: dict[str, int | float | str] = {"RANKS": num_ranks, "TRIGGER": 1}
    own |= _SENDS[kernel.entry]
    defines = {**dict(kernel.defines), **own}
    assert kernel.grid[0] <= MAX_BLOCKS, "a block reads a turn of its own"
    params: list[Param] = [peers if param == Output(0) else param for param in kernel.params]
    live = InputPointer("num_tokens")
    if kernel.entry == "moe_experts":  # in front of `rows` and `first`
        params.insert(next(i for i, param in enumerate(params) if isinstance(param, Int32)), live)
    else:
        params.append(live)
    # `Push` of push.cuh, behind what is aligned to 128 bytes as a whole.
    smem_bytes = -(-(kernel.smem_bytes + 8 * num_ranks + 24) // 128) * 128
    return replace(
        kernel, defines=tuple(defines.items()), params=tuple(params), smem_bytes=smem_bytes
    )


def _receiving(kernel: KernelLaunch) -> KernelLaunch:
    """The mix, whose parts have been sent already; what stood for absent tensors is another."""
    kernel = with_own_scratch(kernel)
    queries: Param = Pointer("queries")
    params = (queries if param == Pointer("partial") else param for param in kernel.params)
    return replace(kernel, defines=(*kernel.defines, ("SENT", 1)), params=tuple(params))


def with_own_scratch(kernel: KernelLaunch) -> KernelLaunch:
    """The mix with scratch that no kernel in front of it shares by its name; but the error word."""
    return replace(
        kernel,
        params=tuple(
            replace(param, name=f"mix_{param.name}")
            if isinstance(param, Scratch) and param != ERROR
            else param
            for param in kernel.params
        ),
    )
