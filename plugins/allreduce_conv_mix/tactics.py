"""How `allreduce_conv_mix` runs on a GPU, and the mix that others share."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from inkrt.plugins.allreduce_conv_mix import ranks
from inkrt.plugins.registry import MAX_VERIFY_TOKENS
from inkrt.plugins.short_conv.tactics import STEP, TAPS, is_wide, ring_defines, ring_write
from inkrt.plugins.tactic import (
    CallArgs,
    Float32,
    Int32,
    Output,
    Param,
    Pointer,
    Scratch,
    Tactic,
    TensorArg,
    number_arg,
    tensor_arg,
    tensor_list_arg,
)
from inkrt.plugins.vector import THREADS, bytes_of, has_kernels, is_dense, launch

_FOLDER = Path(__file__).parent
_SLICE = 4 * THREADS
_MOST_FORMER, _MOST_QUERIES = 9, 3
# Values of SPLIT, see conv_mix.cuh.
_LOOP, SLICES, CLUSTER = 0, 1, 2
CLUSTER_BLOCKS = 4


def num_slices(width: int) -> int:
    """`Mix::SLICES` of mix.cuh: blocks of a token."""
    return -(-width // _SLICE)


def num_sums(num_sources: int, num_queries: int) -> int:
    """`Mix::SUMS`: products of sources with one another and with queries."""
    return num_sources * (num_sources + 1) // 2 + num_queries * num_sources


def mix_bytes(num_sources: int, num_queries: int, warps: int = THREADS // 32) -> int:
    """`Mix::Memory` with the sums of so many warps; `Mix::RowMemory` with those of a row."""
    sums = num_sums(num_sources, num_queries)
    return 4 * ((warps + 1) * sums + num_queries * (num_sources + 1))


def exchange_params(
    num_rows: int, width: int, num_sources: int, num_queries: int
) -> tuple[Param, ...]:
    """Words that the blocks of a token hand to each other, and the error word."""
    words = -(-num_sums(num_sources, num_queries) // 4) * 4
    size = 8 * num_rows * num_slices(width) * words
    return Scratch("exchange", size, fill=0), Scratch("error", 4, fill=0)


def variants(num_rows: int) -> tuple[tuple[str, int], ...]:
    """Names of the ways to run a mix, with SPLIT; bits are the same. Best guess first.

    The blocks of `split` wait for each other, so wide steps, which have more than fit a GPU at
    once, have the other only.
    """
    loop = (("row_a_block", _LOOP),)
    return (("slice_a_block", SLICES), *loop) if num_rows <= MAX_VERIFY_TOKENS else loop


@dataclass(frozen=True, slots=True)
class Sharing:
    """How blocks share a row: one of `variants`, or a cluster.

    Attributes:
        name: of the tactic.
        split: the macro SPLIT.
        blocks: of a row.
        threads: of a block.
        warps: whose sums a block holds.
    """

    name: str
    split: int
    blocks: int
    threads: int
    warps: int


def sharings(num_rows: int, width: int) -> list[Sharing]:
    """Ways to run `allreduce_conv_mix`; bits are the same. Best guess first."""
    slices, warps = num_slices(width), THREADS // 32
    found = [
        Sharing(name, split, slices if split == SLICES else 1, THREADS, warps)
        for name, split in variants(num_rows)
    ]
    if num_rows <= MAX_VERIFY_TOKENS and width % _SLICE == 0:
        # All warps of a row over four blocks: as many as there are slices.
        row = Sharing("row_a_cluster", CLUSTER, CLUSTER_BLOCKS, 32 * slices, warps * slices)
        found.insert(1, row)
    return found


def mix_defines(
    num_rows: int, state: TensorArg, *, num_former: int, num_queries: int, residual: int,
    keeps_float32: bool, has_norms: bool = True,
) -> list[tuple[str, int | str]]:  # fmt: skip
    """Macros of conv_mix.cuh but SPLIT.

    Args:
        num_rows: of a step.
        state: the ring of the convolution.
        num_former: sources in front of the new residual.
        num_queries: of the mix.
        residual: 0 none, 1 bf16, 2 float32.
        keeps_float32: whether the new residual is float32.
        has_norms: whether results are normed.
    """
    defines: list[tuple[str, int | str]] = [
        ("WIDTH", state.shape[2]),
        ("FORMER", num_former),
        ("QUERIES", num_queries),
        ("RESIDUAL", residual),
        ("KEEPS_FLOAT32", int(keeps_float32)),
        *ring_defines(num_rows, state),
    ]
    return defines if has_norms else [*defines, ("NORMS", 0)]


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """Kernels for up to nine former sources and three queries, in bf16."""
    if args["tp_size"] != 1:
        return ranks.find_tactics(target, args, find_tactics)
    partial, state = tensor_arg(args, "partial"), tensor_arg(args, "conv_state")
    former, norms = tensor_list_arg(args, "sources"), tensor_list_arg(args, "norm_weights")
    residual, queries = args["residual"], tensor_arg(args, "queries")
    num_queries = queries.shape[0]
    fits = (
        args["tp_size"] == 1
        and args["dtype"] == torch.bfloat16
        and has_kernels(target, partial, state, *former, *norms)
        and tensor_arg(args, "conv_weight").shape[1] == TAPS
        and len(former) <= _MOST_FORMER
        and num_queries <= _MOST_QUERIES
        and is_dense(queries)
        and (residual is None or is_dense(tensor_arg(args, "residual")))
    )
    if not fits:
        return []
    (num_rows, width), num_sources = partial.shape, len(former) + 1
    kind = 0
    if isinstance(residual, TensorArg):
        kind = 2 if residual.dtype == torch.float32 else 1
    defines = mix_defines(
        num_rows, state, num_former=len(former), num_queries=num_queries, residual=kind,
        keeps_float32=args["residual_dtype"] == torch.float32, has_norms=bool(norms),
    )  # fmt: skip
    params: tuple[Param, ...] = (
        *(Pointer(name) for name in ("partial", "conv_weight", "conv_state")),
        *STEP,
        Pointer("residual" if kind else "partial"),
        *listed("sources", len(former), _MOST_FORMER, Pointer("partial")),
        Pointer("queries"),
        *listed(
            "norm_weights", len(norms), _MOST_QUERIES,
            Pointer("norm_weights" if norms else "queries"),
        ),
        Output(0),
        Output(1),
        Int32(num_rows),
        Float32(number_arg(args, "mix_eps")),
        Float32(number_arg(args, "norm_eps")),
    )  # fmt: skip
    size = bytes_of(args, "partial", "sources", "residual", "conv_weight", "queries")
    # The new residual, the results, and the ring: three rows read and one written.
    is_wide_residual = args["residual_dtype"] == torch.float32
    of_result = 2 if norms else 4
    of_column = (4 if is_wide_residual else 2) + of_result * num_queries + 4 * 2
    size += bytes_of(args, "norm_weights") + num_rows * width * of_column
    tactics = []
    for way in sharings(num_rows, width):
        words: tuple[Param, ...] = ()
        if way.split == SLICES:
            words = exchange_params(num_rows, width, num_sources, num_queries)
        kernel = launch(
            _FOLDER / "conv_mix.cu",
            "conv_mix",
            (*defines, ("SPLIT", way.split)),
            (*params, *words),
            blocks=num_rows * way.blocks,
            threads=way.threads,
            smem_bytes=mix_bytes(num_sources, num_queries, way.warps),
        )
        if way.split == CLUSTER:
            kernel = replace(kernel, cluster=CLUSTER_BLOCKS)
        kernels = [kernel]
        if not is_wide(num_rows, state):
            kernels.append(ring_write("partial", "conv_state", state))
        tactics.append(Tactic(way.name, tuple(kernels), size, 0))
    return tactics


def listed(argument: str, number: int, most: int, filler: Pointer) -> list[Pointer]:
    """Addresses of the tensors of a list, and of anything where the kernel could take more."""
    return [Pointer(argument, index) for index in range(number)] + [filler] * (most - number)
