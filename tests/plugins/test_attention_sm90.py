"""Attention kernels of sm_90a without a GPU: cache layout, tactics, compilation, spills."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cubin import resources

from inkrt.builder.compile import compile_cubin
from inkrt.plugins import kv_layout
from inkrt.plugins.attention_sm90 import tactics
from inkrt.plugins.attention_sm90.bank import BANK_BY_DISTANCE, Relative
from inkrt.plugins.attention_sm90.relative import relative_attention_tactics
from inkrt.plugins.attention_sm90.tactics import (
    Call,
    Split,
    fast_tactic,
    sink_attention_tactics,
)
from inkrt.plugins.state import locate
from inkrt.plugins.tactic import CallArgs, KernelLaunch, Pointer, Scratch, Tactic, TensorArg

sys.path.append(str(Path(__file__).parents[1] / "builder"))

HEAD_DIMS = (16, 32, 48, 64, 128, 256)
FULL = Call(8, 4, 8, 128, 0, 0, 128**-0.5)
SLIDING = replace(FULL, window=513, ring_rows=576)


# ---- layout


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_value_of_a_tile_has_its_own_place(head_dim: int) -> None:
    assert kv_layout.has_layout(head_dim)
    order = kv_layout.tile_order(head_dim)
    assert order.flatten().sort().values.tolist() == list(range(64 * head_dim))
    assert kv_layout.tile_bytes(head_dim) == 2 * order.numel()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_eight_dims_are_sixteen_aligned_bytes(head_dim: int) -> None:
    chunks = kv_layout.tile_order(head_dim).view(64, head_dim // 8, 8)
    assert (chunks[..., 0] % 8 == 0).all()
    assert torch.equal(chunks - chunks[..., :1], torch.arange(8).expand_as(chunks))


def test_swizzle_of_head_dim_128() -> None:
    """The rule as it was given: [half][token][64 dims], chunk c at c ^ (token & 7)."""
    for token, dim in itertools.product(range(64), range(128)):
        half, chunk = dim // 64, dim % 64 // 8
        expected = half * 8192 + token * 128 + (chunk ^ (token & 7)) * 16 + dim % 8 * 2
        assert kv_layout.byte_in_tile(token, dim, 128) == expected


def test_short_rows_are_not_swizzled() -> None:
    for token, dim in itertools.product(range(64), range(32)):
        assert kv_layout.byte_in_tile(token, dim, 32) == token * 64 + dim * 2


@pytest.mark.parametrize("head_dim", [7, 8, 72, 96, 100])
def test_other_head_dims_have_no_layout(head_dim: int) -> None:
    assert not kv_layout.has_layout(head_dim)


@pytest.mark.parametrize("head_dim", [32, 128])
def test_pack_puts_every_value_where_the_formula_says(head_dim: int) -> None:
    """A ring of two pages per slot: a position's row and its wrap, against `state.locate`."""
    ring_rows, num_kv_heads = 128, 2
    size = (3, ring_rows, num_kv_heads, head_dim)
    cache = torch.arange(torch.Size(size).numel()).view(size).to(torch.int16)
    flat = kv_layout.pack(cache).flatten()
    for position, slot in ((0, 0), (63, 1), (64, 2), (127, 0), (128, 1), (1000, 2)):
        where = locate(cache, torch.tensor([position]), torch.tensor([slot]), None)
        page = kv_layout.ring_page(position, slot, ring_rows)
        for head, dim in itertools.product(range(num_kv_heads), (0, 9, head_dim - 1)):
            byte = kv_layout.byte_in_buffer(page, head, position % 64, dim, num_kv_heads, head_dim)
            assert flat[byte // 2] == cache[where][0, head, dim]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_unpack_inverts_pack(head_dim: int) -> None:
    cache = torch.randn(2, 192, 3, head_dim).bfloat16()
    assert torch.equal(kv_layout.unpack(kv_layout.pack(cache), 192, head_dim), cache)


def test_ring_pages_repeat_after_the_ring_and_differ_between_slots() -> None:
    ring_rows = 576
    pages = [kv_layout.ring_page(p, 0, ring_rows) for p in range(ring_rows)]
    assert pages == [p // 64 for p in range(ring_rows)]
    assert kv_layout.ring_page(ring_rows + 70, 0, ring_rows) == pages[70]
    assert kv_layout.ring_page(0, 1, ring_rows) == pages[-1] + 1


# ---- tactics


def call_args(call: Call, **changes: TensorArg | int | None) -> CallArgs:
    """Arguments of a `sink_attention` call."""
    rows = call.ring_rows or 64
    cache = TensorArg((40, rows, call.num_kv_heads, call.head_dim), torch.bfloat16)
    q = TensorArg((call.num_tokens, call.num_heads, call.head_dim), torch.bfloat16)
    table = None if call.ring_rows else TensorArg((99,), torch.int32)
    args: CallArgs = {"q": q, "k_cache": cache, "v_cache": cache, "page_table": table}
    return args | {"window": call.window, "scale": call.scale} | changes


def find(call: Call, **changes: TensorArg | int | None) -> list[Tactic]:
    return sink_attention_tactics("sm_90a", call_args(call, **changes))


@pytest.mark.parametrize("call", [FULL, SLIDING, replace(FULL, num_kv_heads=1)])
def test_how_keys_are_split_does_not_depend_on_the_step(call: Call) -> None:
    """Else a token's bits would depend on T."""
    splits = [s for t in range(1, 9) for s in tactics.splits(replace(call, num_tokens=t))]
    assert len({(s.cluster, s.clusters, s.min_pages) for s in splits}) == 1


@pytest.mark.parametrize("call", [FULL, SLIDING])
@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_every_token_of_a_step_has_a_block(call: Call, num_tokens: int) -> None:
    for tactic in find(replace(call, num_tokens=num_tokens)):
        (kernel,) = tactic.kernels
        group = dict(kernel.defines)["ATTN_GROUP"]
        assert isinstance(group, int)
        assert (kernel.grid[2] - 1) * group < num_tokens <= kernel.grid[2] * group
        assert kernel.grid[0] % kernel.cluster == 0


def test_blocks_that_exchange_through_memory_fit_on_the_gpu() -> None:
    for num_kv_heads in (1, 2, 3, 4, 8):
        for tactic in find(replace(FULL, num_kv_heads=num_kv_heads)):
            (kernel,) = tactic.kernels
            assert kernel.grid[0] * kernel.grid[1] * kernel.grid[2] <= 132


def test_a_dim_that_wgmma_does_not_take_gets_the_simple_kernel() -> None:
    assert [t.name for t in find(replace(FULL, head_dim=64))] == ["simple"]
    assert [t.name for t in find(replace(FULL, heads_per_kv=16))] == ["simple"]


def test_calls_without_a_kernel() -> None:
    assert sink_attention_tactics("sm_80", call_args(FULL)) == []
    (other_gpu,) = sink_attention_tactics("sm_100a", call_args(FULL))
    assert other_gpu.name == "simple"
    assert find(replace(FULL, head_dim=10)) == []
    assert find(replace(SLIDING, ring_rows=512)) == []  # cannot hold the window and eight rows
    assert find(replace(SLIDING, ring_rows=580)) == []  # not made of pages
    assert find(replace(SLIDING, num_tokens=128)) == []  # the ring has no room for the step
    pages_of_16 = TensorArg((40, 16, 4, 128), torch.bfloat16)
    assert find(FULL, k_cache=pages_of_16) == []
    assert find(FULL, q=TensorArg((8, 32, 128), torch.float32)) == []


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_wide_steps_get_the_tiled_kernel(target: str) -> None:
    wide = replace(SLIDING, num_tokens=100, ring_rows=640)
    for call, heads in ((wide, 2), (replace(wide, heads_per_kv=3), 1)):
        (tactic,) = sink_attention_tactics(target, call_args(call))
        (kernel,) = tactic.kernels
        assert kernel.entry == "tile_sink_attention"
        assert kernel.grid == (2 * call.num_heads // heads, 1, 1)  # two blocks of 64 tokens
        assert kernel.block == (128 * heads, 1, 1)
    (other,) = sink_attention_tactics(target, call_args(replace(wide, head_dim=64)))
    assert other.name == "simple"


INKLING = Call(8, 8, 6, 128, 0, 0, 128**-0.5, Relative(16, 1024))
INKLING_RING = replace(INKLING, window=1024, ring_rows=1536)
NANO = Call(1, 2, 2, 32, 0, 0, 32**-0.5, Relative(8, 128))
NANO_RING = replace(NANO, window=64, ring_rows=576, relative=Relative(8, 64))


def find_relative(
    call: Call, target: str = "sm_90a", **changes: TensorArg | int | None
) -> list[Tactic]:
    relative = call.relative
    assert relative is not None
    rows = (call.num_tokens, call.num_heads)
    args = call_args(call) | {
        "rel": TensorArg((*rows, relative.states), torch.bfloat16),
        "bank": TensorArg((relative.states, relative.extent), torch.bfloat16),
        "sinks": TensorArg(rows, torch.bfloat16),
        "gate": TensorArg((call.num_tokens, call.num_heads * call.head_dim), torch.bfloat16),
        "num_tokens": TensorArg((1,), torch.int32),
    }
    return relative_attention_tactics(target, args | changes)


@pytest.mark.parametrize("call", [INKLING, INKLING_RING])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_relative_splits_do_not_depend_on_the_step(call: Call, num_kv_heads: int) -> None:
    of_rank = replace(call, num_kv_heads=num_kv_heads)
    found = [
        kernel
        for t in range(1, 9)
        for tactic in find_relative(replace(of_rank, num_tokens=t))
        for kernel in tactic.kernels
    ]
    entry = "window_relative_attention" if call.window else "relative_attention"
    assert {kernel.entry for kernel in found} == {entry}
    names = ("ATTN_CLUSTER", "ATTN_CLUSTERS", "ATTN_MIN_PAGES")  # the other's blocks are constant
    assert len({tuple(dict(kernel.defines).get(name) for name in names) for kernel in found}) == 1
    for kernel in found:
        assert kernel.smem_bytes <= 232_448
        slots = [p for p in kernel.params if isinstance(p, Scratch) and p.name == "partials"]
        if slots and slots[0].num_bytes > 16:
            assert kernel.grid[0] * kernel.grid[1] * kernel.grid[2] <= 132


def test_relative_calls_and_their_kernels() -> None:
    def names(call: Call, target: str = "sm_90a", **changes: TensorArg | int | None) -> list[str]:
        return [tactic.name for tactic in find_relative(call, target, **changes)]

    assert names(replace(INKLING, num_kv_heads=1)) == ["wgmma_8x14_group8_stages4"]
    assert names(replace(INKLING, num_tokens=9)) == ["tile_64x2"]
    assert names(INKLING, "sm_100a") == ["simple"]
    assert names(replace(INKLING, num_tokens=9), "sm_100a") == ["tile_64x2"]
    assert names(INKLING, gate=None) == ["simple"]
    assert names(replace(INKLING, num_tokens=9), gate=None) == ["tile_64x2"]
    assert names(INKLING, sinks=None) == ["simple"]
    assert names(INKLING, first_key=3) == ["simple"]
    assert names(NANO) == ["simple"]
    assert names(replace(NANO, num_tokens=512)) == ["simple"]
    # The ring holds the window and a chunk of 512 exactly, or it has no kernel.
    assert names(replace(INKLING_RING, num_tokens=513)) == ["tile_64x2"]
    assert names(replace(INKLING_RING, num_tokens=514)) == []
    assert names(INKLING, num_tokens=None) == []
    assert names(INKLING, "sm_80") == []


def test_relative_bytes() -> None:
    (first, *_) = find_relative(replace(INKLING_RING, num_tokens=1))
    kv, rows, own = 2 * 1024 * 8 * 128, 2 * 48 * 128, 48 * (16 + 1 + 128)
    assert first.bytes == 2 * (kv + rows + own + 16 * 1024)


def test_the_bank_is_packed_by_distance() -> None:
    bank = torch.randn(16, 1024).bfloat16()
    packed = BANK_BY_DISTANCE.pack(bank)
    shapes = [TensorArg((16, 1024), torch.bfloat16)]
    assert packed.dtype == torch.uint8
    assert packed.shape == (BANK_BY_DISTANCE.num_bytes(shapes),)
    by_distance = packed.view(torch.bfloat16).view(1024, 16)
    assert torch.equal(by_distance[1000], bank[:, 1000])
    assert torch.equal(by_distance.T, bank)
    assert all(t.packings == (BANK_BY_DISTANCE,) for t in find_relative(INKLING))


# ---- compilation


def wide_ring() -> Call:
    """A ring with room for 512 tokens."""
    return replace(SLIDING, ring_rows=1024)


def relative_kernels() -> list[KernelLaunch]:
    """Of slices of Inkling-2 and of the small checkpoint: the first choice of each."""
    found = []
    for num_kv_heads in (8, 4, 2, 1):
        for call in (INKLING, INKLING_RING):
            of_rank = replace(call, num_kv_heads=num_kv_heads)
            widths = (1, 8, 512) if num_kv_heads <= 2 else (8,)
            found += [find_relative(replace(of_rank, num_tokens=t))[0] for t in widths]
    found += [find_relative(replace(call, num_tokens=t))[0] for call in (NANO, NANO_RING)
              for t in (1, 512)]  # fmt: skip
    return [tactic.kernels[0] for tactic in found]


def kernels() -> list[KernelLaunch]:
    """The first choice of narrow, odd and wide steps, other forms, and the simple kernel."""
    calls = [replace(c, num_tokens=t) for c in (FULL, SLIDING) for t in (1, 3, 8)]
    calls += [replace(FULL, head_dim=32), replace(SLIDING, head_dim=64, heads_per_kv=4)]
    found = [find(call)[0].kernels[0] for call in calls]
    found += [find(replace(call, num_tokens=512))[0].kernels[0] for call in (FULL, wide_ring())]
    found += [find(replace(FULL, num_tokens=9, heads_per_kv=3))[0].kernels[0]]
    return [*found, fast_tactic(SLIDING, Split(8, 1, 1, 8, 2)).kernels[0], *relative_kernels()]


@pytest.mark.parametrize(
    "call",
    [
        *(replace(INKLING_RING, num_kv_heads=count) for count in (2, 4)),
        replace(INKLING, num_tokens=100),
        NANO,
    ],
)
def test_relative_kernels_read_weights_and_older_keys_before_the_wait(call: Call) -> None:
    """Without a window the wait is in a loop, which branches alone do not tell."""
    pytest.importorskip(
        "cuda.bindings.nvrtc", reason="NVRTC through cuda.bindings is not installed"
    )
    from ptx import compile_ptx, touched_before_wait

    (kernel, *_) = find_relative(call)[0].kernels
    names = [
        param.argument
        if isinstance(param, Pointer)
        else getattr(param, "name", type(param).__name__)
        for param in kernel.params
    ]
    early = touched_before_wait(compile_ptx(kernel.source, kernel.defines), kernel.entry)
    allowed = {"position", "num_tokens", "slot", "bank", "k_cache", "v_cache", "error"}
    assert {names[number] for number in early} <= allowed
    is_fast = kernel.entry in ("relative_attention", "window_relative_attention")
    assert ("bank" in {names[number] for number in early}) == is_fast


@pytest.mark.parametrize("kernel", kernels(), ids=lambda k: f"{k.entry}-{k.grid}-{k.smem_bytes}")
def test_kernels_compile_without_spills(kernel: KernelLaunch) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")
    cubin = compile_cubin(kernel.source, kernel.defines, "sm_90a")
    assert kernel.entry.encode() in cubin
    used = resources(cubin)
    assert used["stack"] == 0
    assert used["registers"] * kernel.block[0] <= 65536
