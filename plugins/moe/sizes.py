"""Sizes of the kernels of `moe`: threads, rows of a block, shared memory."""

from dataclasses import dataclass

from inkrt.plugins.moe.packing import VECTOR_BYTES, VECTOR_K, Format, num_vectors
from inkrt.plugins.w4a16.shapes import MAX_TOKENS, struct_bytes

WARPS = 24
SLICE_VECTORS, PART_VECTORS = 3, 9  # as in experts.cu
# Vectors of a stage: what gives about two kilobytes or one vector.
STAGE_VECTORS: dict[Format, int] = {"nvfp4": 3, "bf16": 1, "mxfp8": 1}
# Activations of all experts up to this size stand in shared memory in the second part.
MOST_HIDDEN_BYTES = 80 * 1024
MOST_ROUTER_ROWS = 4


@dataclass(frozen=True, slots=True)
class MoeDims:
    """Sizes of a mixture of experts on one rank.

    Attributes:
        hidden: D, a multiple of 64 up to 4608.
        width: F, of an expert on this rank, a multiple of 16 (MXFP8: 32).
        experts: E, at most 512.
        own_experts: L, experts of this rank.
        top_k: at most 8.
        kind: of weights.
    """

    hidden: int
    width: int
    experts: int
    own_experts: int
    top_k: int
    kind: Format

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights on this rank, padding included."""
        vectors = self.width // 8 * num_vectors(self.hidden)
        vectors += self.hidden // 16 * num_vectors(self.width)
        return vectors * VECTOR_BYTES[self.kind]

    def distinct(self, num_tokens: int) -> float:
        """Expected number of this rank's experts that a step reads, of independent choices."""
        return self.own_experts * (1 - (1 - self.top_k / self.experts) ** num_tokens)


def router_threads(hidden: int) -> int:
    """Threads of a block of router.cu: up to six pieces of four values for each."""
    return -(-hidden // (4 * 6 * 32)) * 32


def router_shares(num_tokens: int, *, narrow: bool = False) -> tuple[int, int]:
    """Sets of threads of router.cu that share K, and tokens of each, a power of two.

    Args:
        num_tokens: T.
        narrow: one set has all tokens.
    """
    shares = 1 if narrow or num_tokens == 1 else 2
    return shares, 1 << (-(-min(num_tokens, MAX_TOKENS) // shares) - 1).bit_length()


def router_bytes(dims: MoeDims, rows: int, num_tokens: int, *, narrow: bool = False) -> int:
    """`Shared` of router.cu, of `rows` experts a block; see `router_shares`."""
    shares, share = router_shares(num_tokens, narrow=narrow)
    sums = rows * shares * share
    return struct_bytes(
        (rows * dims.hidden * 4, 128), (router_threads(dims.hidden) // 32 * sums * 4, 4), (8, 8)
    )


def hidden_bytes(dims: MoeDims, rows: int) -> int:
    """Activations of all experts that `rows` tokens choose, in padded rows."""
    return rows * dims.top_k * (num_vectors(dims.width) * VECTOR_K + 8) * 2


def num_parts(dims: MoeDims) -> int:
    """Parts of an expert's K of the output, one warp's each."""
    return -(-num_vectors(dims.width) // PART_VECTORS)


def most_block_tiles(dims: MoeDims, rows: int, blocks: int) -> int:
    """Gate/up tiles that a block of experts.cu can have."""
    return -(-min(rows * dims.top_k, dims.own_experts) * (dims.width // 8) // blocks)


def experts_bytes(
    dims: MoeDims, rows: int, stages: int, blocks: int, turns: int, *, narrow: bool = False
) -> int:
    """`Shared` of experts.cu, without what sends.

    Args:
        dims: sizes.
        rows: tokens.
        stages: of a warp.
        blocks: of the launch.
        turns: of shared tiles between two barriers.
        narrow: whether sums and route have no more places than tokens need.
    """
    columns = 1 if rows == 1 else MAX_TOKENS
    sum_columns = -(-rows // 2) * 2 if narrow and rows > 1 else columns
    most_tiles = most_block_tiles(dims, rows, blocks)
    slots = (rows if narrow else MAX_TOKENS) * dims.top_k
    words = -(-dims.own_experts // 32)
    parts = num_parts(dims)
    row_tiles = -(-(dims.hidden // 16) // blocks)
    partial = row_tiles * columns * dims.top_k * parts * 64
    in_shared = hidden_bytes(dims, rows)
    is_shared = in_shared <= MOST_HIDDEN_BYTES
    z = rows * (dims.hidden + 8) * 2
    at_once = WARPS // -(-num_vectors(dims.hidden) // SLICE_VECTORS)
    buffers = 1 if rows == 1 and most_tiles <= turns * at_once else 2
    sums = buffers * turns * WARPS * 64 * sum_columns
    route = struct_bytes(
        (3 * slots * 4, 4), (words * 4, 4), (slots * 2, 2), (slots * 8, 1), (slots, 1),
        (MAX_TOKENS, 1),
    )  # fmt: skip
    stage = STAGE_VECTORS[dims.kind] * VECTOR_BYTES[dims.kind]
    return struct_bytes(
        (WARPS * stages * stage, 128),
        (max(z, in_shared if is_shared else partial), 16),
        (max(sums, partial if is_shared else 0), 16),
        (route, 4),
        (WARPS * stages * 8, 8),
    )
