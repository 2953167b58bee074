"""The stream of row tiles without a GPU: which calls it takes, its sizes, code without spills."""

from dataclasses import replace

import pytest
import torch
from cubin import resources

from inkrt.builder.compile import compile_cubin
from inkrt.builder.tactics import find_tactics
from inkrt.errors import BuildError
from inkrt.plugins.tactic import (
    BLACKWELL,
    HOPPER,
    CallArgs,
    KernelLaunch,
    Tactic,
    TensorArg,
    tensor_list_arg,
)
from inkrt.plugins.w4a16.packing import (
    bf16_num_bytes,
    bf16_packing,
    pack_bf16,
    padded_width,
    unpack_bf16,
)
from inkrt.plugins.w4a16.ring_tactics import rings
from inkrt.plugins.w4a16.shapes import LARGE_BLOCK, MAX_SMEM

BF16 = torch.bfloat16
RANKS = (1, 2, 4, 8)


def arg(*shape: int) -> TensorArg:
    return TensorArg(shape, BF16)


def group(num_tokens: int, tp: int, *, is_full: bool) -> CallArgs:
    """The input projections of a layer of Inkling-2-Small on one rank."""
    rows = [6144 // tp, 768 // tp, 1024 // tp, 1024 // tp, 48 // tp, 6144 // tp]
    input_of = [0, 0, 1, 2, 0, 0] if is_full else [0] * 6
    if is_full:
        rows[4:4], input_of[4:4] = [32 // tp] * 2, [1, 2]
    return {
        "xs": [arg(num_tokens, 4608)] * (max(input_of) + 1),
        "weights": [arg(n, 4608) for n in rows],
        "input_of": input_of,
    }


def linear(num_tokens: int, rows: int, width: int, *, partial: bool = False) -> CallArgs:
    return {"x": arg(num_tokens, width), "weight": arg(rows, width), "partial": partial}


def head(num_tokens: int, vocab: int, width: int, **others: object) -> CallArgs:
    args: CallArgs = {
        "x": arg(num_tokens, width), "weight": arg(vocab, width), "scales": None,
        "vocab_size": vocab, "cap": 30.0, "logits_dtype": BF16, "tp_size": 1, "last_row": False,
    }  # fmt: skip
    return args | others  # type: ignore[return-value]


def all_calls(num_tokens: int) -> list[tuple[str, CallArgs]]:
    """Calls of Inkling-2-Small and of inkling2-nano."""
    return [
        *(
            ("linear_group", group(num_tokens, tp, is_full=is_full))
            for tp in RANKS
            for is_full in (False, True)
        ),
        *(("linear", linear(num_tokens, 4608, 6144 // tp, partial=tp > 1)) for tp in RANKS),
        ("linear", linear(num_tokens, 256, 128)),
        ("linear", linear(num_tokens, 256, 64, partial=True)),
        ("linear", linear(num_tokens, 200058, 4608)),
        *(
            ("lm_head_sample", head(num_tokens, vocab, width))
            for vocab, width in ((200058, 4608), (4111, 256))
            if num_tokens <= 8
        ),
    ]


def kernels(num_tokens: int) -> list[KernelLaunch]:
    found = {}
    for name, args in all_calls(num_tokens):
        for tactic in find_tactics(name, HOPPER, args):
            found |= {(k.source, k.defines): k for k in tactic.kernels}
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 8, 512])
def test_kernels_compile_without_spills(num_tokens: int) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")
    for kernel in kernels(num_tokens):
        used = resources(compile_cubin(kernel.source, kernel.defines, HOPPER))
        assert used["stack"] == 0, kernel
        assert used["registers"] * kernel.block[0] <= 49152, kernel
        assert kernel.smem_bytes <= MAX_SMEM


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL])
def test_one_compiles_for_each_target(target: str) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")
    args = {**group(2, 8, is_full=True)}
    kernel = find_tactics("linear_group", target, args)[0].kernels[0]
    assert resources(compile_cubin(kernel.source, kernel.defines, target))["stack"] == 0


@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize("is_full", [False, True])
def test_a_group_is_one_launch_of_all_rows(tp: int, is_full: bool) -> None:
    args = group(1, tp, is_full=is_full)
    tactics = find_tactics("linear_group", HOPPER, args)
    rows = (15152 + 64 * is_full) // tp
    tiles = sum(-(-weight.shape[0] // 16) for weight in tensor_list_arg(args, "weights"))
    for tactic in tactics:
        (kernel,) = tactic.kernels
        assert kernel.grid[0] == min(132, tiles)
        assert tactic.bytes == 2 * rows * 4608 + 2 * 4608 * (3 if is_full else 1) + 2 * rows
        assert LARGE_BLOCK <= kernel.smem_bytes < MAX_SMEM - 16 * 1024
    # A tile is three stages of 48 KB.
    macros = [dict(tactic.kernels[0].defines) for tactic in tactics]
    expected = [3, 2] if tp == 8 else [4, 3, 2]
    assert [macro["STAGES"] for macro in macros] == expected


def test_matrices_of_one_input_stand_side_by_side() -> None:
    kernel = find_tactics("linear_group", HOPPER, group(1, 1, is_full=True))[0].kernels[0]
    defines = dict(kernel.defines)
    assert defines["INPUT_OF"] == "0,0,0,0,1,1,2,2"
    assert defines["ROWS"] == "6144,768,48,6144,1024,32,1024,32"
    weights = [param.index for param in kernel.params[:8]]  # type: ignore[union-attr]
    outputs = [param.index for param in kernel.params[12:20]]  # type: ignore[union-attr]
    assert weights == outputs == [0, 1, 6, 7, 2, 4, 3, 5]


def test_a_short_list_of_tiles_has_a_short_ring() -> None:
    assert [ring.stages for ring in rings(4608, 948)] == [4, 3, 2]
    assert [ring.stages for ring in rings(4608, 132)] == [3, 2]
    assert [ring.stages for ring in rings(6144, 288)] == [3, 2, 1]
    assert [ring.stages for ring in rings(256, 16)] == [1]


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 512])
def test_all_widths_read_the_same_packings(num_tokens: int) -> None:
    for name, args in all_calls(num_tokens):
        for tactic in find_tactics(name, HOPPER, args):
            assert [packing.name for packing in tactic.packings] == ["bf16_chunks_plain"], name


def names(tactics: list[Tactic]) -> list[str]:
    return [tactic.name for tactic in tactics]


def test_calls_of_flint_keep_their_kernels() -> None:
    assert names(find_tactics("linear", HOPPER, linear(1, 2048, 4096))) == ["w4a16_linear"]
    assert names(find_tactics("linear", HOPPER, linear(512, 2048, 4096))) == ["w4a16_tile_linear"]
    flint = head(1, 150144, 2048, cap=0.0, logits_dtype=torch.float32)
    assert names(find_tactics("lm_head_sample", HOPPER, flint)) == ["w4a16_lm_head_1"]
    # More tiles than multiprocessors.
    assert names(find_tactics("linear", HOPPER, linear(1, 2128, 4096)))[0].startswith("ring_")


def test_sizes_that_no_kernel_takes() -> None:
    for num_tokens in (1, 9):
        with pytest.raises(BuildError, match="width=60, expected a multiple of 8 up to 8192"):
            find_tactics("linear", HOPPER, linear(num_tokens, 64, 60))
        with pytest.raises(BuildError, match="width=8448, expected a multiple of 8 up to 8192"):
            find_tactics("linear", HOPPER, linear(num_tokens, 4608, 8448))
    with pytest.raises(BuildError, match="width=4352 are 68 vectors of 64, 17 for each of 4 warps"):
        find_tactics("linear", HOPPER, linear(1, 4608, 4352))
    with pytest.raises(BuildError, match="T=9, expected 1 to 8"):
        find_tactics("lm_head_sample", HOPPER, head(9, 4111, 256))
    assert find_tactics("lm_head_sample", HOPPER, head(1, 4111, 256, tp_size=2)) == []
    float32 = {**linear(1, 64, 64), "x": replace(arg(1, 64), dtype=torch.float32)}
    assert find_tactics("linear", HOPPER, float32) == []


@pytest.mark.parametrize("width", [8, 64, 128, 200, 264])
def test_padded_bf16_round_trip(width: int) -> None:
    weight = torch.randn(2, 21, width, generator=torch.Generator().manual_seed(6)).bfloat16()
    packed = pack_bf16(weight)
    assert packed.numel() == bf16_num_bytes(2, 21, width) == 2 * 2 * 8192 * (width // 256 + 1)
    assert torch.equal(unpack_bf16(packed, 21, width), weight)
    whole = unpack_bf16(packed, 21, padded_width(width))
    assert torch.equal(whole[..., :width], weight)
    assert not whole[..., width:].any()
    assert bf16_packing("w", "plain").num_bytes([arg(2, 21, width)]) == packed.numel()
