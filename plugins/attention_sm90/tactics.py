"""Tactics of attention on sm_90a, for the attention operators' `tactics.py`; see relative.py too.

Three kernels: attention.cu on wgmma for steps of up to eight tokens, head dim 128 and up to eight q
heads per kv head; attention_tile.cu for wider steps of head dim 128; and attention_simple.cu for
every other shape that plugins.kv_layout can store, and for other GPUs' narrow steps. All expect the
step's own rows in the cache and use the layout of plugins.kv_layout.

A token's bits follow from its position and from how keys are split, so candidates for one call
differ only in what leaves bits alone (the group of tokens of a block, stages), and the split does
not depend on T. Steps of one engine may therefore choose tactics independently, but not kernels.
The tiled kernel's rows are near to those of the others, not equal.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from inkrt.plugins.attention_sm90.bank import BANK_BY_DISTANCE, RELATIVE_STATES, Relative
from inkrt.plugins.kv_layout import PAGE_TOKENS, has_layout
from inkrt.plugins.registry import MAX_VERIFY_TOKENS
from inkrt.plugins.tactic import (
    GPU_TARGETS,
    HOPPER,
    CallArgs,
    Float32,
    KernelLaunch,
    Output,
    Param,
    Pointer,
    Scratch,
    Tactic,
    TensorArg,
)
from inkrt.plugins.w4a16.shapes import MULTIPROCESSORS

_FOLDER = Path(__file__).parent
_NUM_CLUSTERS_OF_8 = 15  # that run at once with a block per SM (measured)
_MAX_SMEM_BYTES = 232_448
HEAD_DIM = 128
MAX_HEADS_PER_KV = 8
_STAGE_BYTES = 2 * PAGE_TOKENS * HEAD_DIM * 2
_THREADS = 256
_TILE_TOKENS = 64
_TILE_STAGES = 4  # registers leave room for one block on a multiprocessor
_WARPS = 8
_TILE_RELATIVE_BYTES = 16 * 88 * 2 + 16 * HEAD_DIM * 2  # of a warp: biases, and queries

Defines = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """The shapes of an attention call.

    Attributes:
        num_tokens: T, rows of the step.
        num_kv_heads: of the rank.
        heads_per_kv: q heads of a kv head.
        head_dim: d.
        window: keys that a row sees; 0 for all.
        ring_rows: rows of a slot's ring; 0 for a paged cache.
        scale: of the scores.
        relative: of a `relative_attention`, else None.
    """

    num_tokens: int
    num_kv_heads: int
    heads_per_kv: int
    head_dim: int
    window: int
    ring_rows: int
    scale: float
    relative: Relative | None = None

    @property
    def num_heads(self) -> int:
        """Q heads of the rank."""
        return self.num_kv_heads * self.heads_per_kv

    @property
    def least_keys(self) -> int:
        """Keys that the shortest step which fills the window reads; T without a window."""
        return self.window + self.num_tokens - 1 if self.window else self.num_tokens

    @property
    def entries(self) -> Pointer:
        """The parameter that finds pages: the page table, or the slot of a ring."""
        return Pointer("slot" if self.ring_rows else "page_table")

    @property
    def inputs(self) -> tuple[Param, ...]:
        """First parameters of every kernel; what there is none of is not read."""
        state = (
            Pointer("k_cache"),
            Pointer("v_cache"),
            self.entries,
            Pointer("position"),
            Pointer("num_tokens"),
        )
        if self.relative is None:
            return (Pointer("q"), Pointer("sinks"), *state)
        sinks = Pointer("sinks" if self.relative.has_sinks else "q")
        gate = Pointer("gate" if self.relative.is_gated else "q")
        return (Pointer("q"), Pointer("rel"), Pointer("bank"), sinks, gate, *state)

    def entry(self, prefix: str = "") -> str:
        """Name of a kernel."""
        return prefix + ("relative_attention" if self.relative else "sink_attention")

    @property
    def bytes(self) -> int:
        """Least bytes moved; without a window the older keys, which dominate, are not in it."""
        rows = 2 * self.num_tokens * self.num_heads + 2 * self.least_keys * self.num_kv_heads
        return 2 * rows * self.head_dim + self._relative_bytes

    @property
    def _relative_bytes(self) -> int:
        """Of relative states, sinks, gates and the bank."""
        if self.relative is None:
            return 0
        relative = self.relative
        gate = self.head_dim if relative.is_gated else 0
        row = relative.states + relative.has_sinks + gate
        return 2 * (self.num_tokens * self.num_heads * row + relative.states * relative.extent)

    @property
    def flops(self) -> int:
        """Operations on `least_keys` keys."""
        keys = self.window or (self.num_tokens + 1) // 2
        return 4 * self.num_tokens * self.num_heads * self.head_dim * keys


@dataclass(frozen=True, slots=True)
class Split:
    """How a launch divides a call; the macros of shape.cuh say what each number means.

    Attributes:
        cluster: blocks of a cluster.
        clusters: clusters of a kv head.
        min_pages: least pages of a block, without a window.
        group: tokens of a block.
        stages: pages of the ring in shared memory.
    """

    cluster: int
    clusters: int
    min_pages: int
    group: int
    stages: int

    @property
    def smem_bytes(self) -> int:
        """Shared memory; `Smem` in shape.cuh is the same sum, and the kernel asserts it."""
        rows = 8 * self.group
        merge = 2 * rows * 132 * 4 + _WARPS * rows * 4 + 2 * rows * 4 + 2 * _WARPS * (512 + 8)
        ring = max(self.stages * _STAGE_BYTES, -(-merge // 1024) * 1024)
        slots = 0
        if self.cluster > 1:
            slots = self.cluster * -(-8 // self.cluster) * self.group
        received = slots * 512 + -(-slots * 8 // 16) * 16
        operands = rows * HEAD_DIM * 2 + 2 * rows * PAGE_TOKENS * 2
        return ring + operands + received + 2 * self.group * 64 + (2 * self.stages + 1) * 8

    @property
    def relative_smem_bytes(self) -> int:
        """With a relative bias; `RelativeSmem` in relative_shape.cuh is the same sum."""
        rel = 8 * self.group * 2 * RELATIVE_STATES
        bank = (PAGE_TOKENS + self.group - 1) * 2 * RELATIVE_STATES
        return -(-self.smem_bytes // 16) * 16 + rel + self.stages * bank


def sink_attention_tactics(target: str, args: CallArgs) -> list[Tactic]:
    """Candidates for a `sink_attention` call, best guess first.

    Args:
        target: e.g. "sm_90a".
        args: of the call, by parameter name.

    Returns:
        An empty list where no kernel of this folder fits: other targets, dtypes other than
        bfloat16, caches that are not made of whole pages of 64 tokens, or rings that cannot hold
        the window and the step.
    """
    call = read_call(args)
    if target not in GPU_TARGETS or call is None:
        return []
    if call.num_tokens > MAX_VERIFY_TOKENS and call.head_dim == HEAD_DIM:
        return [tile_tactic(call)]
    if target != HOPPER or call.head_dim != HEAD_DIM or call.heads_per_kv > MAX_HEADS_PER_KV:
        return [simple_tactic(call)]
    return [fast_tactic(call, split) for split in splits(call)]


def read_call(args: CallArgs) -> Call | None:
    """Shapes of an attention call without its bias, or None where no kernel here can serve it."""
    q, cache, table = args["q"], args["k_cache"], args["page_table"]
    window, scale = args["window"], args["scale"]
    assert isinstance(q, TensorArg)
    assert isinstance(cache, TensorArg)
    assert isinstance(window, int)
    assert isinstance(scale, float)
    num_tokens, num_heads, head_dim = q.shape
    _, rows, num_kv_heads, _ = cache.shape
    is_paged = table is not None
    fits = (
        q.dtype == torch.bfloat16
        and has_layout(head_dim)
        and (rows == PAGE_TOKENS if is_paged else rows % PAGE_TOKENS == 0)
        # The step's rows are in the ring before the oldest key is read.
        and (is_paged or rows >= window - 1 + num_tokens)
    )
    if not fits:
        return None
    heads_per_kv = num_heads // num_kv_heads
    ring_rows = 0 if is_paged else rows
    return Call(num_tokens, num_kv_heads, heads_per_kv, head_dim, window, ring_rows, scale)


def splits(call: Call) -> list[Split]:
    """Ways to divide a call over the GPU that give the same bits, best guess first."""
    width = call.num_tokens
    if call.window:
        pages = (call.window + width - 3) // PAGE_TOKENS + 2
        cluster = 8
        per_block = -(-pages // cluster)
        stages = min(per_block + per_block % 2, 6)
        # A window is little work, so clusters share its tokens, as long as all fit at once.
        parts = max(1, _NUM_CLUSTERS_OF_8 // call.num_kv_heads)
        if call.relative is None:
            parts = min(3, parts)
        groups = sorted({-(-width // count) for count in range(1, parts + 1)})
        candidates = [Split(cluster, 1, 1, group, stages) for group in groups]
    else:
        cluster, clusters = 1, max(1, MULTIPROCESSORS // call.num_kv_heads)
        if call.relative is not None and call.num_kv_heads == 1:
            # More blocks than an exchange through memory alone is good for (measured at 65,536
            # positions: 13.7 us, 16.0 without clusters). One cluster less than fits.
            cluster, clusters = 8, _NUM_CLUSTERS_OF_8 - 1
        candidates = [Split(cluster, clusters, 1, width, stages) for stages in (6, 4)]
    return [split for split in candidates if _smem_bytes(call, split) <= _MAX_SMEM_BYTES]


def _smem_bytes(call: Call, split: Split) -> int:
    return split.smem_bytes if call.relative is None else split.relative_smem_bytes


def fast_tactic(call: Call, split: Split) -> Tactic:
    """The wgmma kernel for a call and a split."""
    slots = call.num_kv_heads * 8 * split.clusters * call.num_tokens
    exchanges = split.clusters > 1
    fill = 0xFF if exchanges else None  # every launch leaves its slots as it finds them
    params: tuple[Param, ...] = (
        *call.inputs,
        Output(),
        Scratch("partials", slots * 512 if exchanges else 16, fill),
        Scratch("partial_sums", slots * 8 if exchanges else 16, fill),
        Scratch("error", 4, 0),
        Float32(call.scale),
    )
    groups = -(-call.num_tokens // split.group)
    relative: Defines = ()
    if call.relative is not None:
        relative = (
            ("ATTN_EXTENT", call.relative.extent),
            ("ATTN_RELATIVE_SMEM_BYTES", split.relative_smem_bytes),
        )
    kernel = KernelLaunch(
        source=_FOLDER / "attention.cu",
        entry=call.entry(),
        defines=(
            ("ATTN_TOKENS", call.num_tokens),
            ("ATTN_GROUP", split.group),
            ("ATTN_KV_HEADS", call.num_kv_heads),
            ("ATTN_HEADS_PER_KV", call.heads_per_kv),
            ("ATTN_WINDOW", call.window),
            ("ATTN_RING_ROWS", call.ring_rows),
            ("ATTN_CLUSTER", split.cluster),
            ("ATTN_CLUSTERS", split.clusters),
            ("ATTN_MIN_PAGES", split.min_pages),
            ("ATTN_STAGES", split.stages),
            ("ATTN_RELATIVE", int(call.relative is not None)),
            ("ATTN_SMEM_BYTES", split.smem_bytes),
            *relative,
        ),
        grid=(split.cluster * split.clusters, call.num_kv_heads, groups),
        block=(_THREADS, 1, 1),
        params=params,
        cluster=split.cluster,
        smem_bytes=_smem_bytes(call, split),
    )
    name = f"wgmma_{split.cluster}x{split.clusters}_group{split.group}_stages{split.stages}"
    return _tactic(name, kernel, call)


def tile_tactic(call: Call) -> Tactic:
    """The kernel for wide steps of head dim 128."""
    heads = 2 if call.heads_per_kv % 2 == 0 else 1
    blocks = -(-call.num_tokens // _TILE_TOKENS) * (call.num_heads // heads)
    kernel = KernelLaunch(
        source=_FOLDER / "attention_tile.cu",
        entry=call.entry("tile_"),
        defines=(
            ("ATTN_CHUNK", call.num_tokens),
            ("ATTN_BLOCK_HEADS", heads),
            ("ATTN_STAGES", _TILE_STAGES),
            ("ATTN_KV_HEADS", call.num_kv_heads),
            ("ATTN_HEADS_PER_KV", call.heads_per_kv),
            ("ATTN_WINDOW", call.window),
            ("ATTN_RING_ROWS", call.ring_rows),
            *_relative_defines(call, ("ATTN_EXTENT", "ATTN_IS_GATED")),
        ),
        grid=(blocks, 1, 1),
        block=(128 * heads, 1, 1),
        params=(*call.inputs, Output(), Scratch("error", 4, 0), Float32(call.scale)),
        # Behind the stages their barriers.
        smem_bytes=_TILE_STAGES * _STAGE_BYTES
        + 1024
        + (0 if call.relative is None else 4 * heads * _TILE_RELATIVE_BYTES),
    )
    return _tactic(f"tile_64x{heads}", kernel, call)


def simple_tactic(call: Call) -> Tactic:
    """The kernel without tensor cores."""
    kernel = KernelLaunch(
        source=_FOLDER / "attention_simple.cu",
        entry=call.entry("simple_"),
        defines=(
            ("ATTN_KV_HEADS", call.num_kv_heads),
            ("ATTN_HEADS_PER_KV", call.heads_per_kv),
            ("ATTN_DIM", call.head_dim),
            ("ATTN_WINDOW", call.window),
            ("ATTN_RING_ROWS", call.ring_rows),
            *_relative_defines(
                call,
                (
                    "ATTN_STATES",
                    "ATTN_EXTENT",
                    "ATTN_FIRST_KEY",
                    "ATTN_HAS_SINKS",
                    "ATTN_IS_GATED",
                ),
            ),
        ),
        grid=(call.num_kv_heads, call.num_tokens, 1),
        block=(128, 1, 1),
        params=(*call.inputs, Output(), Float32(call.scale)),
    )
    return _tactic("simple", kernel, call)


def _relative_defines(call: Call, names: tuple[str, ...]) -> Defines:
    """ATTN_RELATIVE and the named macros; none for `sink_attention`."""
    if call.relative is None:
        return ()
    relative = call.relative
    values = {
        "ATTN_STATES": relative.states,
        "ATTN_EXTENT": relative.extent,
        "ATTN_FIRST_KEY": relative.first_key,
        "ATTN_HAS_SINKS": int(relative.has_sinks),
        "ATTN_IS_GATED": int(relative.is_gated),
    }
    return (("ATTN_RELATIVE", 1), *((name, values[name]) for name in names))


def _tactic(name: str, kernel: KernelLaunch, call: Call) -> Tactic:
    packings = () if call.relative is None else (BANK_BY_DISTANCE,)
    return Tactic(name, (kernel,), call.bytes, call.flops, packings)
