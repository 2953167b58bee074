"""Ways to run the experts of `moe`: which there are, and what memory a block of each has."""

from dataclasses import dataclass, replace

from inkrt.plugins.moe.packing import VECTOR_BYTES, num_vectors
from inkrt.plugins.moe.projecting import VECTOR_BYTES as PROJECTION_BYTES
from inkrt.plugins.moe.projecting import Projecting
from inkrt.plugins.moe.sizes import (
    MOST_HIDDEN_BYTES,
    MOST_ROUTER_ROWS,
    PART_VECTORS,
    STAGE_VECTORS,
    WARPS,
    MoeDims,
    experts_bytes,
    hidden_bytes,
    most_block_tiles,
    own_router_rows,
    router_bytes,
)
from inkrt.plugins.w4a16.shapes import MAX_SMEM, MAX_TOKENS, MULTIPROCESSORS

MOST_STAGES = 8
# Bytes of a block that are to be on their way: about twice what the latency of the memory asks for.
LEAST_IN_FLIGHT = 60_000
# Of a multiprocessor; a block takes 1024 bytes more than it asks for.
SM_BYTES = 228 * 1024
# Registers of a thread.
# Of several tokens 384 x 80, beside two blocks of `allreduce_conv_mix`.
ROUTER_REGISTERS_OF_SEVERAL = 80
# Beside each other: 192 x 40 + 768 x 72 of 65536 registers; or, where there is no
# router, 768 x 64 + 128 x 120 of an `allreduce_conv_mix`, which takes some KB.
ROUTER_REGISTERS, REGISTERS_BESIDE, REGISTERS = 40, 72, 80
REGISTERS_BESIDE_MIX, MIX_BYTES = 64, 16 * 1024
# Of several tokens: 192 x 80 + 768 x 64.
MOST_TOKENS_BESIDE, REGISTERS_OF_SEVERAL_BESIDE = 4, 64
# Of a mix by slices; and of what sends to all ranks.
MIX_BESIDE_BYTES, _SENDING_BYTES = 2048, 256


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run the experts; bits are the same.

    Attributes:
        is_beside: a block leaves room for the router's, or, if it is its own, for one of what comes
            before and next; else it has more weights on their way. Of up to four tokens; of several
            by words, and with a router of its own.
        by_words: blocks wait for each other's activations themselves, not at a counter. Only where
            activations stand in shared memory.
        by_bulk: all weights come by bulk copies, not the first stages only.
        share_rows: row tiles that do not go round all blocks are shared by all. Of several tokens
            by words, where one warp has an expert's whole K.
        own_scores: the launch of the experts is its own router, so there is one launch. Of up to
            eight tokens by words.
        early: a warp waits for the activations of the expert that it multiplies next, not for all.
            Of up to eight tokens by words.
    """

    is_beside: bool
    by_words: bool
    by_bulk: bool
    share_rows: bool = False
    own_scores: bool = False
    early: bool = False

    def is_narrow(self, num_tokens: int) -> bool:
        """Whether route and sums have room for no more than `num_tokens` tokens."""
        return self.early or (self.is_beside and num_tokens > 1)

    @property
    def name(self) -> str:
        """Of the tactic."""
        parts = {
            "one": self.own_scores, "beside": self.is_beside, "words": self.by_words,
            "bulk": self.by_bulk, "rows": self.share_rows, "early": self.early,
        }  # fmt: skip
        return "_".join(["moe", *(part for part, is_so in parts.items() if is_so)])


def variants(dims: MoeDims, num_tokens: int) -> list[Variant]:
    """What `moe` takes for these sizes, first the way with which whole steps took least time."""
    is_shared = hidden_bytes(dims, min(num_tokens, MAX_TOKENS)) <= MOST_HIDDEN_BYTES
    blocks, row_tiles = num_blocks(dims), dims.hidden // 16
    can_share = (
        is_shared
        and num_tokens > 1
        and num_vectors(dims.width) <= PART_VECTORS
        and row_tiles > blocks
        and row_tiles % blocks > 0
    )
    can_score = (
        is_shared
        and num_tokens <= MAX_TOKENS
        and dims.experts % 4 == 0
        and own_router_rows(dims) * blocks >= dims.experts
    )
    shared = [
        Variant(is_beside=False, by_words=True, by_bulk=by_bulk, share_rows=True)
        for by_bulk in (False, True)
        if can_share
    ]
    found = [
        *shared,
        *(
            Variant(is_beside=is_beside, by_words=by_words, by_bulk=by_bulk)
            for by_words in ((False, True) if is_shared else (False,))
            for is_beside in ((True, False) if num_tokens == 1 else (False,))
            for by_bulk in (False, True)
        ),
        *(
            Variant(
                is_beside=is_beside,
                by_words=True,
                by_bulk=True,
                share_rows=share_rows,
                own_scores=True,
            )
            for is_beside in ((True, False) if num_tokens == 1 else (False,))
            for share_rows in ((False, True) if can_share else (False,))
            if can_score
        ),
    ]
    # What is not measured comes last: of one token beside others, of several with shared rows.
    early = [
        replace(variant, early=True)
        for variant in found
        if variant.by_words
        and num_tokens <= MAX_TOKENS
        and variant.is_beside == (num_tokens == 1)
        and variant.share_rows == (can_share and num_tokens > 1)
    ]
    # Nor are these. With bulk copies, early ones would spill.
    beside = [
        Variant(is_beside=True, by_words=True, by_bulk=False, share_rows=can_share, early=is_early)
        for is_early in (False, True)
        if is_shared and 1 < num_tokens <= MOST_TOKENS_BESIDE
    ]
    stage = WARPS * STAGE_VECTORS[dims.kind] * VECTOR_BYTES[dims.kind]
    new = [
        variant
        for variant in (*early, *beside)
        if stages_and_turns(dims, num_tokens, variant)[0] * stage > LEAST_IN_FLIGHT
    ]
    return [*found, *new]


def num_blocks(dims: MoeDims) -> int:
    """Blocks of experts.cu."""
    return min(MULTIPROCESSORS, max(dims.hidden // 16, dims.width // 8))


def rows_of_router(dims: MoeDims) -> int:
    """Experts of a block of router.cu."""
    return min(-(-dims.experts // MULTIPROCESSORS), MOST_ROUTER_ROWS)


def shared_bytes(
    dims: MoeDims, num_tokens: int, variant: Variant, stages: int, turns: int,
    projects: Projecting | None = None, slots: int = 0,
) -> int:  # fmt: skip
    """Shared memory of a block of experts.cu; `slots` of a warp are for what it projects."""
    ring, inputs, barriers = 0, 0, 0
    if projects is not None:
        ring, inputs = slots * PROJECTION_BYTES, projects.input_bytes
        barriers = projects.barrier_bytes(slots)
    own = experts_bytes(
        dims, min(num_tokens, MAX_TOKENS), stages, num_blocks(dims), turns,
        own_scores=variant.own_scores, early=variant.early, narrow=variant.is_narrow(num_tokens),
        ring=ring, inputs=inputs,
    )  # fmt: skip
    return own + barriers


def room_for(dims: MoeDims, num_tokens: int, variant: Variant, projects: Projecting | None) -> int:
    """Shared memory that a block of experts.cu may have."""
    room = MAX_SMEM
    if variant.is_beside:
        router = router_bytes(dims, rows_of_router(dims), num_tokens, beside=True)
        room = SM_BYTES - 2048 - (MIX_BYTES if variant.own_scores else router)
    if projects is not None:
        room = min(room, SM_BYTES - 2048 - MIX_BESIDE_BYTES) - _SENDING_BYTES
    return room


def stages_and_turns(
    dims: MoeDims, num_tokens: int, variant: Variant, projects: Projecting | None = None
) -> tuple[int, int]:
    """Stages of a warp, 0 if none fit, and tiles that are shared between two barriers."""
    room = room_for(dims, num_tokens, variant, projects)

    def most_stages(turns: int) -> int:
        fitting = (
            n
            for n in range(2, MOST_STAGES + 1)
            if shared_bytes(
                dims, num_tokens, variant, n, turns, projects, least_slots(dims, projects, n)
            )
            <= room
        )
        return max(fitting, default=0)

    # As many tiles as cost no stage, of one token all that it can.
    if num_tokens == 1:
        turns = min(8, most_block_tiles(dims, 1, num_blocks(dims)))
    else:
        turns = 1 if most_stages(2) < most_stages(1) else 2
    return most_stages(turns), turns


def least_slots(dims: MoeDims, projects: Projecting | None, stages: int) -> int:
    """Vectors of projections that stand where a warp's stages were; at least one."""
    if projects is None:
        return 0
    return max(1, stages * STAGE_VECTORS[dims.kind] * VECTOR_BYTES[dims.kind] // PROJECTION_BYTES)


def most_slots(
    dims: MoeDims, variant: Variant, stages: int, turns: int, projects: Projecting | None
) -> int:
    """The same with what memory is left."""
    slots = least_slots(dims, projects, stages)
    if projects is None:
        return slots
    num_tokens = projects.num_tokens
    room = room_for(dims, num_tokens, variant, projects)
    while slots < projects.most_vectors:
        if shared_bytes(dims, num_tokens, variant, stages, turns, projects, slots + 1) > room:
            break
        slots += 1
    return slots
