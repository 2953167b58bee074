"""Tactics of the w4a16 kernels: kernels, grids, shared memory and packings for given sizes and T.

Operators that these kernels back call these functions with their own parameter names in `names` (by
the names used here) and take the result as it is. Two rules bind a plan:

* `residual` outputs must not share memory with `x` or `delta`: every block still reads those.
* position, slot and page table must not change during a step: `qkv` reads them before its wait.

The classes: blocks of qkv and linear take more than half of an SM's shared memory and few registers,
those of the router more than half of the registers. So two blocks of one kernel never share an SM while
another SM idles, and a block of the next kernel still fits beside each.
"""

from collections.abc import Mapping
from pathlib import Path

from inkrt.plugins.tactic import (
    Float32,
    Int32,
    KernelLaunch,
    Output,
    Packing,
    Param,
    Pointer,
    Scratch,
    Tactic,
)
from inkrt.plugins.w4a16.packing import bf16_packing, nvfp4_packing
from inkrt.plugins.w4a16.shapes import (
    HEAD,
    MAX_NORM_WIDTH,
    MAX_SMEM,
    PAGE,
    Dims,
    check_smem,
    check_tokens,
    check_width,
    down_bytes,
    gate_up_bytes,
    linear_bytes,
    qkv_bytes,
    require,
    router_bytes,
    router_rows,
    stream_bytes,
)

_FOLDER = Path(__file__).parent
_LARGE_BLOCK = 116 * 1024
_HEAD_BLOCKS = 264  # two for each of 132 SMs
_ERROR = Scratch("error", 4, fill=0)

Names = Mapping[str, Param]


