"""Tactics of the w4a16 kernels: kernels, grids, shared memory and packings for given sizes and T.

Operators that these kernels back call these functions with their own parameter names in `names` (by
the names used here) and take the result as it is. Two rules bind a plan:

* `residual` outputs must not share memory with `x` or `delta`: every block still reads those.
* position, slot and page table must not change during a step: `qkv` reads them before its wait.
* one step at a time on a GPU: blocks of `qkv` wait for each other, so all must find a place.

Steps of more than 8 tokens take the kernels of `tile_tactics`, from the same names.

The classes: blocks of qkv, linear and (one token) gate_up take more than half of an SM's shared
memory and few registers, those of the router more than half of the registers. So two blocks of one
kernel never share an SM while another SM idles, and a block of the next kernel still fits beside
each. With bf16 weights, one token, blocks of qkv and gate_up take more than half of the registers,
and one of down, or of the router beside linear, has just room beside them (docs/kernels.md).
"""

from inkrt.plugins.tactic import Float32, Int32, Output, Pointer, Scratch, Tactic
from inkrt.plugins.w4a16 import tile_tactics
from inkrt.plugins.w4a16.launches import (
    Defines,
    Names,
    candidates,
    inverse_frequencies,
    launch,
    packings_of,
    params_of,
    tactic_of,
    variant,
)
from inkrt.plugins.w4a16.moe_tactics import moe
from inkrt.plugins.w4a16.sample_tactics import argmax, sample
from inkrt.plugins.w4a16.shapes import (
    HEAD,
    LARGE_BLOCK,
    MAX_NORM_WIDTH,
    MAX_TOKENS,
    MULTIPROCESSORS,
    PAGE,
    Dims,
    check_smem,
    check_tokens,
    check_width,
    linear_bytes,
    qkv_bytes,
    qkv_tiles,
    require,
    stream_bytes,
)

__all__ = ["Names", "dense_gate_up", "dense_mlp", "embed", "linear", "lm_head", "moe", "qkv"]

_HEAD_BLOCKS = 2 * MULTIPROCESSORS
_QKV_TILES = (3, 2, 4)  # row tiles of a block, best guess first


def qkv_blocks(dims: Dims, num_tokens: int) -> list[int]:
    """Numbers of blocks of `qkv`, best guess first. Bits do not depend on the choice."""
    heads = dims.heads + 2 * dims.kv_heads
    least, most = _least_and_most_qkv_blocks(heads, num_tokens)
    first, *others = (_qkv_blocks(heads, tiles) for tiles in _QKV_TILES)
    return list(dict.fromkeys([first, *(blocks for blocks in others if least <= blocks <= most)]))


