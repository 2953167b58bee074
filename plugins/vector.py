"""What the tactics of operators on rows have in common: kernels of four values a thread."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from inkrt.plugins.tactic import (
    GPU_TARGETS,
    CallArg,
    CallArgs,
    KernelLaunch,
    Param,
    TensorArg,
)

THREADS = 128
# A warp reduces a head of four values a lane.
HEAD_WIDTHS = (16, 32, 64, 128)


def has_kernels(target: str, *tensors: TensorArg) -> bool:
    """Whether the target is a GPU, and the tensors are bf16 of whole rows of fours, densely."""
    return target in GPU_TARGETS and all(
        tensor.dtype == torch.bfloat16 and is_dense(tensor) and tensor.shape[-1] % 4 == 0
        for tensor in tensors
    )


def is_dense(tensor: TensorArg) -> bool:
    """Whether the elements stand one behind the other."""
    return tensor.strides is None


def count(tensor: TensorArg) -> int:
    """Elements."""
    return math.prod(tensor.shape)


def blocks_for(items: int, threads: int = THREADS) -> int:
    """Blocks of that many threads for one item a thread."""
    return -(-items // threads)


def bytes_of(args: CallArgs, *names: str) -> int:
    """Bytes of the named arguments that are there, tensors or lists of them."""

    def size(value: CallArg) -> int:
        if isinstance(value, TensorArg):
            return count(value) * value.dtype.itemsize
        return sum(size(item) for item in value) if isinstance(value, list) else 0

    return sum(size(args[name]) for name in names)


def launch(
    source: Path,
    entry: str,
    defines: Sequence[tuple[str, int | str]],
    params: Sequence[Param],
    *,
    blocks: int,
    threads: int = THREADS,
    smem_bytes: int = 0,
) -> KernelLaunch:
    """A one-dimensional launch."""
    return KernelLaunch(
        source=source,
        entry=entry,
        defines=tuple(defines),
        grid=(blocks, 1, 1),
        block=(threads, 1, 1),
        params=tuple(params),
        smem_bytes=smem_bytes,
    )