def qkv(
    dims: Dims,
    num_tokens: int,
    *,
    eps: float,
    rope_theta: float | None,
    ring_rows: int,
    has_delta: bool = True,
    cluster: int | None = None,
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
        cluster: blocks that share one head, 1 to 8; None for 3 or, if its shared memory is too
            small for that, the next that fits.
        names: parameters x, delta bf16 [T, H]; norm_weight bf16 [H]; codes, scales (or weight): the
            rows of q, k and v; global_scale float32 [1]; q_norm, k_norm bf16 [128]; k_cache, v_cache
            as `qkv.cu` says; where (slot or page table); position, num_tokens int32 [1]; q
            (bf16 [T, heads * 128]) and residual (bf16 [T, H]) are outputs 0 and 1 by default.

    Raises:
        BuildError: sizes that the kernel does not take.
    """
    check_tokens("qkv", num_tokens)
    check_width("qkv", "hidden", dims.hidden, MAX_NORM_WIDTH)
    if cluster is None:
        fitting = [size for size in (3, 4, 8) if qkv_bytes(dims, size) <= MAX_SMEM]
        cluster = fitting[0] if fitting else 8
    require(1 <= cluster <= 8, "qkv", f"cluster={cluster}, expected 1 to 8")
    require(ring_rows % PAGE == 0, "qkv", f"ring_rows={ring_rows}, expected a multiple of {PAGE}")
    heads = dims.heads + 2 * dims.kv_heads
    require(
        heads * cluster >= num_tokens,
        "qkv",
        f"{heads} heads in clusters of {cluster}, expected at least T={num_tokens} blocks",
    )
    defines = [
        ("HIDDEN", dims.hidden), ("HEADS", dims.heads), ("KV_HEADS", dims.kv_heads),
        ("CLUSTER", cluster), ("RING", ring_rows), ("HAS_DELTA", int(has_delta)),
        ("ROPE", int(rope_theta is not None)), *_variant(dims, num_tokens),
    ]  # fmt: skip
    if rope_theta is not None:
        defines.append(("INV_FREQ", inverse_frequencies(rope_theta)))
    kernel = _launch(
        "qkv",
        defines,
        blocks=heads * cluster,
        threads=512,
        smem=max(check_smem("qkv", qkv_bytes(dims, cluster)), _LARGE_BLOCK),
        cluster=cluster,
        params=_params(
            "x delta norm_weight codes global_scale q_norm k_norm k_cache v_cache where position "
            "num_tokens q residual error T eps",
            names,
            {"q": Output(0), "residual": Output(1), "T": Int32(num_tokens), "eps": Float32(eps)},
        ),
    )
    return _tactic(
        f"w4a16_qkv_cluster{cluster}",
        dims,
        (kernel,),
        rows_by_k=heads * HEAD * dims.hidden,
        num_tokens=num_tokens,
        other_bytes=num_tokens * (6 * dims.hidden + 2 * heads * HEAD),
        packings=_packings(dims, names, ("codes", "scales", "heads")),
    )


def linear(
    dims: Dims, num_tokens: int, *, rows: int, width: int, names: Names | None = None
) -> Tactic:
    """y[T, rows] = bf16(x[T, width] W^T * global_scale); names x, codes, scales, global_scale, y."""
    check_tokens("linear", num_tokens)
    check_width("linear", "width", width, 8192)
    kernel = _launch(
        "linear",
        [("DIM_N", rows), ("DIM_K", width), *_variant(dims, num_tokens)],
        blocks=-(-rows // 16),
        threads=512,
        smem=max(check_smem("linear", linear_bytes(dims, width)), _LARGE_BLOCK),
        params=_params(
            "x codes global_scale y error T", names, {"y": Output(0), "T": Int32(num_tokens)}
        ),
    )
    return _tactic(
        "w4a16_linear",
        dims,
        (kernel,),
        rows_by_k=rows * width,
        num_tokens=num_tokens,
        other_bytes=2 * num_tokens * (rows + width),
        packings=_packings(dims, names, ("codes", "scales", "plain")),
    )


def moe(
    dims: Dims, num_tokens: int, *, eps: float, has_delta: bool = True, names: Names | None = None
) -> Tactic:
    """Residual add, norm, router, shared and routed experts, weighted sum: three kernels.

    Args:
        dims: sizes.
        num_tokens: T.
        eps: of the norm.
        has_delta: whether `delta` is added.
        names: parameters x, delta, norm_weight; router_weight bf16 [E, H]; shared_gate_up_codes and
            _scales (gate rows, then up rows), shared_gate_up_scale float32 [1]; gate_up_codes,
            _scales [E, ...] and gate_up_scale float32 [E]; down_codes, _scales, down_scale [E];
            shared_down_codes, _scales, shared_down_scale [1]; out and residual bf16 [T, H] are
            outputs 0 and 1 by default. With bf16 weights the `_scales` do not exist.

    Raises:
        BuildError: sizes that the kernels do not take.
    """
    check_tokens("moe", num_tokens)
    check_width("moe", "hidden", dims.hidden, MAX_NORM_WIDTH)
    check_width("moe", "width", dims.width, 512)
    check_width("moe", "shared_width", dims.shared_width, 8192)
    require(
        dims.shared_width % dims.width == 0,
        "moe",
        f"shared_width={dims.shared_width}, expected a multiple of width={dims.width}",
    )
    require(
        dims.experts <= 256 and dims.experts % 8 == 0,
        "moe",
        f"experts={dims.experts}, expected a multiple of 8 up to 256",
    )
    most = min(8, dims.experts)
    require(1 <= dims.top_k <= most, "moe", f"top_k={dims.top_k}, expected 1 to {most}")
    require(
        router_rows(dims) <= 8,
        "moe",
        f"experts={dims.experts} over shared_width={dims.shared_width}, expected at most one "
        f"expert for each shared row",
    )
    tokens, top_k = num_tokens, dims.top_k
    own: dict[str, Param] = {
        "out": Output(0),
        "residual": Output(1),
        "T": Int32(tokens),
        "eps": Float32(eps),
        "z": Scratch("z", tokens * dims.hidden * 2),
        "logits": Scratch("logits", tokens * dims.experts * 2),
        "hidden": Scratch("hidden", tokens * top_k * dims.width * 2),
        "shared_hidden": Scratch("shared_hidden", tokens * dims.shared_width * 2),
    }
    sizes = [
        ("HIDDEN", dims.hidden), ("EXPERTS", dims.experts), ("TOP_K", top_k),
        ("WIDTH", dims.width), ("SHARED_WIDTH", dims.shared_width), ("WEIGHTS", int(dims.bf16)),
    ]  # fmt: skip
    trigger = [("TRIGGER", _trigger(tokens))]
    depth = 1 if tokens == 1 or dims.bf16 else 2
    tiles = min(dims.experts, tokens * top_k) * dims.width // 8
    kernels = (
        _launch(
            "router",
            [*sizes, *trigger, ("HAS_DELTA", int(has_delta))],
            blocks=dims.shared_width // 8,
            threads=640,
            smem=check_smem("moe", router_bytes(dims)),
            params=_params(
                "x delta norm_weight router_weight shared_gate_up_codes shared_gate_up_scale "
                "residual z logits shared_hidden error T eps",
                names,
                own,
            ),
        ),
        _launch(
            "gate_up",
            [*sizes, ("DEPTH", depth)],
            blocks=min(tiles, 384 if tokens == 1 else 264),
            threads=256,
            smem=gate_up_bytes(dims, depth),
            params=_params("z logits gate_up_codes gate_up_scale hidden T", names, own),
        ),
        _launch(
            "down",
            [*sizes, *trigger, ("DEPTH", depth)],
            blocks=dims.hidden // 16,
            threads=256,
            smem=down_bytes(dims),
            params=_params(
                "logits hidden shared_hidden down_codes down_scale shared_down_codes "
                "shared_down_scale out T",
                names,
                own,
            ),
        ),
    )
    # Independent routing: the expected number of distinct experts.
    distinct = dims.experts * (1 - (1 - top_k / dims.experts) ** tokens)
    expert = 3 * dims.hidden * dims.width
    shared = 3 * dims.hidden * dims.shared_width
    per_value = dims.chunk_bytes / 4096
    router_size = dims.experts * dims.hidden
    return Tactic(
        name="w4a16_moe",
        kernels=kernels,
        bytes=round((distinct * expert + shared) * per_value)
        + 2 * router_size
        + 8 * tokens * dims.hidden,
        flops=2 * tokens * (top_k * expert + shared + router_size),
        packings=_packings(
            dims,
            names,
            ("shared_gate_up_codes", "shared_gate_up_scales", "gated"),
            ("gate_up_codes", "gate_up_scales", "gated"),
            ("down_codes", "down_scales", "plain"),
            ("shared_down_codes", "shared_down_scales", "plain"),
        ),
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
    given = names or {}
    middle = Scratch("middle", num_tokens * dims.dense_width * 2)
    first = dense_gate_up(
        dims,
        num_tokens,
        eps=eps,
        has_delta=has_delta,
        names={
            "codes": Pointer("gate_up_codes"),
            "scales": Pointer("gate_up_scales"),
            "global_scale": Pointer("gate_up_scale"),
            **given,
            "out": middle,
        },
    )
    second = linear(
        dims,
        num_tokens,
        rows=dims.hidden,
        width=dims.dense_width,
        names={
            "x": middle,
            "codes": given.get("down_codes", Pointer("down_codes")),
            "scales": given.get("down_scales", Pointer("down_scales")),
            "global_scale": given.get("down_scale", Pointer("down_scale")),
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
    norm: bool = True,
    has_delta: bool = True,
    names: Names | None = None,
) -> Tactic:
    """Final add and norm, the head, and (greedy) the token of the largest logit.

    Names: x, delta, norm_weight, codes, scales, global_scale; tokens (int32 [T]) and out (float32
    logits [T, vocab]) are outputs 0 and 1 by default. Without `norm`, x is the head's input; without
    `logits` or `greedy` that output is not written and may be any pointer.
    """
    tactic = _stream(
        "w4a16_lm_head", dims, num_tokens, rows=dims.vocab, eps=eps, gated=False, logits=logits,
        greedy=greedy, norm=norm, has_delta=has_delta,
        names={"residual": Scratch("residual", num_tokens * dims.hidden * 2), **(names or {})},
    )  # fmt: skip
    if not greedy:
        return tactic
    blocks = tactic.kernels[0].grid[0]
    best = _candidates(num_tokens, blocks)
    argmax = _launch(
        "argmax",
        [("HIDDEN", dims.hidden)],
        source="token",
        blocks=num_tokens,
        threads=256,
        smem=64,
        params=_params(
            "best row tokens count",
            names,
            {**best, "tokens": Output(0), "count": Int32(blocks)},
        ),
    )
    return Tactic(
        tactic.name,
        (*tactic.kernels, argmax),
        tactic.bytes,
        tactic.flops,
        tactic.packings,
    )


def embed(dims: Dims, num_tokens: int, *, names: Names | None = None) -> Tactic:
    """Out bf16 [T, H] = table bf16 [vocab, H] at tokens int32 [T]."""
    check_tokens("embed", num_tokens)
    require(dims.hidden % 8 == 0, "embed", f"hidden={dims.hidden}, expected a multiple of 8")
    kernel = _launch(
        "embed",
        [("HIDDEN", dims.hidden)],
        source="token",
        blocks=num_tokens,
        threads=256,
        smem=0,
        params=_params(
            "tokens table out vocab", names, {"out": Output(0), "vocab": Int32(dims.vocab)}
        ),
    )
    return Tactic("gather", (kernel,), 4 * num_tokens * dims.hidden, 0)


def inverse_frequencies(theta: float) -> str:
    """The 64 rotary frequencies theta^(-2i/128), rounded as torch computes them in float32, as C."""
    import torch

    exponents = torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD
    values = 1.0 / torch.pow(torch.tensor(theta, dtype=torch.float32), exponents)
    return ",".join(f"{value!r}f" if "." in repr(value) or "e" in repr(value) else f"{value}.f"
                    for value in values.tolist())  # fmt: skip


def _stream(
    name: str, dims: Dims, num_tokens: int, *, rows: int, eps: float, gated: bool, logits: bool,
    greedy: bool, norm: bool, has_delta: bool, names: Names | None,
) -> Tactic:  # fmt: skip
    check_tokens(name, num_tokens)
    check_width(name, "hidden", dims.hidden, MAX_NORM_WIDTH)
    depth = 1 if dims.bf16 else 3 if gated else 2
    tiles = -(-rows // 16)
    require(tiles >= num_tokens, name, f"{rows} rows, expected at least 16 for each token")
    blocks = min(tiles, _HEAD_BLOCKS)
    kernel = _launch(
        "stream",
        [
            ("HIDDEN", dims.hidden), ("DIM_N", rows), ("DEPTH", depth), ("HAS_NORM", int(norm)),
            ("HAS_DELTA", int(has_delta)), ("GATED", int(gated)), ("LOGITS", int(logits)),
            ("ARGMAX", int(greedy)), *_variant(dims, num_tokens),
        ],
        blocks=blocks,
        threads=256,
        smem=check_smem(name, stream_bytes(dims, depth, norm=norm)),
        params=_params(
            "x delta norm_weight codes global_scale out best row residual T eps",
            names,
            {
                **_candidates(num_tokens, blocks),
                "out": Output(0) if gated else Output(1),
                "residual": Output(1),
                "T": Int32(num_tokens),
                "eps": Float32(eps),
            },
        ),
    )  # fmt: skip
    out_bytes = rows if gated else 4 * rows * logits
    return _tactic(
        name,
        dims,
        (kernel,),
        rows_by_k=rows * dims.hidden,
        num_tokens=num_tokens,
        other_bytes=num_tokens * (6 * dims.hidden + out_bytes),
        packings=_packings(dims, names, ("codes", "scales", "gated" if gated else "plain")),
    )


def _candidates(num_tokens: int, blocks: int) -> dict[str, Param]:
    size = 4 * num_tokens * blocks
    return {"best": Scratch("best", size), "row": Scratch("row", size)}


def _trigger(num_tokens: int) -> int:
    """One token: dependents start at once. More: after the wait, which measured better."""
    return 0 if num_tokens == 1 else 1


def _variant(dims: Dims, num_tokens: int) -> list[tuple[str, int]]:
    return [("WEIGHTS", int(dims.bf16)), ("TRIGGER", _trigger(num_tokens))]


def _params(spelled: str, names: Names | None, own: Mapping[str, Param]) -> tuple[Param, ...]:
    """The caller's parameter of each name, else the kernel's own, else an argument so called."""
    known = {"error": _ERROR, **own, **(names or {})}
    return tuple(known.get(name, Pointer(name)) for name in spelled.split())


def _packings(
    dims: Dims, names: Names | None, *weights: tuple[str, str, str]
) -> tuple[Packing, ...]:
    def argument(name: str) -> str:
        param = (names or {}).get(name, Pointer(name))
        assert isinstance(param, Pointer), f"{name} is packed, so it must be an argument"
        return param.argument

    if dims.bf16:
        return tuple(bf16_packing(argument(codes), order) for codes, _, order in weights)
    return tuple(nvfp4_packing(argument(c), argument(s), order) for c, s, order in weights)


def _launch(
    entry: str,
    defines: list[tuple[str, int]]
    | list[tuple[str, int | str]]
    | list[tuple[str, int | float | str]],
    *,
    blocks: int,
    threads: int,
    smem: int,
    params: tuple[Param, ...],
    cluster: int = 1,
    source: str | None = None,
) -> KernelLaunch:
    return KernelLaunch(
        source=_FOLDER / f"{source or entry}.cu",
        entry=entry,
        defines=tuple(defines),
        grid=(blocks, 1, 1),
        block=(threads, 1, 1),
        params=params,
        cluster=cluster,
        smem_bytes=smem,
    )


def _tactic(
    name: str, dims: Dims, kernels: tuple[KernelLaunch, ...], *, rows_by_k: int, num_tokens: int,
    other_bytes: int, packings: tuple[Packing, ...],
) -> Tactic:  # fmt: skip
    return Tactic(
        name=name,
        kernels=kernels,
        bytes=rows_by_k * dims.chunk_bytes // 4096 + other_bytes,
        flops=2 * num_tokens * rows_by_k,
        packings=packings,
    )
