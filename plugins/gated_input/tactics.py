"""How `gated_input` runs on a GPU: a cluster of eight blocks for each result of a token."""

from dataclasses import replace
from pathlib import Path

from inkrt.plugins.allreduce_conv_mix.tactics import listed
from inkrt.plugins.tactic import (
    BLACKWELL,
    HOPPER,
    CallArgs,
    Float32,
    Int32,
    Output,
    Pointer,
    Scratch,
    Tactic,
    number_arg,
    tensor_arg,
    tensor_list_arg,
)
from inkrt.plugins.vector import bytes_of, has_kernels, is_dense, launch

CLUSTER = 8  # blocks of a token's result; each makes as many rows of `down` and of the result
_MOST_FORMER = 3
THREADS = 256
# Beside a block of w4a16/ring_linear.cu of 12 warps with 96: of each of the four files of registers
# it leaves two warps 112. Compiled for sm_100a it needs some more, and nothing has been measured.
REGISTERS = {HOPPER: 112, BLACKWELL: 120}
# With a dry pass, of which more stays in registers: of one token, whose blocks start early.
REGISTERS_DRY = 168
_MOST_WIDTH = 4608  # more would not stay in registers
_RANKS = tuple(1 << n for n in range(3, 9))  # lanes of a warp share a row


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """Up to three sources of messages, in bf16; columns in 128s, ranks that lanes share."""
    mixed, down = tensor_arg(args, "mixed"), tensor_arg(args, "down")
    former, norms = tensor_list_arg(args, "former"), tensor_list_arg(args, "norm_weights")
    forget, gain = tensor_arg(args, "forget"), tensor_arg(args, "gain")
    (num_mixed, num_rows, width), (num_results, rank, _) = mixed.shape, down.shape
    fits = (
        has_kernels(target, down, forget, gain, *former, *norms)
        and is_dense(mixed)
        and is_dense(tensor_arg(args, "message_queries"))
        and len(former) <= _MOST_FORMER
        and width % 128 == 0
        and width <= _MOST_WIDTH
        and rank in _RANKS
    )
    if not fits:
        return []
    is_dry = num_rows == 1 and target == HOPPER
    kernel = launch(
        Path(__file__).parent / "gated_input.cu",
        "gated_input",
        (
            ("WIDTH", width),
            ("RANK", rank),
            ("FORMER", len(former)),
            ("RESULTS", num_results),
            ("OWN_MIXED", int(num_mixed > 1)),
            ("REGISTERS", REGISTERS_DRY if is_dry else REGISTERS[target]),
            ("DRY_PASS", int(is_dry)),
        ),
        (
            Pointer("mixed"),
            *listed("former", len(former), _MOST_FORMER, Pointer("former")),
            *(Pointer(name) for name in ("message_queries", "down", "forget", "gain")),
            *listed("norm_weights", len(norms), 3, Pointer("norm_weights")),
            Output(),
            Scratch("error", 4, fill=0),
            Int32(num_rows),
            Int32(int(number_arg(args, "first"))),
            *(Float32(number_arg(args, f"{name}_eps")) for name in ("mix", "gate", "norm")),
        ),
        blocks=CLUSTER * num_results * num_rows,
        threads=THREADS,
        smem_bytes=smem_bytes(width, rank, len(former)),
    )
    size = bytes_of(args, "mixed", "former", "down", "forget", "gain", "norm_weights")
    size += 4 * num_results * width + 2 * num_results * num_rows * width
    return [Tactic("result_a_cluster", (replace(kernel, cluster=CLUSTER),), size, 0)]


def smem_bytes(width: int, rank: int, num_former: int) -> int:
    """`Shared` of gated_input.cu: the gate's input in bf16, u, a block's columns, and sums."""
    sums = 2 * num_former + 3
    words = 2 * width + 3 * (width // CLUSTER) + rank + CLUSTER + 4 + sums * THREADS // 32
    return -(-4 * words // 16) * 16
