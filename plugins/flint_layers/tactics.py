"""How `flint_layers` runs on a GPU: one launch whose blocks hand each other vectors, for one token.

See `layers.cu`. Sizes are those of Flint, but for the number of layers and experts, the kinds of
layers and the window: a warp's share of every product is fixed.
"""

from pathlib import Path

import torch

from inkrt.plugins.kv_layout import PAGE_TOKENS
from inkrt.plugins.tactic import (
    HOPPER,
    CallArgs,
    Float32,
    Int32,
    KernelLaunch,
    Output,
    Pointer,
    Scratch,
    Table,
    Tactic,
    number_arg,
    number_list_arg,
    tensor_arg,
    tensor_list_arg,
)
from inkrt.plugins.w4a16.launches import inverse_frequencies
from inkrt.plugins.w4a16.packing import nvfp4_packing
from inkrt.plugins.w4a16.shapes import HEAD, MAX_SMEM, MULTIPROCESSORS, Dims

_FOLDER = Path(__file__).parent
_ATTENDED = 4096  # width of all heads
# In the order of `Column` in memory.cuh.
_COLUMNS = (
    "input_norm", "qkv", "qkv_global_scale", "q_norm", "k_norm", "sinks", "k_cache", "v_cache",
    "o", "o_global_scale", "mlp_norm", "router", "shared_gate_up", "shared_gate_up_global_scale",
    "gate_up", "gate_up_global_scale", "down", "down_global_scale", "shared_down",
    "shared_down_global_scale",
)  # fmt: skip
_PACKED = (
    ("qkv", "heads"), ("o", "plain"), ("shared_gate_up", "gated"), ("gate_up", "gated"),
    ("down", "plain"), ("shared_down", "plain"),
)  # fmt: skip
# Points at which pieces of the next layer's weights are requested, see memory.cuh; the best of
# `perf/kernels/flint_layers.py --schedules`. Without a timing cache this is what runs.
SCHEDULE = (2, 1, 2, 1, 3, 3, 4, 4)
# The first point at which each piece's place in shared memory is free.
EARLIEST = (0, 0, 0, 0, 0, 1, 3, 4)
POINTS = 5  # of a layer at which weights may be requested
# Slots of the exchange, and copies that fill a sector, see memory.cuh.
_NUM_SLOTS, _SUM_COPIES = 4, 4


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The launch for one token in bfloat16 and sizes of Flint; an empty list for anything else."""
    x = tensor_arg(args, "x")
    if target != HOPPER or x.shape[0] != 1 or x.dtype != torch.bfloat16:
        return []
    dims = _dims(args)
    windows = [int(window) for window in number_list_arg(args, "windows")]
    thetas = {theta for theta in number_list_arg(args, "rope_thetas") if theta > 0}
    rings = {
        cache.shape[1]
        for cache, window in zip(tensor_list_arg(args, "k_cache"), windows, strict=True)
        if window
    }
    heads_per_kv = dims.heads // dims.kv_heads
    fits = (
        dims.hidden == 2048
        and dims.heads * HEAD == _ATTENDED
        and tensor_list_arg(args, "q_norm")[0].shape == (HEAD,)
        and heads_per_kv == 8
        and (dims.heads + 2 * dims.kv_heads) * 8 <= 3 * MULTIPROCESSORS
        and dims.experts <= 256
        and dims.experts % 8 == 0
        and (dims.top_k, dims.width, dims.shared_width) == (6, 512, 1024)
        and args["page_table"] is not None
        and len(rings) <= 1
        and len(thetas) <= 1
        and len(set(windows) - {0}) <= 1
        and all(ring % PAGE_TOKENS == 0 for ring in rings)
        # At most three of a window's pages are a block's, and the ring in shared memory holds four.
        and all(window <= 8 * 2 * PAGE_TOKENS for window in windows)
        and all(
            cache.shape[1] == PAGE_TOKENS
            for cache, window in zip(tensor_list_arg(args, "k_cache"), windows, strict=True)
            if not window
        )
    )
    if not fits:
        return []
    return [
        tactic(
            dims,
            windows=windows,
            rope_thetas=number_list_arg(args, "rope_thetas"),
            ring_rows=max(rings, default=PAGE_TOKENS),
            eps=number_arg(args, "eps"),
            scale=number_arg(args, "scale"),
            schedule=schedule,
        )
        for schedule in schedules()
    ]


def schedules() -> list[tuple[int, ...]]:
    """`SCHEDULE`, and every schedule that differs from it in one piece. Bits are the same."""
    found: list[tuple[int, ...]] = [SCHEDULE]
    for piece, earliest in enumerate(EARLIEST):
        for point in range(earliest, POINTS):
            found.append((*SCHEDULE[:piece], point, *SCHEDULE[piece + 1 :]))
    return list(dict.fromkeys(found))


def _dims(args: CallArgs) -> Dims:
    kv_heads = tensor_list_arg(args, "k_cache")[0].shape[2]
    experts, width, _ = tensor_list_arg(args, "gate_up")[0].shape
    return Dims(
        hidden=tensor_arg(args, "x").shape[1],
        heads=tensor_list_arg(args, "sinks")[0].shape[0],
        kv_heads=kv_heads,
        experts=experts,
        top_k=int(number_arg(args, "top_k")),
        width=width // 2,
        shared_width=tensor_list_arg(args, "shared_down")[0].shape[1] * 2,  # two codes a byte
    )


def tactic(
    dims: Dims,
    *,
    windows: list[int],
    rope_thetas: list[float],
    ring_rows: int,
    eps: float,
    scale: float,
    schedule: tuple[int, ...] = SCHEDULE,
) -> Tactic:
    """The launch for one token.

    Args:
        dims: sizes.
        windows: keys that a row sees, by layer; 0 for all.
        rope_thetas: base of the rotation, by layer, 0 for none; all others are equal.
        ring_rows: rows of a slot's ring in layers with a window.
        eps: of all norms.
        scale: of the scores.
        schedule: points at which pieces of the next layer's weights are requested.
    """
    layers = len(windows)
    has_rope = [int(theta > 0) for theta in rope_thetas]
    slot_bytes = _slot_bytes(dims)
    partials = 2 * dims.kv_heads * 8 * (MULTIPROCESSORS // dims.kv_heads)
    kernel = KernelLaunch(
        source=_FOLDER / "layers.cu",
        entry="layers",
        defines=(
            ("HIDDEN", dims.hidden), ("HEADS", dims.heads), ("KV_HEADS", dims.kv_heads),
            ("EXPERTS", dims.experts), ("TOP_K", dims.top_k), ("WIDTH", dims.width),
            ("SHARED_WIDTH", dims.shared_width), ("LAYERS", layers), ("BLOCKS", MULTIPROCESSORS),
            ("RING", ring_rows), ("WINDOW", max(windows)),
            ("WINDOWED", ",".join(str(int(window > 0)) for window in windows)),
            ("ROPES", ",".join(map(str, has_rope))),
            ("INV_FREQ", inverse_frequencies(max(rope_thetas) or 1.0)),
            ("NUM_SLOTS", _NUM_SLOTS), ("SLOT_BYTES", slot_bytes), ("SUM_COPIES", _SUM_COPIES),
            ("SMEM_BYTES", MAX_SMEM),
        ),
        grid=(MULTIPROCESSORS, 1, 1),
        block=(512, 1, 1),
        smem_bytes=MAX_SMEM,
        params=(
            Pointer("x"), Pointer("delta"), Table(_COLUMNS), Pointer("page_table"),
            Pointer("position"), Pointer("slot"), Output(0), Output(1),
            Scratch("exchange", _NUM_SLOTS * slot_bytes, fill=0xFF),
            Scratch("partials", partials * 512, fill=0xFF),
            Scratch("partial_sums", partials * _SUM_COPIES * 8, fill=0xFF),
            Scratch("slots_used", 4 * MULTIPROCESSORS, fill=0),
            Scratch("error", 4, fill=0),
            Int32(sum(point << 4 * piece for piece, point in enumerate(schedule))),
            Float32(eps), Float32(scale),
        ),
    )  # fmt: skip
    rows = (dims.heads + 2 * dims.kv_heads) * HEAD + _ATTENDED
    mlp = 3 * dims.hidden * (dims.top_k * dims.width + dims.shared_width)
    values = rows * dims.hidden + mlp
    router = dims.experts * dims.hidden
    return Tactic(
        name="persistent_" + "".join(map(str, schedule)),
        kernels=(kernel,),
        bytes=layers * (values * dims.chunk_bytes // 4096 + 2 * router),
        flops=2 * layers * (values + router),
        packings=tuple(nvfp4_packing(name, f"{name}_scales", order) for name, order in _PACKED),
    )


def _slot_bytes(dims: Dims) -> int:
    """`Slot` of memory.cuh."""
    heads = (dims.heads + 2 * dims.kv_heads) * HEAD * 2
    sectors = 4 * dims.hidden // 16 + dims.shared_width // 8 + dims.top_k * dims.width // 8
    return 2 * 4 * dims.hidden + heads + 2 * _ATTENDED + 32 * sectors