def _qkv_blocks(heads: int, tiles: int) -> int:
    return min(MULTIPROCESSORS, -(-heads * HEAD // (16 * tiles)))


def _least_and_most_qkv_blocks(heads: int, num_tokens: int) -> tuple[int, int]:
    # A block has threads for eight tiles, which are one head.
    return max(num_tokens, heads), min(MULTIPROCESSORS, heads * HEAD // 16)


def qkv_plan(dims: Dims, num_tokens: int, blocks: int) -> tuple[Defines, int]:
    """Where the weights of a block of `qkv` go, as macros of qkv.cu, and its shared memory.

    NVFP4 stages all. Of one token in bf16 a tile is staged and one lives in registers, so that a
    block has room beside one of `down` (docs/kernels.md) and they arrive meanwhile; the others are
    loaded after the norm, as are all of more tokens.

    Raises:
        BuildError: a block of NVFP4 has too many tiles.
    """
    tiles = qkv_tiles(dims, blocks)
    if not dims.bf16:
        staged, early, registers = tiles, 0, 56
    elif num_tokens == 1:
        # Few registers, but more than half of them: one block on each SM.
        staged, early, registers = min(1, tiles - 1), 1, 72 if tiles <= 4 else 128
    else:
        staged, early, registers = 0, 0, 128
    size = check_smem("qkv", qkv_bytes(dims, blocks, num_tokens, staged))
    if not early:
        size = max(size, LARGE_BLOCK)
    return [("STAGED", staged), ("EARLY", early), ("REGISTERS", registers)], size


def qkv(
    dims: Dims,
    num_tokens: int,
    *,
    eps: float,
    rope_theta: float | None,
    ring_rows: int,
    has_delta: bool = True,
    blocks: int | None = None,
    names: Names | None = None,
) -> Tactic:
    """Residual add, norm, q/k/v projection, head norms, rotary positions, cache write.

    Args:
        dims: heads of 128 values.
        num_tokens: T.
        eps: of all norms.
        rope_theta: base of the rotary frequencies; None for a layer without positions.
        ring_rows: rows of a slot of a ring cache, a multiple of 64; 0 for a paged cache.
        has_delta: whether `delta` is added; else it may be any pointer.
        blocks: of the launch, at most 132, because they wait for each other; None for three row
            tiles a block, if that is not more.
        names: parameters x, delta bf16 [T, H]; norm_weight bf16 [H]; codes, scales: the rows of q,
            k and v, in the checkpoint's order; global_scale float32 [1]; q_norm, k_norm bf16 [128];
            k_cache, v_cache as `qkv.cu` says; where: slot int32 [1] of a ring, else the page table;
            position, num_tokens int32 [1]; q (bf16 [T, heads * 128]) and residual (bf16 [T, H]) are
            outputs 0 and 1 by default.

    Raises:
        BuildError: sizes that the kernel does not take.
    """
    check_width("qkv", "hidden", dims.hidden, MAX_NORM_WIDTH)
    if num_tokens > MAX_TOKENS:
        return tile_tactics.qkv(
            dims, num_tokens, eps=eps, rope_theta=rope_theta, ring_rows=ring_rows,
            has_delta=has_delta, names=names,
        )  # fmt: skip
    check_tokens("qkv", num_tokens)
    require(ring_rows % PAGE == 0, "qkv", f"ring_rows={ring_rows}, expected a multiple of {PAGE}")
    heads = dims.heads + 2 * dims.kv_heads
    if blocks is None:
        blocks = _qkv_blocks(heads, _QKV_TILES[0])
    least, most = _least_and_most_qkv_blocks(heads, num_tokens)
    require(
        least <= blocks <= most,
        "qkv",
        f"{blocks} blocks for {heads} heads and T={num_tokens}, expected {least} to {most}",
    )
    weights, smem = qkv_plan(dims, num_tokens, blocks)
    defines: list[tuple[str, int | float | str]] = [
        ("HIDDEN", dims.hidden), ("HEADS", dims.heads), ("KV_HEADS", dims.kv_heads),
        ("BLOCKS", blocks), ("RING", ring_rows), ("HAS_DELTA", int(has_delta)),
        ("ROPE", int(rope_theta is not None)), *variant(dims, num_tokens), *weights,
    ]  # fmt: skip
    if rope_theta is not None:
        defines.append(("INV_FREQ", inverse_frequencies(rope_theta)))
    kernel = launch(
        "qkv",
        defines,
        blocks=blocks,
        threads=512,
        smem=smem,
        params=params_of(
            "x delta norm_weight codes global_scale q_norm k_norm k_cache v_cache where position "
            "num_tokens q residual exchange error T eps",
            names,
            {
                "q": Output(0),
                "residual": Output(1),
                # Launch number and sum of squares of each head, token and tile.
                "exchange": Scratch("exchange", heads * MAX_TOKENS * 64, fill=0),
                "T": Int32(num_tokens),
                "eps": Float32(eps),
            },
        ),
    )
    return tactic_of(
        f"w4a16_qkv_{blocks}",
        dims,
        (kernel,),
        rows_by_k=heads * HEAD * dims.hidden,
        num_tokens=num_tokens,
        other_bytes=num_tokens * (6 * dims.hidden + 2 * heads * HEAD),
        packings=packings_of(dims, names, ("codes", "scales", "heads")),
    )


def linear(
    dims: Dims, num_tokens: int, *, rows: int, width: int, names: Names | None = None
) -> Tactic:
    """Product y[T, rows] = bf16(x[T, width] W^T * global_scale).

    Names: x, codes, scales, global_scale; y is output 0 by default.
    """
    if num_tokens > MAX_TOKENS:
        return tile_tactics.linear(dims, num_tokens, rows=rows, width=width, names=names)
    check_tokens("linear", num_tokens)
    check_width("linear", "width", width, 8192)
    kernel = launch(
        "linear",
        [("DIM_N", rows), ("DIM_K", width), *variant(dims, num_tokens)],
        blocks=-(-rows // 16),
        threads=512,
        smem=max(check_smem("linear", linear_bytes(dims, width, num_tokens)), LARGE_BLOCK),
        params=params_of(
            "x codes global_scale y error T", names, {"y": Output(0), "T": Int32(num_tokens)}
        ),
    )
    return tactic_of(
        "w4a16_linear",
        dims,
        (kernel,),
        rows_by_k=rows * width,
        num_tokens=num_tokens,
        other_bytes=2 * num_tokens * (rows + width),
        packings=packings_of(dims, names, ("codes", "scales", "plain")),
    )


def dense_gate_up(
    dims: Dims, num_tokens: int, *, eps: float, has_delta: bool = True, names: Names | None = None
) -> Tactic:
    """Residual add, norm, dense gate/up and activation.

    Names: x, delta, norm_weight, codes, scales (gate rows, then up rows), global_scale; out (bf16
    [T, dense_width]) and residual are outputs 0 and 1 by default.
    """
    require(dims.dense_width % 8 == 0, "dense", f"dense_width={dims.dense_width}, expected x8")
    return _stream(
        "w4a16_dense_gate_up", dims, num_tokens, rows=2 * dims.dense_width, eps=eps, gated=True,
        logits=False, greedy=False, norm=True, has_delta=has_delta, names=names,
    )  # fmt: skip


def dense_mlp(
    dims: Dims, num_tokens: int, *, eps: float, has_delta: bool = True, names: Names | None = None
) -> Tactic:
    """A dense layer's MLP in two kernels.

    Names: as `dense_gate_up`, with gate_up_codes, gate_up_scales, gate_up_scale, and down_codes,
    down_scales, down_scale; out (bf16 [T, H]) and residual are outputs 0 and 1 by default.
    """
    given: Names = {
        "codes": Pointer("gate_up_codes"),
        "scales": Pointer("gate_up_scales"),
        "global_scale": Pointer("gate_up_scale"),
        "down_codes": Pointer("down_codes"),
        "down_scales": Pointer("down_scales"),
        "down_scale": Pointer("down_scale"),
        **(names or {}),
    }
    if num_tokens > MAX_TOKENS:
        return tile_tactics.dense_mlp(dims, num_tokens, eps=eps, has_delta=has_delta, names=given)
    middle = Scratch("middle", num_tokens * dims.dense_width * 2)
    first = dense_gate_up(
        dims, num_tokens, eps=eps, has_delta=has_delta, names={**given, "out": middle}
    )
    second = linear(
        dims,
        num_tokens,
        rows=dims.hidden,
        width=dims.dense_width,
        names={
            "x": middle,
            "codes": given["down_codes"],
            "scales": given["down_scales"],
            "global_scale": given["down_scale"],
            "y": given.get("out", Output(0)),
        },
    )
    return Tactic(
        "w4a16_dense_mlp",
        first.kernels + second.kernels,
        first.bytes + second.bytes,
        first.flops + second.flops,
        first.packings + second.packings,
    )


def lm_head(
    dims: Dims,
    num_tokens: int,
    *,
    eps: float,
    logits: bool,
    greedy: bool,
    sampled: bool = False,
    last_row: bool = False,
    norm: bool = True,
    has_delta: bool = True,
    depth: int | None = None,
    names: Names | None = None,
) -> Tactic:
    """Final add and norm, the head, and (greedy) the token of the largest logit.

    With `sampled` the token is drawn as the step's inputs say, see `sample_tactics.sample`; those
    may ask for the largest logit too. `depth` is one of `head_depths`, None for the first.

    Names: x, delta, norm_weight, codes, scales, global_scale; tokens (int32 [T]) and out (float32
    logits [T, vocab]) are outputs 0 and 1 by default. Without `norm`, x is the head's input;
    without `logits` or `greedy` that output is not written and may be any pointer.
    """
    tactic = _stream(
        "w4a16_lm_head", dims, num_tokens, rows=dims.vocab, eps=eps, gated=False, logits=logits,
        greedy=greedy, norm=norm, has_delta=has_delta, depth=depth,
        names={"residual": Scratch("residual", num_tokens * dims.hidden * 2), **(names or {})},
    )  # fmt: skip
    if not greedy:
        return tactic
    count = tactic.kernels[0].grid[0]
    if sampled:
        assert logits, "sampling reads the logits"
        last = sample(dims.vocab, num_tokens, count, last_row=last_row, names=names)
    else:
        last = argmax(num_tokens, count, names=names)
    return Tactic(
        tactic.name,
        (*tactic.kernels, last),
        tactic.bytes,
        tactic.flops,
        tactic.packings,
    )


def embed(dims: Dims, num_tokens: int, *, names: Names | None = None) -> Tactic:
    """Out bf16 [T, H] = table bf16 [vocab, H] at tokens int32 [T], for any T."""
    require(dims.hidden % 8 == 0, "embed", f"hidden={dims.hidden}, expected a multiple of 8")
    kernel = launch(
        "embed",
        [("HIDDEN", dims.hidden)],
        source="token",
        blocks=num_tokens,
        threads=256,
        smem=0,
        params=params_of(
            "tokens table out vocab", names, {"out": Output(0), "vocab": Int32(dims.vocab)}
        ),
    )
    return Tactic("gather", (kernel,), 4 * num_tokens * dims.hidden, 0)


def head_depths(dims: Dims) -> tuple[int, ...]:
    """Tiles of a warp of `lm_head` that are on their way at once, best guess first.

    More would not fit the registers. Bits do not depend on the choice.
    """
    return (1,) if dims.bf16 else (2, 3, 1)


def _stream(
    name: str, dims: Dims, num_tokens: int, *, rows: int, eps: float, gated: bool, logits: bool,
    greedy: bool, norm: bool, has_delta: bool, names: Names | None, depth: int | None = None,
) -> Tactic:  # fmt: skip
    check_tokens(name, num_tokens)
    check_width(name, "hidden", dims.hidden, MAX_NORM_WIDTH)
    depth = depth or (1 if dims.bf16 else 3 if gated else head_depths(dims)[0])
    tiles = -(-rows // 16)
    require(tiles >= num_tokens, name, f"{rows} rows, expected at least 16 for each token")
    blocks = min(tiles, _HEAD_BLOCKS)
    kernel = launch(
        "stream",
        [
            ("HIDDEN", dims.hidden), ("DIM_N", rows), ("DEPTH", depth), ("HAS_NORM", int(norm)),
            ("HAS_DELTA", int(has_delta)), ("GATED", int(gated)), ("LOGITS", int(logits)),
            ("ARGMAX", int(greedy)), *variant(dims, num_tokens),
        ],
        blocks=blocks,
        threads=256,
        smem=check_smem(name, stream_bytes(dims, depth, num_tokens, norm=norm)),
        params=params_of(
            "x delta norm_weight codes global_scale out best row residual T eps",
            names,
            {
                **candidates(num_tokens, blocks),
                "out": Output(0) if gated else Output(1),
                "residual": Output(1),
                "T": Int32(num_tokens),
                "eps": Float32(eps),
            },
        ),
    )  # fmt: skip
    out_bytes = rows if gated else 4 * rows * logits
    return tactic_of(
        name if gated else f"{name}_{depth}",
        dims,
        (kernel,),
        rows_by_k=rows * dims.hidden,
        num_tokens=num_tokens,
        other_bytes=num_tokens * (6 * dims.hidden + out_bytes),
        packings=packings_of(dims, names, ("codes", "scales", "gated" if gated else "plain")),
    )
