"""What launches that exchange data between ranks have in common; see `lamport.cuh`."""

from dataclasses import dataclass

from inkrt.plugins.registry import MAX_VERIFY_TOKENS
from inkrt.plugins.tactic import InputPointer, Param, Scratch

MAX_RANKS = 8
# Blocks wait for other ranks, so all of a launch must fit a GPU at once.
MAX_BLOCKS = 132
# A kernel that waits in vain for another rank reports it here.
ERROR = Scratch("error", 4, fill=0)
QUAD_BYTES = 16


@dataclass(frozen=True, slots=True)
class Grid:
    """Blocks, and threads of each, for a number of quads of 16 bytes."""

    blocks: int
    threads: int


def grid_of(num_quads: int) -> Grid:
    """A thread for each quad in blocks as small as fit; if none fit, threads take turns."""
    for threads in (128, 256, 512):
        blocks = -(-num_quads // threads)
        if blocks <= MAX_BLOCKS:
            return Grid(blocks, threads)
    return Grid(MAX_BLOCKS, 512)


def is_wide(num_tokens: int) -> bool:
    """Whether a step may have fewer live rows than it has room for, which are then left out."""
    return num_tokens > MAX_VERIFY_TOKENS


def live_tokens(num_tokens: int, otherwise: Param) -> Param:
    """The number of live rows where a kernel asks for it, else any pointer."""
    return InputPointer("num_tokens") if is_wide(num_tokens) else otherwise
