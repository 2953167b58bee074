"""How `gated_input` runs on a GPU: a cluster of eight blocks for each result of a token."""

from dataclasses import replace
from pathlib import Path

from inkrt.plugins.allreduce_conv_mix.tactics import listed
from inkrt.plugins.tactic import (
    CallArgs,
    Float32,
    Int32,
    Output,
    Pointer,
    Tactic,
    number_arg,
    tensor_arg,
    tensor_list_arg,
)
from inkrt.plugins.vector import bytes_of, has_kernels, is_dense, launch

CLUSTER = 8  # blocks of a token's result; each makes as many rows of `down` and of the result
_MOST_FORMER = 3
# A thread for each of a block's columns, and a warp's columns at least.
_MOST_THREADS = 1024
_MOST_RANK = 256


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """Up to three sources of messages, in bf16; columns that eight blocks of whole warps share."""
    mixed, down = tensor_arg(args, "mixed"), tensor_arg(args, "down")
    former, norms = tensor_list_arg(args, "former"), tensor_list_arg(args, "norm_weights")
    forget, gain = tensor_arg(args, "forget"), tensor_arg(args, "gain")
    (num_mixed, num_rows, width), (num_results, rank, _) = mixed.shape, down.shape
    fits = (
        has_kernels(target, down, forget, gain, *former, *norms)
        and is_dense(mixed)
        and is_dense(tensor_arg(args, "message_queries"))
        and len(former) <= _MOST_FORMER
        and width % (32 * CLUSTER) == 0
        and width // CLUSTER <= _MOST_THREADS
        and rank % CLUSTER == 0
        and rank <= _MOST_RANK
    )
    if not fits:
        return []
    kernel = launch(
        Path(__file__).parent / "gated_input.cu",
        "gated_input",
        (
            ("WIDTH", width),
            ("RANK", rank),
            ("FORMER", len(former)),
            ("RESULTS", num_results),
            ("OWN_MIXED", int(num_mixed > 1)),
        ),
        (
            Pointer("mixed"),
            *listed("former", len(former), _MOST_FORMER, Pointer("former")),
            *(Pointer(name) for name in ("message_queries", "down", "forget", "gain")),
            *listed("norm_weights", len(norms), 3, Pointer("norm_weights")),
            Output(),
            Int32(num_rows),
            Int32(int(number_arg(args, "first"))),
            *(Float32(number_arg(args, f"{name}_eps")) for name in ("mix", "gate", "norm")),
        ),
        blocks=CLUSTER * num_results * num_rows,
        threads=width // CLUSTER,
        smem_bytes=smem_bytes(width, rank, len(former)),
    )
    size = bytes_of(args, "mixed", "former", "down", "forget", "gain", "norm_weights")
    size += 4 * num_results * width + 2 * num_results * num_rows * width
    return [Tactic("result_a_cluster", (replace(kernel, cluster=CLUSTER),), size, 0)]


def smem_bytes(width: int, rank: int, num_former: int) -> int:
    """`Shared` of gated_input.cu: two rows in float32, one of both in bf16, and sums."""
    warps = width // CLUSTER // 32
    sums = 2 * num_former + 1
    words = 2 * width + width + rank + CLUSTER + (warps + 1) * sums
    return -(-4 * words // 16) * 16
