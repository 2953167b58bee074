"""How `moe` runs on a GPU: router.cu, then experts.cu for every eight tokens, or that alone."""

from math import ceil
from pathlib import Path

import torch

from inkrt.errors import BuildError
from inkrt.plugins.moe.packing import VECTOR_K, Format, packing
from inkrt.plugins.moe.sizes import (
    MOST_HIDDEN_BYTES,
    SLICE_VECTORS,
    STAGE_VECTORS,
    WARPS,
    MoeDims,
    hidden_bytes,
    num_parts,
    router_bytes,
    router_shares,
    router_threads,
)
from inkrt.plugins.moe.variants import (
    REGISTERS,
    REGISTERS_BESIDE,
    REGISTERS_NARROW,
    ROUTER_REGISTERS,
    ROUTER_REGISTERS_OF_SEVERAL,
    Variant,
    num_blocks,
    rows_of_router,
    shared_bytes,
    stages_and_turns,
    variants,
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
from inkrt.plugins.w4a16.shapes import MAX_TOKENS

_FOLDER = Path(__file__).parent
_FORMATS: dict[Format, int] = {"nvfp4": 0, "bf16": 1, "mxfp8": 2}


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


def moe(
    dims: MoeDims, num_tokens: int, *, route_scale: float, gate_cap: float, up_cap: float,
    is_partial: bool, has_rank: bool, variant: Variant,
) -> Tactic:  # fmt: skip
    """Router and experts; parameters are the arguments of the operator `moe`.

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
    shares, share = router_shares(num_tokens, narrow=variant.is_narrow)
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
        smem_bytes=router_bytes(dims, router_rows, num_tokens, narrow=variant.is_narrow),
    )  # fmt: skip
    blocks = num_blocks(dims)
    is_shared = hidden_bytes(dims, rows) <= MOST_HIDDEN_BYTES
    stages, turns = stages_and_turns(dims, num_tokens, variant)
    _require(stages > 0, f"hidden={dims.hidden} and width={dims.width} need too much shared memory")
    is_nvfp4 = dims.kind == "nvfp4"
    registers = REGISTERS_BESIDE if variant.is_beside else REGISTERS
    if variant.is_narrow:
        registers = REGISTERS_NARROW
    meeting: tuple[Scratch, ...] = (
        Scratch("hidden", rows * dims.top_k * dims.width * 2),
        Scratch("arrivals", 8, fill=0),
    )
    if variant.by_words:
        size = 2 * rows * dims.top_k * dims.width * 2
        meeting = (Scratch("exchange", size, fill=0xFF),)
    if variant.by_words or variant.share_rows:
        meeting = (*meeting, Scratch("turns", 4 * blocks, fill=0))
    if variant.share_rows:
        left = dims.hidden // 16 % blocks
        size = 2 * left * MAX_TOKENS * dims.top_k * num_parts(dims) * 16 * 4
        meeting = (*meeting, Scratch("parts", size, fill=0xFF))
    common: tuple[Param, ...] = (
        Pointer("x"),
        scores,
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
        ("SHARE_ROWS", int(variant.share_rows)), ("NARROW", int(variant.is_narrow)),
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
        kernels=(router, *experts),
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
