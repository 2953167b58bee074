"""Ways to run the experts of `moe`: which there are, and what memory a block of each has."""

from dataclasses import dataclass

from inkrt.plugins.moe.packing import VECTOR_BYTES
from inkrt.plugins.moe.sizes import (
    MOST_HIDDEN_BYTES,
    MOST_ROUTER_ROWS,
    STAGE_VECTORS,
    WARPS,
    MoeDims,
    experts_bytes,
    hidden_bytes,
    most_block_tiles,
    router_bytes,
)
from inkrt.plugins.w4a16.shapes import MAX_SMEM, MAX_TOKENS, MULTIPROCESSORS

MOST_STAGES = 8
# Bytes of a block that are to be on their way: about twice what the latency of the memory asks for.
LEAST_IN_FLIGHT = 60_000
# Of a multiprocessor; a block takes 1024 bytes more than it asks for.
SM_BYTES = 228 * 1024
# Registers of a thread. A multiprocessor has four files of them, of 512 for each lane, and the
# warps of a block go round these: of the experts' 24 each file has 6, of the router's 6 two files
# have 2. Beside each other: 6 x 72 + 2 x 40.
ROUTER_REGISTERS, REGISTERS_BESIDE, REGISTERS = 40, 72, 80
# Of several tokens: 384 threads of 80, beside two blocks of `allreduce_conv_mix`.
ROUTER_REGISTERS_OF_SEVERAL = 80
MOST_NARROW_TOKENS, REGISTERS_NARROW = 4, 64


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run the experts; bits are the same.

    Attributes:
        is_beside: a block leaves room for the router's; else it has more weights on their way. Of
            one token.
        is_narrow: the router has one set of threads, and experts have room for no more tokens than
            there are. Of two to four tokens by words.
        by_words: blocks wait for each other's activations themselves, not at a counter. Only where
            activations stand in shared memory.
        share_rows: row tiles that do not go round all blocks are shared by all. Of several tokens.
    """

    by_words: bool
    is_beside: bool = False
    is_narrow: bool = False
    share_rows: bool = False

    @property
    def name(self) -> str:
        """Of the tactic."""
        parts = {
            "beside": self.is_beside, "narrow": self.is_narrow, "words": self.by_words,
            "rows": self.share_rows,
        }  # fmt: skip
        return "_".join(["moe", *(part for part, is_so in parts.items() if is_so)])


def variants(dims: MoeDims, num_tokens: int) -> list[Variant]:
    """What `moe` takes for these sizes, first the way with which whole steps took least time."""
    is_shared = hidden_bytes(dims, min(num_tokens, MAX_TOKENS)) <= MOST_HIDDEN_BYTES
    ways = (True, False) if is_shared else (False,)
    if num_tokens == 1:
        return [
            Variant(by_words=by_words, is_beside=is_beside)
            for is_beside in (True, False)
            for by_words in ways
        ]
    blocks, row_tiles = num_blocks(dims), dims.hidden // 16
    can_share = row_tiles > blocks and row_tiles % blocks > 0
    narrow = Variant(by_words=True, is_narrow=True, share_rows=can_share)
    stage = WARPS * STAGE_VECTORS[dims.kind] * VECTOR_BYTES[dims.kind]
    can_narrow = (
        is_shared
        and num_tokens <= MOST_NARROW_TOKENS
        and stages_and_turns(dims, num_tokens, narrow)[0] * stage > LEAST_IN_FLIGHT
    )
    return [
        *([narrow] if can_narrow else []),
        *([Variant(by_words=is_shared, share_rows=True)] if can_share else []),
        *(Variant(by_words=by_words) for by_words in ways if is_shared or not can_share),
    ]


def num_blocks(dims: MoeDims) -> int:
    """Blocks of experts.cu."""
    return min(MULTIPROCESSORS, max(dims.hidden // 16, dims.width // 8))


def rows_of_router(dims: MoeDims) -> int:
    """Experts of a block of router.cu."""
    return min(-(-dims.experts // MULTIPROCESSORS), MOST_ROUTER_ROWS)


def shared_bytes(dims: MoeDims, num_tokens: int, variant: Variant, stages: int, turns: int) -> int:
    """Shared memory of a block of experts.cu."""
    rows = min(num_tokens, MAX_TOKENS)
    return experts_bytes(dims, rows, stages, num_blocks(dims), turns, narrow=variant.is_narrow)


def stages_and_turns(dims: MoeDims, num_tokens: int, variant: Variant) -> tuple[int, int]:
    """Stages of a warp, 0 if none fit, and tiles that are shared between two barriers."""
    room = MAX_SMEM
    if variant.is_beside or variant.is_narrow:
        router = router_bytes(dims, rows_of_router(dims), num_tokens, narrow=variant.is_narrow)
        room = SM_BYTES - 2048 - router

    def most_stages(turns: int) -> int:
        fitting = (
            n
            for n in range(2, MOST_STAGES + 1)
            if shared_bytes(dims, num_tokens, variant, n, turns) <= room
        )
        return max(fitting, default=0)

    # As many tiles as cost no stage, of one token all that it can.
    if num_tokens == 1:
        turns = min(8, most_block_tiles(dims, 1, num_blocks(dims)))
    else:
        turns = 1 if most_stages(2) < most_stages(1) else 2
    return most_stages(turns), turns
