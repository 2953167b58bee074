"""The tiled w4a16 kernels without a GPU: their resources, weights that all widths share, errors."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from cubin import resources

from inkrt.builder.compile import compile_cubin
from inkrt.errors import BuildError
from inkrt.plugins.tactic import InputPointer, KernelLaunch, Pointer, Tactic
from inkrt.plugins.w4a16 import parts, tactics
from inkrt.plugins.w4a16.shapes import MAX_SMEM, Dims

FLINT = Dims()
ROUTER = (
    "x", "delta", "norm_weight", "router_weight", "residual", "z", "logits", "shared_hidden",
    "shared_gate_up_codes", "shared_gate_up_scales", "shared_gate_up_scale",
)  # fmt: skip


def all_tactics(dims: Dims, num_tokens: int, ring: int) -> Iterator[Tactic]:
    """A tactic of every operator, of a ring and of pages."""
    yield tactics.qkv(dims, num_tokens, eps=1e-6, rope_theta=1e4, ring_rows=ring)
    yield tactics.qkv(dims, num_tokens, eps=1e-6, rope_theta=None, ring_rows=0)
    yield tactics.linear(dims, num_tokens, rows=dims.hidden, width=4096)
    yield tactics.dense_mlp(dims, num_tokens, eps=1e-6)
    names = {name: Pointer(name) for name in ROUTER}
    yield parts.router(dims, num_tokens, eps=1e-6, has_delta=True, names=names)
    names = {name: Pointer(name) for name in ("z", "logits", "shared_hidden")}
    yield parts.experts(dims, num_tokens, names=names)


def kernels() -> list[KernelLaunch]:
    """Every kernel of Flint's steps of 512 and of 9 tokens, in both dtypes."""
    found = {}
    for bf16 in (False, True):
        for num_tokens in (512, 9):
            for tactic in all_tactics(replace(FLINT, bf16=bf16), num_tokens, 1024):
                found |= {(k.source, k.defines): k for k in tactic.kernels}
    return list(found.values())


def test_kernels_compile_without_spills() -> None:
    pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")
    for kernel in kernels():
        used = resources(compile_cubin(kernel.source, kernel.defines, "sm_90a"))
        assert used["stack"] == 0, kernel
        # Two blocks fit a multiprocessor, if their shared memory does.
        assert used["registers"] * kernel.block[0] <= 32768, kernel
        assert kernel.smem_bytes <= MAX_SMEM


@pytest.mark.parametrize("bf16", [False, True])
def test_all_widths_read_the_same_packings(bf16: bool) -> None:
    dims = replace(FLINT, bf16=bf16)
    narrow, wide = all_tactics(dims, 8, 576), all_tactics(dims, 512, 1024)
    for one, other in zip(narrow, wide, strict=True):
        assert [(p.arguments, p.name) for p in one.packings] == [
            (p.arguments, p.name) for p in other.packings
        ]
        assert one.bytes < other.bytes
        assert other.flops == 64 * one.flops


def test_every_wide_kernel_knows_how_many_rows_are_real() -> None:
    for tactic in all_tactics(FLINT, 9, 576):
        for kernel in tactic.kernels:
            counts = {InputPointer("num_tokens"), Pointer("num_tokens")} & {*kernel.params}
            # The experts' items are of real rows only.
            items = {param for param in kernel.params if getattr(param, "name", "") == "items"}
            assert counts or items, kernel.entry


@pytest.mark.parametrize(("num_tokens", "experts"), [(9, 256), (512, 256), (2048, 256), (40, 8)])
def test_items_hold_every_choice(num_tokens: int, experts: int) -> None:
    """As many as the worst choice has: one pair more than a whole number of items an expert."""
    tactic = parts.experts(
        replace(FLINT, experts=experts), num_tokens, names={n: Pointer(n) for n in ROUTER}
    )
    _, route, gate_up, down, _ = tactic.kernels
    defines = dict(route.defines)
    most, size = int(defines["ITEMS"]), int(defines["ITEM_PAIRS"])
    assert size == 8 * int(dict(gate_up.defines)["TOKEN_TILES"])
    pairs = num_tokens * FLINT.top_k
    used = min(experts, pairs)  # a pair each; the others fill whole items
    assert used + (pairs - used) // size <= most <= pairs
    assert gate_up.grid[0] == most * 1024 // 128
    assert down.grid[0] == most * 2048 // 128


def test_sizes_that_no_tile_takes() -> None:
    with pytest.raises(BuildError, match="ring_rows=576, expected at least T=600"):
        tactics.qkv(FLINT, 600, eps=1e-6, rope_theta=1e4, ring_rows=576)
    with pytest.raises(BuildError, match="hidden=2304, expected a multiple of 256 up to 2048"):
        tactics.qkv(Dims(hidden=2304), 600, eps=1e-6, rope_theta=None, ring_rows=0)
    with pytest.raises(BuildError, match="width=384, expected a multiple of 256 up to 8192"):
        tactics.linear(FLINT, 9, rows=64, width=384)
    names = {name: Pointer(name) for name in ROUTER}
    with pytest.raises(BuildError, match="experts=260, expected a multiple of 8 up to 256"):
        parts.router(Dims(experts=260), 9, eps=1e-6, has_delta=True, names=names)
    with pytest.raises(BuildError, match="top_k=9, expected 1 to 8"):
        parts.experts(Dims(top_k=9), 9, names=names)
    with pytest.raises(BuildError, match="width=384, expected a multiple of 256 up to 512"):
        parts.experts(Dims(width=384), 9, names=names)
    with pytest.raises(BuildError, match="36 results a token, expected x8"):
        tactics.linear(FLINT, 9, rows=36, width=512)
