"""Memory planning: offsets of the arena's tensors from their lifetimes.

Two tensors may share bytes if no launch needs both. Placing the largest first, each at the lowest
offset that is free for its whole life, is the greedy heuristic of Pisarchyk and Lee, "Efficient
Memory Management for Deep Neural Net Inference" (2020).
"""

from dataclasses import dataclass

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
