"""Tactics for steps of more than MAX_TOKENS tokens: the tiled kernels, see tile.cuh.

They read the weights that the kernels for 1 to 8 tokens read, in the same layouts, and round where
those round, but add in another order: rows are near to theirs, not equal. Every kernel reads how
many rows of the step are real and leaves the others undefined.

`tactics` and `parts` call these functions with the names of their own; nothing else should.
"""

from dataclasses import dataclass, replace

from inkrt.plugins.tactic import (
    Float32,
    InputPointer,
    KernelLaunch,
    Output,
    Param,
    Scratch,
    Tactic,
)
from inkrt.plugins.w4a16.launches import (
    Defines,
    Names,
    inverse_frequencies,
    launch,
    packings_of,
    params_of,
    tactic_of,
    variant,
)
from inkrt.plugins.w4a16.shapes import (
    HEAD,
    MAX_NORM_WIDTH,
    MULTIPROCESSORS,
    PAGE,
    Dims,
    check_moe,
    check_width,
    require,
    tiled_bytes,
)

_THREADS = 128
_VALID = InputPointer("num_tokens")


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block makes; the macros of tile.cuh.

    Attributes:
        warp_tiles: row tiles of each of the four warps.
        token_tiles: of eight tokens.
        stages: steps of K in shared memory.
    """

    warp_tiles: int
    token_tiles: int
    stages: int

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 64 * self.warp_tiles

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return 8 * self.token_tiles

    @property
    def defines(self) -> Defines:
        """Its macros."""
        return [
            ("WARP_TILES", self.warp_tiles), ("TOKEN_TILES", self.token_tiles),
            ("STAGES", self.stages),
        ]  # fmt: skip


# Two blocks of a product fit a multiprocessor, and three of experts in NVFP4.
_WIDE, _NARROW, _NARROW_BF16 = Tile(2, 8, 2), Tile(2, 4, 3), Tile(2, 4, 2)
_EXPERTS, _ROUTER = Tile(2, 4, 2), Tile(1, 4, 4)


def linear(
    dims: Dims, num_tokens: int, *, rows: int, width: int, names: Names | None = None
) -> Tactic:
    """As `tactics.linear`."""
    return tactic_of(
        "w4a16_tile_linear",
        dims,
        (_product(dims, num_tokens, rows=rows, width=width, gated=False, names=names),),
        rows_by_k=rows * width,
        num_tokens=num_tokens,
        other_bytes=2 * num_tokens * (rows + width),
        packings=packings_of(dims, names, ("codes", "scales", "plain")),
    )


def qkv(
    dims: Dims,
    num_tokens: int,
    *,
    eps: float,
    rope_theta: float | None,
    ring_rows: int,
    has_delta: bool,
    names: Names | None,
) -> Tactic:
    """As `tactics.qkv`; the caller has checked its sizes.

    Raises:
        BuildError: a ring is shorter than the step.
    """
    heads = dims.heads + 2 * dims.kv_heads
    require(ring_rows % PAGE == 0, "qkv", f"ring_rows={ring_rows}, expected a multiple of {PAGE}")
    require(
        ring_rows == 0 or ring_rows >= num_tokens,
        "qkv",
        f"ring_rows={ring_rows}, expected at least T={num_tokens}",
    )
    z = Scratch("z", 2 * num_tokens * dims.hidden)
    angles = Scratch("angles", 8 * num_tokens * (HEAD // 2) if rope_theta else 16)
    tile = _tile_for(dims, heads * HEAD, num_tokens)
    blocks = -(-num_tokens // tile.tokens)
    kernel = launch(
        "tile_qkv",
        [
            ("HIDDEN", dims.hidden), ("HEADS", dims.heads), ("KV_HEADS", dims.kv_heads),
            ("RING", ring_rows), ("ROPE", int(rope_theta is not None)), ("TOKEN_BLOCKS", blocks),
            *tile.defines, *variant(dims, num_tokens),
        ],
        blocks=heads * blocks,
        threads=_THREADS,
        smem=_smem(dims, tile, HEAD),
        params=params_of(
            "z codes global_scale q_norm k_norm angles k_cache v_cache where position num_tokens q "
            "eps",
            names,
            {"z": z, "angles": angles, "q": Output(0), "eps": Float32(eps)},
        ),
    )  # fmt: skip
    own: dict[str, Param] = {"z": z, "angles": angles, "residual": Output(1)}
    first = _norm(
        dims, num_tokens, eps=eps, rope_theta=rope_theta, has_delta=has_delta,
        names={**own, **(names or {})},
    )  # fmt: skip
    return tactic_of(
        "w4a16_tile_qkv",
        dims,
        (first, kernel),
        rows_by_k=heads * HEAD * dims.hidden,
        num_tokens=num_tokens,
        other_bytes=num_tokens * (6 * dims.hidden + 2 * heads * HEAD),
        packings=packings_of(dims, names, ("codes", "scales", "heads")),
    )


def dense_mlp(dims: Dims, num_tokens: int, *, eps: float, has_delta: bool, names: Names) -> Tactic:
    """As `tactics.dense_mlp`, with all names given."""
    z = Scratch("z", 2 * num_tokens * dims.hidden)
    middle = Scratch("middle", 2 * num_tokens * dims.dense_width)
    kernels = (
        _norm(
            dims, num_tokens, eps=eps, has_delta=has_delta,
            names={"residual": Output(1), **names, "z": z},
        ),
        _product(
            dims, num_tokens, rows=2 * dims.dense_width, width=dims.hidden, gated=True,
            names={**names, "x": z, "y": middle},
        ),
        _product(
            dims, num_tokens, rows=dims.hidden, width=dims.dense_width, gated=False,
            names={
                "x": middle,
                "codes": names["down_codes"],
                "global_scale": names["down_scale"],
                "y": names.get("out", Output(0)),
            },
        ),
    )  # fmt: skip
    return tactic_of(
        "w4a16_tile_dense_mlp",
        dims,
        kernels,
        rows_by_k=3 * dims.hidden * dims.dense_width,
        num_tokens=num_tokens,
        other_bytes=8 * num_tokens * dims.hidden,
        packings=packings_of(
            dims, names, ("codes", "scales", "gated"), ("down_codes", "down_scales", "plain")
        ),
    )


def router(dims: Dims, num_tokens: int, *, eps: float, has_delta: bool, names: Names) -> Tactic:
    """As `parts.router`; width and top_k do not matter."""
    check_moe(replace(dims, width=256, top_k=1))
    blocks = -(-num_tokens // _ROUTER.tokens)
    logits = launch(
        "tile_linear",
        [
            ("DIM_N", dims.experts), ("DIM_K", dims.hidden), ("GATED", 0), ("ROW_MAJOR", 1),
            ("TOKEN_BLOCKS", blocks), *_ROUTER.defines,
            *(item for item in variant(dims, num_tokens) if item[0] != "WEIGHTS"), ("WEIGHTS", 1),
        ],
        blocks=blocks * -(-dims.experts // _ROUTER.rows),
        threads=_THREADS,
        smem=_smem(dims, _ROUTER, _ROUTER.rows, row_major=True),
        params=params_of(
            "z router_weight router_weight logits num_tokens", names, {"num_tokens": _VALID}
        ),
    )  # fmt: skip
    shared = _product(
        dims, num_tokens, rows=2 * dims.shared_width, width=dims.hidden, gated=True,
        names={
            "x": names["z"],
            "codes": names["shared_gate_up_codes"],
            "global_scale": names["shared_gate_up_scale"],
            "y": names["shared_hidden"],
        },
    )  # fmt: skip
    size = (dims.experts + 2 * dims.shared_width) * dims.hidden
    return Tactic(
        "w4a16_tile_router",
        (_norm(dims, num_tokens, eps=eps, has_delta=has_delta, names=names), logits, shared),
        2 * dims.experts * dims.hidden
        + 2 * dims.shared_width * dims.hidden * dims.chunk_bytes // 4096
        + num_tokens * (8 * dims.hidden + 2 * dims.experts + 2 * dims.shared_width),
        2 * num_tokens * size,
        packings_of(dims, names, ("shared_gate_up_codes", "shared_gate_up_scales", "gated")),
    )


def experts(dims: Dims, num_tokens: int, *, names: Names) -> Tactic:
    """As `parts.experts`."""
    check_moe(dims)
    pairs = num_tokens * dims.top_k
    # An expert has top_k / experts of all tokens on average.
    tile = _WIDE if pairs >= dims.experts * _EXPERTS.tokens else _EXPERTS
    # Parts of the lists of the experts: each list ends with one that may be short.
    items = min(pairs, (pairs + dims.experts * (tile.tokens - 1)) // tile.tokens)
    own: dict[str, Param] = {
        "num_tokens": _VALID,
        "chosen": Scratch("chosen", 4 * pairs),
        "items": Scratch("items", 16 * items),
        "lists": Scratch("lists", 4 * dims.experts * num_tokens),
        "pair_weights": Scratch("pair_weights", 4 * pairs),
        "hidden": Scratch("hidden", 2 * pairs * dims.width),
        "y": Scratch("y", 2 * pairs * dims.hidden),
        "out": Output(0),
    }
    sizes: Defines = [
        ("EXPERTS", dims.experts), ("TOP_K", dims.top_k), ("CHUNK", num_tokens),
        *variant(dims, num_tokens),
    ]  # fmt: skip
    choose = launch(
        "tile_choose",
        sizes,
        blocks=-(-num_tokens // 4),
        threads=_THREADS,
        smem=0,
        params=params_of("logits num_tokens chosen pair_weights", names, own),
    )
    route = launch(
        "tile_route",
        [*sizes, ("ITEMS", items), ("ITEM_PAIRS", tile.tokens)],
        blocks=1,
        threads=1024,
        smem=4 * dims.experts + 4,
        params=params_of("chosen num_tokens items lists", names, own),
    )

    def grouped(rows: int, width: int, gated: int, params: str) -> KernelLaunch:
        return launch(
            "tile_experts",
            [*sizes, ("DIM_N", rows), ("DIM_K", width), ("GATED", gated), *tile.defines],
            blocks=items * -(-rows // tile.rows),
            threads=_THREADS,
            smem=_smem(dims, tile, tile.rows // (2 if gated else 1), lists=2),
            params=params_of(params, names, own),
        )

    combine_tile = _tile_for(dims, dims.hidden, num_tokens)
    blocks = -(-num_tokens // combine_tile.tokens)
    combine = launch(
        "tile_combine",
        [
            *sizes, ("DIM_N", dims.hidden), ("DIM_K", dims.shared_width),
            ("TOKEN_BLOCKS", blocks), *combine_tile.defines,
        ],
        blocks=blocks * -(-dims.hidden // combine_tile.rows),
        threads=_THREADS,
        smem=_smem(dims, combine_tile, combine_tile.rows),
        params=params_of(
            "shared_hidden shared_down_codes shared_down_scale y pair_weights out num_tokens",
            names,
            own,
        ),
    )  # fmt: skip
    distinct = dims.experts * (1 - (1 - dims.top_k / dims.experts) ** num_tokens)
    expert, shared = 3 * dims.hidden * dims.width, dims.hidden * dims.shared_width
    return Tactic(
        "w4a16_tile_experts",
        (
            choose,
            route,
            grouped(
                2 * dims.width, dims.hidden, 1, "z gate_up_codes gate_up_scale items lists hidden"
            ),
            grouped(dims.hidden, dims.width, 0, "hidden down_codes down_scale items lists y"),
            combine,
        ),
        round((distinct * expert + shared) * dims.chunk_bytes / 4096)
        + 8 * num_tokens * dims.hidden,
        2 * num_tokens * (dims.top_k * expert + shared),
        packings_of(
            dims,
            names,
            ("gate_up_codes", "gate_up_scales", "gated"),
            ("down_codes", "down_scales", "plain"),
            ("shared_down_codes", "shared_down_scales", "plain"),
        ),
    )


def _tile_for(dims: Dims, rows: int, num_tokens: int) -> Tile:
    """The larger tile where it leaves no multiprocessor without a block."""
    blocks = -(-rows // _WIDE.rows) * -(-num_tokens // _WIDE.tokens)
    if blocks >= MULTIPROCESSORS:
        return _WIDE
    return _NARROW_BF16 if dims.bf16 else _NARROW


def _product(
    dims: Dims, num_tokens: int, *, rows: int, width: int, gated: bool, names: Names | None
) -> KernelLaunch:
    check_width("tile_linear", "width", width, 8192)
    out_rows = rows // 2 if gated else rows
    require(out_rows % 8 == 0, "tile_linear", f"{out_rows} results a token, expected x8")
    tile = _tile_for(dims, rows, num_tokens)
    blocks = -(-num_tokens // tile.tokens)
    return launch(
        "tile_linear",
        [
            ("DIM_N", rows), ("DIM_K", width), ("GATED", int(gated)), ("TOKEN_BLOCKS", blocks),
            *tile.defines, *variant(dims, num_tokens),
        ],
        blocks=blocks * -(-rows // tile.rows),
        threads=_THREADS,
        smem=_smem(dims, tile, tile.rows // (2 if gated else 1)),
        params=params_of(
            "x codes global_scale y num_tokens", names, {"y": Output(0), "num_tokens": _VALID}
        ),
    )  # fmt: skip


def _norm(
    dims: Dims,
    num_tokens: int,
    *,
    eps: float,
    names: Names,
    has_delta: bool,
    rope_theta: float | None = None,
) -> KernelLaunch:
    check_width("tile_norm", "hidden", dims.hidden, MAX_NORM_WIDTH)
    defines: list[tuple[str, int | float | str]] = [
        ("HIDDEN", dims.hidden), ("HAS_DELTA", int(has_delta)),
        ("ROPE", int(rope_theta is not None)), *variant(dims, num_tokens),
    ]  # fmt: skip
    own: dict[str, Param] = {"num_tokens": _VALID, "eps": Float32(eps)}
    if rope_theta is None:  # neither is read
        own |= {"angles": names["z"], "position": _VALID}
        names = {name: value for name, value in names.items() if name not in own}
    else:
        defines.append(("INV_FREQ", inverse_frequencies(rope_theta)))
    return launch(
        "tile_norm",
        defines,
        blocks=num_tokens,
        threads=256,
        smem=32,
        params=params_of(
            "x delta norm_weight residual z angles position num_tokens eps", names, own
        ),
    )


def _smem(dims: Dims, tile: Tile, out_rows: int, *, row_major: bool = False, lists: int = 1) -> int:
    return tiled_bytes(
        dims, tile.warp_tiles, tile.token_tiles, tile.stages, out_rows, row_major=row_major,
        lists=lists,
    )  # fmt: skip
