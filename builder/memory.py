"""Memory planning: offsets of the arena's tensors from their lifetimes, and what fits a device.

Two tensors may share bytes if no launch needs both. Placing the largest first, each at the lowest
offset that is free for its whole life, is the greedy heuristic of Pisarchyk and Lee, "Efficient
Memory Management for Deep Neural Net Inference" (2020).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from inkrt.errors import ConfigError
from inkrt.plugins.tactic import HOPPER
from inkrt.runtime.engine_file import EngineCode, MemoryTable, StateLayout
from inkrt.runtime.plan import DTYPE_BYTES, inbox_bytes, table_bytes

# All memory of GPUs as nvidia-smi shows it, in bytes; a build needs no GPU, so it cannot ask one.
# What is free is less: opening an engine asks for it.
GPUS = {
    "NVIDIA H100": 81_559 * 2**20,
    "NVIDIA RTX PRO 6000": 97_887 * 2**20,
    "NVIDIA H200": 143_771 * 2**20,
    "NVIDIA B200": 183_359 * 2**20,
    "NVIDIA GB200": 189_471 * 2**20,
}
# What the driver, a context and loaded code take of it, generously.
CONTEXT_BYTES = 2**30
# The GPU that a target means.
DEVICES = {HOPPER: ("NVIDIA H200", GPUS["NVIDIA H200"])}

# Vector loads and TMA need at most 128; 256 keeps tensors on their own cache lines in pairs.
ALIGNMENT = 256


class Sized(Protocol):
    """A tensor of the weight files."""

    @property
    def num_bytes(self) -> int:
        """Its size."""
        ...


@dataclass(frozen=True, slots=True)
class Lifetime:
    """When a tensor's bytes are needed.

    Attributes:
        size: bytes.
        first: index of the launch that writes it.
        last: index of the last launch that reads it; at least `first`.
    """

    size: int
    first: int
    last: int


def plan_arena(lifetimes: list[Lifetime]) -> tuple[list[int], int]:
    """Offset of every tensor and the size of the arena, in bytes; offsets are ALIGNMENT-aligned."""
    order = sorted(range(len(lifetimes)), key=lambda index: (-lifetimes[index].size, index))
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    total = 0
    for index in order:
        tensor = lifetimes[index]
        neighbors = sorted(
            (offsets[other], offsets[other] + lifetimes[other].size)
            for other in placed
            if lifetimes[other].first <= tensor.last and tensor.first <= lifetimes[other].last
        )
        offset = 0
        for start, end in neighbors:
            if offset + tensor.size <= start:
                break
            offset = max(offset, -(-end // ALIGNMENT) * ALIGNMENT)
        offsets[index] = offset
        placed.append(index)
        total = max(total, offset + tensor.size)
    return offsets, total


def require_fits(num_bytes: int, target: str, num_ranks: int) -> None:
    """Refuse a rank that no GPU of the target can hold.

    Args:
        num_bytes: of a rank.
        target: of the engine.
        num_ranks: that share it.

    Raises:
        ConfigError: it is more than such a GPU has.
    """
    if target not in DEVICES:
        return
    device, size = DEVICES[target]
    if num_bytes > size:
        raise ConfigError(
            f"each of {num_ranks} ranks needs {num_bytes / 2**30:.2f} GiB, an {device} has "
            f"{size / 2**30:.2f}; build with a smaller --max-seq-len or --max-batch-size, or a "
            f"larger --tp-size; --dry-run lists what is needed"
        )


def memory_table(
    tensors: Sequence[Sized], layout: StateLayout, code: EngineCode, tp_size: int
) -> MemoryTable:
    """Bytes of a rank."""
    plans = code.plans

    def size(kind: str) -> int:
        return sum(
            torch.Size(spec.shape).numel() * DTYPE_BYTES[spec.dtype]
            for spec in layout.buffers
            if spec.kind == kind
        )

    paged = size("paged")
    return MemoryTable(
        weights=sum(tensor.num_bytes for tensor in tensors),
        paged_state=paged,
        ring_state=size("ring"),
        arena=max(plan.arena_bytes for plan in plans.values()),
        kept=sum(plan.scratch_bytes + table_bytes(plan) for plan in code.all_plans.values())
        + inbox_bytes(plans.values(), tp_size),
        paged_bytes_per_token=paged // (layout.num_pages * layout.page_tokens),
    )


def positions_left(gpu: str, num_bytes: int, position: int) -> int | None:
    """Positions whose keys and values fit a GPU.

    Args:
        gpu: a key of GPUS.
        num_bytes: that a rank needs whatever the context.
        position: bytes of one; 0 if all layers have a window.

    Returns:
        0 if not even the rest fits, None if any number does.
    """
    left = max(GPUS[gpu] - CONTEXT_BYTES - num_bytes, 0)
    return left // position if position else None if left else 0
