"""Memory planning: offsets of the arena's tensors from their lifetimes, and what fits a device.

Two tensors may share bytes if no launch needs both. Placing the largest first, each at the lowest
offset that is free for its whole life, is the greedy heuristic of Pisarchyk and Lee, "Efficient
Memory Management for Deep Neural Net Inference" (2020).
"""

from dataclasses import dataclass

from inkrt.errors import ConfigError
from inkrt.plugins.tactic import HOPPER

# All memory of the GPU that a target means, as nvidia-smi shows it, in bytes; a build needs no GPU,
# so it cannot ask one. What is free is less: opening an engine asks for it.
DEVICES = {HOPPER: ("NVIDIA H200", 143_771 * 2**20)}

# Vector loads and TMA need at most 128; 256 keeps tensors on their own cache lines in pairs.
ALIGNMENT = 256


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
