"""How `draft_attention` runs on a GPU: parts of the context, and a merge."""

from pathlib import Path

import torch

from inkrt.plugins.kv_layout import PAGE_TOKENS, has_layout, tile_bytes
from inkrt.plugins.tactic import (
    GPU_TARGETS,
    CallArgs,
    Float32,
    KernelLaunch,
    Output,
    Pointer,
    Scratch,
    Tactic,
    number_arg,
    tensor_arg,
)

_FOLDER = Path(__file__).parent
_LOG2_E = 1.4426950408889634
_MULTIPROCESSORS = 132
_MOST_PARTS = 64
_MOST_ROWS, _MOST_TILES = 16, 4  # rows of a block; tiles of 16 of its heads' rows together
_MOST_DIM = 128
_STAGES = 3
_MERGE_WARPS = 4


def find_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """The kernels for up to 16 bfloat16 rows of head dims up to 128 that `kv_layout` has."""
    q, k_cache = tensor_arg(args, "q"), tensor_arg(args, "k_cache")
    max_pages = tensor_arg(args, "page_table").shape[0]
    group, num_heads, dim = q.shape
    _, page_tokens, kv_heads, _ = k_cache.shape
    is_dense = all(tensor_arg(args, name).strides is None for name in ("q", "k", "v"))
    fits = q.dtype == torch.bfloat16 and page_tokens == PAGE_TOKENS and has_layout(dim) and is_dense
    if target not in GPU_TARGETS or not fits or group > _MOST_ROWS or dim > _MOST_DIM:
        return []
    window, has_sinks = int(number_arg(args, "window")), args["sinks"] is not None
    rows = group * num_heads // kv_heads
    tiles = min(-(-rows // 16), _MOST_TILES)
    row_blocks = -(-rows // (16 * tiles))
    groups = 4 if tiles == 1 else 2
    # A window that begins and ends inside of pages touches one page more than it fills.
    most_pages = min(max_pages, -(-window // PAGE_TOKENS) + 1) if window else max_pages
    parts = max(1, min(_MULTIPROCESSORS // (kv_heads * row_blocks), most_pages, _MOST_PARTS))
    defines = (
        ("GROUP", group),
        ("KV_HEADS", kv_heads),
        ("HEADS_PER_KV", num_heads // kv_heads),
        ("DIM", dim),
        ("WINDOW", window),
        ("PARTS", parts),
    )
    causal = int(bool(args["is_causal"]))
    sums = Scratch("o", kv_heads * parts * rows * dim * 4)
    state = Scratch("ml", kv_heads * parts * rows * 8)
    tile_pair = 2 * tile_bytes(dim)
    attend = KernelLaunch(
        source=_FOLDER / "attend.cu",
        entry="attend",
        defines=(
            *defines,
            ("CAUSAL", causal),
            ("TILES", tiles),
            ("GROUPS", groups),
            ("STAGES", _STAGES),
        ),
        grid=(row_blocks * kv_heads * parts, 1, 1),
        block=(32 * tiles * groups, 1, 1),
        params=(
            *(Pointer(name) for name in ("q", "k", "v", "k_cache", "v_cache")),
            Pointer("page_table"),
            Pointer("position"),
            sums,
            state,
            Scratch("error", 4, fill=0),
            Float32(number_arg(args, "scale") * _LOG2_E),
        ),
        smem_bytes=(_STAGES + 1) * tile_pair + groups * 16 * tiles * 8 + 8 * _STAGES,
    )
    merge = KernelLaunch(
        source=_FOLDER / "merge.cu",
        entry="merge",
        defines=(*defines, ("SINKS", int(has_sinks))),
        grid=(kv_heads * rows, 1, 1),
        block=(32 * _MERGE_WARPS, 1, 1),
        params=(
            sums,
            state,
            Pointer("sinks") if has_sinks else Pointer("q"),
            Pointer("position"),
            Output(),
        ),
        smem_bytes=_MERGE_WARPS * dim * 4,
    )
    # Of the context as many keys as can be read, as the arguments say it.
    keys = min(window, max_pages * PAGE_TOKENS) if window else max_pages * PAGE_TOKENS
    num_bytes = 2 * kv_heads * dim * 2 * (keys + group) + 2 * 2 * group * num_heads * dim
    flops = 4 * group * num_heads * dim * (keys + group)
    return [Tactic(f"parts{parts}", (attend, merge), num_bytes, flops)]
