"""How `moe` runs on a GPU: router.cu, then experts.cu for every eight tokens, or that alone."""

from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import torch

from inkrt.errors import BuildError
from inkrt.plugins.moe.packing import VECTOR_BYTES, VECTOR_K, Format, num_vectors, packing
from inkrt.plugins.moe.sizes import (
    MOST_HIDDEN_BYTES,
    MOST_ROUTER_ROWS,
    PART_VECTORS,
    SLICE_VECTORS,
    STAGE_VECTORS,
    WARPS,
    MoeDims,
    experts_bytes,
    hidden_bytes,
    most_block_tiles,
    own_router_rows,
    router_bytes,
    router_shares,
    router_threads,
)
from inkrt.plugins.tactic import (
    GPU_TARGETS,
    CallArgs,
    InputPointer,
    Int32,
    KernelLaunch,
    Output,
    Param,
    Pointer,
    Scratch,
    Tactic,
    number_arg,
    tensor_arg,
)
from inkrt.plugins.w4a16.shapes import MAX_SMEM, MAX_TOKENS, MULTIPROCESSORS

_FOLDER = Path(__file__).parent
_FORMATS: dict[Format, int] = {"nvfp4": 0, "bf16": 1, "mxfp8": 2}

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


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernels for bf16 activations."""
    x = tensor_arg(args, "x")
    if target not in GPU_TARGETS or x.dtype != torch.bfloat16:
        return []
    num_tokens, hidden = x.shape
    own_experts, double_width, _ = tensor_arg(args, "gate_up").shape
    kind: Format = "nvfp4"
    if args["gate_up_scales"] is None:
        if args["gate_up_global_scale"] is not None:
            return []  # decoded NVFP4, which runs on the CPU only
        kind = "bf16"
    elif args["gate_up_global_scale"] is None:
        kind = "mxfp8"
    dims = MoeDims(
        hidden=hidden,
        width=double_width // 2,
        experts=tensor_arg(args, "router_weight").shape[0],
        own_experts=own_experts,
        top_k=int(number_arg(args, "top_k")),
        kind=kind,
    )
    return [
        moe(
            dims,
            num_tokens,
            route_scale=number_arg(args, "route_scale"),
            gate_cap=number_arg(args, "gate_softcap"),
            up_cap=number_arg(args, "up_softcap"),
            is_partial=bool(args["partial"]),
            has_rank=args["rank"] is not None,
            variant=variant,
        )
        for variant in variants(dims, num_tokens)
    ]


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


def shared_bytes(dims: MoeDims, num_tokens: int, variant: Variant, stages: int, turns: int) -> int:
    """Shared memory of a block of experts.cu."""
    return experts_bytes(
        dims, min(num_tokens, MAX_TOKENS), stages, num_blocks(dims), turns,
        own_scores=variant.own_scores, early=variant.early, narrow=variant.is_narrow(num_tokens),
    )  # fmt: skip


def stages_and_turns(dims: MoeDims, num_tokens: int, variant: Variant) -> tuple[int, int]:
    """Stages of a warp, 0 if none fit, and tiles that are shared between two barriers."""
    room = MAX_SMEM
    if variant.is_beside:
        router = router_bytes(dims, rows_of_router(dims), num_tokens, beside=True)
        room = SM_BYTES - 2048 - (MIX_BYTES if variant.own_scores else router)

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


def moe(
    dims: MoeDims, num_tokens: int, *, route_scale: float, gate_cap: float, up_cap: float,
    is_partial: bool, has_rank: bool, variant: Variant,
) -> Tactic:  # fmt: skip
    """Router and experts; parameters are the arguments of the operator `moe`.

    The first launch is the router's, unless the variant has none.

    Args:
        dims: sizes.
        num_tokens: T; up to 8 run in one launch of the experts, more in one for every 8, of which
            those behind the step's `num_tokens` end at once.
        route_scale: see the operator, as the following.
        gate_cap: gate_softcap.
        up_cap: up_softcap.
        is_partial: the result is this rank's part, float32.
        has_rank: whether the rank holds whole experts.
        variant: one of `variants`.

    Raises:
        BuildError: sizes that the kernels do not take.
    """
    _check(dims)
    is_chunk = num_tokens > MAX_TOKENS
    rows = min(num_tokens, MAX_TOKENS)
    one_token = int(num_tokens == 1)
    scores = Scratch("scores", num_tokens * dims.experts * 4)
    router_rows = rows_of_router(dims)
    router_blocks = -(-dims.experts // router_rows)
    shares, share = router_shares(num_tokens, beside=variant.is_beside)
    router = KernelLaunch(
        source=_FOLDER / "router.cu",
        entry="moe_router",
        defines=(
            ("HIDDEN", dims.hidden), ("EXPERTS", dims.experts), ("ROWS", router_rows),
            ("BLOCKS", router_blocks), ("NUM_THREADS", router_threads(dims.hidden)),
            ("TOKENS", rows), ("SHARES", shares), ("SHARE", share), ("TRIGGER", 0),
            ("REGISTERS", ROUTER_REGISTERS if one_token else ROUTER_REGISTERS_OF_SEVERAL),
        ),
        grid=(router_blocks * -(-num_tokens // MAX_TOKENS), 1, 1),
        block=(shares * router_threads(dims.hidden), 1, 1),
        params=(
            Pointer("x"), Pointer("router_weight"), scores, Scratch("error", 4, fill=0),
            Int32(num_tokens),
        ),
        smem_bytes=router_bytes(dims, router_rows, num_tokens, beside=variant.is_beside),
    )  # fmt: skip
    blocks = num_blocks(dims)
    is_shared = hidden_bytes(dims, rows) <= MOST_HIDDEN_BYTES
    own = variant.own_scores
    stages, turns = stages_and_turns(dims, num_tokens, variant)
    _require(stages > 0, f"hidden={dims.hidden} and width={dims.width} need too much shared memory")
    is_nvfp4 = dims.kind == "nvfp4"
    registers = REGISTERS
    if variant.is_beside:
        registers = REGISTERS_BESIDE_MIX if own else REGISTERS_BESIDE
        if num_tokens > 1:
            registers = REGISTERS_OF_SEVERAL_BESIDE
    meeting: tuple[Scratch, ...] = (
        Scratch("hidden", rows * dims.top_k * dims.width * 2),
        Scratch("arrivals", 8, fill=0),
    )
    if variant.by_words:
        meeting = (
            Scratch("exchange", 2 * rows * dims.top_k * dims.width * 2, fill=0xFF),
            Scratch("turns", 4 * blocks, fill=0),
        )
    if variant.share_rows:
        left = dims.hidden // 16 % blocks
        size = 2 * left * MAX_TOKENS * dims.top_k * 16 * 4
        meeting = (*meeting, Scratch("parts", size, fill=0xFF))
    common: tuple[Param, ...] = (
        Pointer("x"),
        *(
            (Pointer("router_weight"), Scratch("words", 2 * rows * dims.experts * 4, fill=0xFF))
            if own
            else (scores,)
        ),
        Pointer("router_bias"),
        Pointer("rank") if has_rank else Pointer("x"),
        Pointer("gate_up"),
        Pointer("gate_up_global_scale" if is_nvfp4 else "x"),
        Pointer("down"),
        Pointer("down_global_scale" if is_nvfp4 else "x"),
        *meeting,
        Output(0),
        Scratch("error", 4, fill=0),
        *((InputPointer("num_tokens"),) if is_chunk else ()),
        Int32(num_tokens),
    )
    defines: tuple[tuple[str, int | float | str], ...] = (
        ("FORMAT", _FORMATS[dims.kind]), ("HIDDEN", dims.hidden), ("WIDTH", dims.width),
        ("EXPERTS", dims.experts), ("OWN_EXPERTS", dims.own_experts), ("TOP_K", dims.top_k),
        ("ONE_TOKEN", one_token), ("TOKENS", rows), ("WARPS", WARPS), ("BLOCKS", blocks),
        ("STAGES", stages), ("TURNS", turns), ("STAGE_VECTORS", STAGE_VECTORS[dims.kind]),
        ("HIDDEN_SHARED", int(is_shared)), ("HAS_RANK", int(has_rank)),
        ("IS_PARTIAL", int(is_partial)), ("IS_SLICE", int(is_partial and not has_rank)),
        ("IS_CHUNK", int(is_chunk)), ("ROUTE_SCALE", f"{route_scale}f"),
        ("GATE_CAP", f"{gate_cap}f"), ("UP_CAP", f"{up_cap}f"), ("TRIGGER", 1),
        ("REGISTERS", registers), ("BY_WORDS", int(variant.by_words)),
        ("BY_BULK", int(variant.by_bulk)), ("SHARE_ROWS", int(variant.share_rows)),
        ("OWN_SCORES", int(own)), ("EARLY", int(variant.early)),
        ("NARROW", int(variant.is_narrow(num_tokens))),
        ("ROUTER_ROWS", own_router_rows(dims)), ("ROUTER_THREADS", router_threads(dims.hidden)),
    )  # fmt: skip
    experts = [
        KernelLaunch(
            source=_FOLDER / "experts.cu",
            entry="moe_experts",
            defines=defines,
            grid=(blocks, 1, 1),
            block=(WARPS * 32, 1, 1),
            params=(*common, Int32(first)),
            smem_bytes=shared_bytes(dims, num_tokens, variant, stages, turns),
        )
        for first in range(0, num_tokens, MAX_TOKENS)
    ]
    router_size = dims.experts * dims.hidden * 4
    out_bytes = 4 if is_partial else 2
    return Tactic(
        name=variant.name,
        kernels=(*experts,) if own else (router, *experts),
        bytes=ceil(dims.distinct(num_tokens) * dims.expert_bytes)
        + router_size
        + num_tokens * dims.hidden * (2 + out_bytes),
        flops=2 * num_tokens * dims.hidden
        * (dims.experts + 3 * dims.top_k * dims.own_experts * dims.width // dims.experts),
        packings=(
            packing(dims.kind, "gate_up", "gate_up_scales", "gated"),
            packing(dims.kind, "down", "down_scales", "plain"),
        ),
    )  # fmt: skip


def _check(dims: MoeDims) -> None:
    most = WARPS * SLICE_VECTORS * VECTOR_K
    _require(
        dims.hidden % VECTOR_K == 0 and dims.hidden <= most,
        f"hidden size {dims.hidden}, expected a multiple of {VECTOR_K} up to {most}",
    )
    unit = 32 if dims.kind == "mxfp8" else 16
    _require(
        dims.width % unit == 0,
        f"{dims.width} units of an expert on a rank, expected a multiple of {unit}",
    )
    _require(dims.experts <= 512, f"{dims.experts} experts, expected at most 512")
    _require(dims.top_k <= 8, f"top_k={dims.top_k}, expected at most 8")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise BuildError(f"moe: {message}; build for another tp size or for the target cpu")
