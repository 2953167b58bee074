"""Tactics of `moe`: what compiles, what fits beside what, what is refused."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC through cuda.bindings is not installed")

from cubin import resources

from inkrt.builder.compile import compile_cubin
from inkrt.errors import BuildError
from inkrt.plugins.moe.packing import Format
from inkrt.plugins.moe.sizes import MoeDims
from inkrt.plugins.moe.tactics import moe
from inkrt.plugins.moe.variants import (
    REGISTERS_BESIDE,
    REGISTERS_NARROW,
    ROUTER_REGISTERS,
    SM_BYTES,
    variants,
)
from inkrt.plugins.tactic import KernelLaunch, Scratch, Tactic
from inkrt.plugins.w4a16.shapes import MAX_SMEM

# A rank of four: a slice of every expert, or whole ones; and a rank of eight.
SLICE = MoeDims(hidden=4608, width=576, experts=384, own_experts=384, top_k=8, kind="nvfp4")
WHOLE = replace(SLICE, width=2304, own_experts=96)
NARROW = replace(SLICE, width=288)
MINI = MoeDims(hidden=2304, width=1152, experts=128, own_experts=128, top_k=8, kind="nvfp4")
NANO = MoeDims(hidden=256, width=64, experts=8, own_experts=8, top_k=2, kind="bf16")
FORMATS: tuple[Format, ...] = ("nvfp4", "mxfp8", "bf16")


def all_tactics(dims: MoeDims, num_tokens: int) -> list[Tactic]:
    has_rank = dims.own_experts < dims.experts
    return [
        moe(
            dims, num_tokens, route_scale=8.0, gate_cap=4.0, up_cap=25.0,
            is_partial=dims is not NANO, has_rank=has_rank, variant=variant,
        )
        for variant in variants(dims, num_tokens)
    ]  # fmt: skip


def tactic(dims: MoeDims, num_tokens: int) -> Tactic:
    return all_tactics(dims, num_tokens)[0]


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 2, 8])
@pytest.mark.parametrize(
    "dims",
    [
        *(replace(dims, kind=kind) for dims in (SLICE, WHOLE) for kind in FORMATS),
        NARROW,
        NANO,
        MINI,
    ],
    ids=lambda dims: f"{dims.kind}_{dims.width}",
)
def test_nothing_spills(dims: MoeDims, num_tokens: int) -> None:
    tactics = all_tactics(dims, num_tokens)
    for kernel in [tactics[0].kernels[0], *(tactic.kernels[-1] for tactic in tactics)]:
        found = resources(compile_cubin(kernel.source, kernel.defines, "sm_90a"))
        assert found["stack"] == 0
        threads = kernel.block[0]
        assert found["registers"] * threads <= 65536


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_they_compile_for_blackwell(num_tokens: int) -> None:
    tactics = all_tactics(NANO, num_tokens)
    for kernel in [tactics[0].kernels[0], *(tactic.kernels[-1] for tactic in tactics)]:
        assert resources(compile_cubin(kernel.source, kernel.defines, "sm_100a"))["registers"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 8, 9])
def test_nothing_of_the_own_launch_is_touched_before_the_wait(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend("tests/builder")
    from ptx import compile_ptx, touched_before_wait

    tactics = all_tactics(NANO, num_tokens)
    for kernel in [tactics[0].kernels[0], *(tactic.kernels[1] for tactic in tactics)]:
        own = {
            number
            for number, param in enumerate(kernel.params)
            if isinstance(param, Scratch) and param.name != "error"
        }
        early = touched_before_wait(compile_ptx(kernel.source, kernel.defines), kernel.entry)
        assert own
        assert not early & own
        # Weights are: of the router, and the biases that every block of the experts adds.
        assert early


@pytest.mark.parametrize("num_tokens", range(1, 9))
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dims", [SLICE, WHOLE, NARROW, replace(SLICE, width=1152)])
def test_all_widths_fit_and_blocks_are_resident_at_once(
    dims: MoeDims, kind: Format, num_tokens: int
) -> None:
    for tactic in all_tactics(replace(dims, kind=kind), num_tokens):
        router, experts = tactic.kernels
        assert experts.grid[0] == 132
        assert experts.smem_bytes <= MAX_SMEM
        assert router.grid[0] * 3 >= dims.experts
        # What a block has on its way: about twice what the latency of the memory asks for.
        assert in_flight(experts) > 60_000


def file_registers(threads: int, registers: int) -> int:
    """Most of what a block takes in one of the four register files of a multiprocessor.

    Each has 16,384, its warps get eight registers a lane at a time, and a block's warps go round.
    """
    return -(-threads // 128) * -(-registers // 8) * 8 * 32


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dims", [SLICE, WHOLE, NARROW, replace(SLICE, width=1152)])
def test_one_tokens_blocks_fit_beside_each_other(dims: MoeDims, kind: Format) -> None:
    found = [way for way in all_tactics(replace(dims, kind=kind), 1) if "beside" in way.name]
    assert found
    for router, experts in (way.kernels for way in found):
        assert router.smem_bytes + experts.smem_bytes + 2048 <= SM_BYTES == 233_472
        taken = file_registers(router.block[0], ROUTER_REGISTERS)
        assert taken + file_registers(experts.block[0], REGISTERS_BESIDE) <= 16384


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8"])
def test_compiled_blocks_fit_beside_each_other(kind: Format) -> None:
    for way in all_tactics(replace(SLICE, kind=kind), 1):
        taken = 0
        for kernel in way.kernels:
            found = resources(compile_cubin(kernel.source, kernel.defines, "sm_90a"))
            taken += file_registers(kernel.block[0], found["registers"])
        assert taken <= 16384 or "beside" not in way.name


@pytest.mark.parametrize("num_tokens", [2, 3, 4])
def test_narrow_experts_have_three_stages(num_tokens: int) -> None:
    first, second, *_ = all_tactics(SLICE, num_tokens)
    assert (first.name, second.name) == ("moe_narrow_words_rows", "moe_words_rows")
    router, experts = first.kernels
    assert router.block[0] == 192
    assert dict(experts.defines)["STAGES"] == 3
    assert dict(experts.defines)["REGISTERS"] == REGISTERS_NARROW
    assert "narrow" not in all_tactics(SLICE, 5)[0].name


def in_flight(kernel: KernelLaunch) -> int:
    defines: dict[str, Any] = dict(kernel.defines)
    vector = (576, 2048, 1056)[defines["FORMAT"]]
    return int(defines["WARPS"] * defines["STAGES"] * defines["STAGE_VECTORS"] * vector)


def test_the_first_tactic_is_the_one_with_which_steps_took_least() -> None:
    names = {n: [way.name for way in all_tactics(SLICE, n)] for n in (1, 4, 8, 9)}
    assert names[1] == ["moe_beside_words", "moe_beside", "moe_words", "moe"]
    of_several = ["moe_words_rows", "moe_words", "moe"]
    assert names[4] == ["moe_narrow_words_rows", *of_several]
    assert names[8] == names[9] == of_several
    # Of eight tokens Inkling-2-Mini has more activations than shared memory.
    assert [way.name for way in all_tactics(MINI, 4)][:2] == [
        "moe_narrow_words_rows",
        "moe_words_rows",
    ]
    assert [way.name for way in all_tactics(MINI, 8)] == ["moe_rows"]


def test_bytes_are_those_of_the_experts_that_are_read() -> None:
    dims = replace(SLICE, kind="nvfp4")
    assert dims.expert_bytes == 17_915_904 // 4
    assert replace(dims, kind="mxfp8").expert_bytes == 32_845_824 // 4
    assert dims.distinct(1) == pytest.approx(8)
    assert dims.distinct(8) == pytest.approx(59.5, abs=0.1)
    assert WHOLE.distinct(8) == pytest.approx(59.5 / 4, abs=0.1)
    # 288 columns are padded to 320.
    assert NARROW.expert_bytes == (72 * 36 + 288 * 5) * 576


def test_a_chunk_is_a_launch_for_every_eight_tokens() -> None:
    kernels = tactic(SLICE, 37).kernels
    assert len(kernels) == 1 + 5
    assert [kernel.params[-1].value for kernel in kernels[1:]] == [0, 8, 16, 24, 32]  # type: ignore[union-attr]
    assert len({kernel.defines for kernel in kernels[1:]}) == 1
    assert kernels[0].grid[0] == 128 * 5


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (replace(NANO, hidden=96), "moe: hidden size 96, expected a multiple of 64 up to 4608"),
        (replace(NANO, hidden=4672), "moe: hidden size 4672, expected a multiple of 64"),
        (
            replace(NANO, width=20),
            "moe: 20 units of an expert on a rank, expected a multiple of 16",
        ),
        (replace(NANO, width=48, kind="mxfp8"), "moe: 48 units .* a multiple of 32"),
        (replace(NANO, experts=520), "moe: 520 experts, expected at most 512"),
        (replace(NANO, top_k=9), "moe: top_k=9, expected at most 8"),
    ],
)
def test_other_sizes_are_refused(dims: MoeDims, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        tactic(dims, 1)
