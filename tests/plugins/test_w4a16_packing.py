"""The chunk layout: exact round trips, decoding as the kernels do, compilation without spills."""

import dataclasses
import io
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from cubin import resources

from inkrt.builder.compile import PLUGIN_FOLDER, compile_cubin
from inkrt.errors import BuildError
from inkrt.plugins.tactic import KernelLaunch, Tactic, TensorArg
from inkrt.plugins.w4a16 import tactics
from inkrt.plugins.w4a16.packing import (
    bf16_num_bytes,
    bf16_packing,
    nvfp4_num_bytes,
    nvfp4_packing,
    pack_bf16,
    pack_nvfp4,
    row_order,
    unpack_bf16,
    unpack_nvfp4,
)
from inkrt.plugins.w4a16.sample_tactics import sample
from inkrt.plugins.w4a16.shapes import Dims

FLINT = Dims()
TINY = Dims(
    hidden=256, heads=2, kv_heads=1, experts=16, top_k=6, width=256, shared_width=256,
    dense_width=512, vocab=300,
)  # fmt: skip
MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def random_nvfp4(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    *lead, rows, width = shape
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 256, (*lead, rows, width // 2), dtype=torch.uint8, generator=generator)
    scales = torch.arange(int(np.prod(lead)) * rows * width // 16) % 127  # every code, zero too
    return codes, scales.to(torch.uint8).view(*lead, rows, width // 16)


def without_zero_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.where((scales == 0).repeat_interleave(8, -1), 0, codes)


@pytest.mark.parametrize(
    ("order", "shape"),
    [
        ("plain", (37, 512)),
        ("plain", (16, 256)),
        ("plain", (3, 20, 768)),
        ("plain", (4100, 256)),  # more rows than are packed at a time
        ("gated", (64, 512)),
        ("gated", (5, 32, 256)),
        ("heads", (384, 256)),
    ],
)
def test_nvfp4_round_trip(order: str, shape: tuple[int, ...]) -> None:
    codes, scales = random_nvfp4(*shape)
    assert len(scales.unique()) == min(127, scales.numel())
    before = codes.clone()
    packed = pack_nvfp4(codes, scales, order)
    assert packed.numel() == nvfp4_num_bytes(*shape)
    assert torch.equal(codes, before)
    got_codes, got_scales = unpack_nvfp4(packed, shape[-2], shape[-1], order)
    assert torch.equal(got_scales.view_as(scales), scales)
    assert torch.equal(got_codes.view_as(codes), without_zero_blocks(codes, scales))


@pytest.mark.parametrize(("order", "rows"), [("plain", 21), ("gated", 48), ("heads", 128)])
def test_bf16_round_trip(order: str, rows: int) -> None:
    weight = torch.randn(2, rows, 512, generator=torch.Generator().manual_seed(6)).bfloat16()
    packed = pack_bf16(weight, order)
    assert packed.numel() == bf16_num_bytes(2, rows, 512)
    assert torch.equal(unpack_bf16(packed, rows, 512, order), weight)


def test_padding_rows_are_zero() -> None:
    codes, scales = random_nvfp4(17, 256)
    packed = pack_nvfp4(codes, scales)
    full = unpack_nvfp4(packed, 32, 256)
    assert not full[0][0, 17:].any()
    assert not full[1][0, 17:].any()


def test_float8_scales_pack_as_their_bytes() -> None:
    codes, scales = random_nvfp4(16, 256)
    assert torch.equal(
        pack_nvfp4(codes, scales.view(torch.float8_e4m3fn)), pack_nvfp4(codes, scales)
    )


def decode_as_kernel(packed: torch.Tensor, rows: int, width: int) -> np.ndarray:
    """Values by the shifts, masks and bf16 multiply of `dequantize`, in float64 [rows, width]."""
    chunks = packed.numpy().reshape(-1, width // 256, 2304)
    words = np.ascontiguousarray(chunks[..., :2048]).view("<u4")
    words = words.reshape(-1, width // 256, 4, 32, 4)
    mask = np.uint32(0x81C081C0)
    registers = [
        (words << np.uint32(6)) & mask,
        (words << np.uint32(2)) & mask,
        ((words >> np.uint32(4)) | (words << np.uint32(28))) & mask,
        (words & np.uint32(0x81808180)) | ((words >> np.uint32(8)) & np.uint32(0x00400040)),
    ]
    scale_bits = chunks[..., 2048:].reshape(-1, width // 256, 32, 4, 2).astype(np.uint32)
    scale_values = bf16_value((scale_bits << 4) | 0x7000)
    values = np.empty((len(chunks), 2, 8, width // 256, 4, 4, 4, 2, 2))
    for index, register in enumerate(registers):
        half, pair = index % 2, index // 2
        scale = scale_values[..., half].transpose(0, 1, 3, 2)[..., None]
        for second in range(2):
            bits = (register >> np.uint32(16 * second)) & np.uint32(0xFFFF)
            value = bf16_value(bits) * scale * 2.0**7  # what the tensor's scale carries
            value = value.reshape(-1, width // 256, 4, 8, 4, 4).transpose(0, 3, 1, 2, 4, 5)
            values[:, half, ..., pair, second] = value
    return values.reshape(-1, width)[:rows]


def bf16_value(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def test_kernel_arithmetic_gives_exact_weights() -> None:
    codes, scales = random_nvfp4(48, 512)
    nibbles = torch.stack([codes & 15, codes >> 4], -1).view(48, 512).numpy()
    signs = np.where(nibbles >= 8, -1.0, 1.0)
    expected = signs * np.array(MAGNITUDES)[nibbles & 7]
    expected *= scales.view(torch.float8_e4m3fn).double().numpy().repeat(16, axis=-1)
    assert np.array_equal(decode_as_kernel(pack_nvfp4(codes, scales), 48, 512), expected)


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF])
def test_unfit_scales_are_refused(byte: int) -> None:
    codes, scales = random_nvfp4(16, 256)
    scales[3, 5] = byte
    with pytest.raises(BuildError, match=f"scale byte is {byte:#04x}"):
        pack_nvfp4(codes, scales)


def test_unfit_shapes_are_refused() -> None:
    codes, scales = random_nvfp4(16, 128)
    with pytest.raises(BuildError, match="multiple of 256"):
        pack_nvfp4(codes, scales)
    with pytest.raises(BuildError, match="multiple of 128"):
        row_order("heads", 64)
    with pytest.raises(BuildError, match="row order"):
        row_order("odd", 64)


def test_row_orders_are_permutations_with_their_pairs() -> None:
    gated, heads = row_order("gated", 64), row_order("heads", 256)
    assert gated is not None
    assert heads is not None
    assert gated[:16].tolist() == [*range(8), *range(32, 40)]
    assert heads[128 + 16 : 128 + 32].tolist() == [*range(136, 144), *range(200, 208)]
    for order in (gated, heads):
        assert sorted(order.tolist()) == list(range(len(order)))


def test_packings_know_their_size() -> None:
    codes, scales = random_nvfp4(2, 32, 256)
    packing = nvfp4_packing("c", "s", "gated")
    shapes = [TensorArg(tuple(t.shape), t.dtype) for t in (codes, scales)]
    assert packing.arguments == ("c", "s")
    assert packing.pack(codes, scales).numel() == packing.num_bytes(shapes)
    weight = torch.zeros(20, 256, dtype=torch.bfloat16)
    plain = bf16_packing("w", "plain")
    assert plain.pack(weight).numel() == plain.num_bytes([TensorArg((20, 256), weight.dtype)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: qkv(Dims(hidden=320)), "hidden=320, expected a multiple of 256"),
        (lambda: qkv(Dims(hidden=4608)), "up to 2048"),
        (lambda: qkv(FLINT, tokens=0), "T=0, expected 1 to 8"),
        (
            lambda: tactics.lm_head(FLINT, 9, eps=1e-6, logits=True, greedy=True),
            "T=9, expected 1 to 8",
        ),
        (lambda: qkv(FLINT, ring=100), "ring_rows=100"),
        (lambda: qkv(FLINT, blocks=133), "133 blocks for 40 heads and T=1, expected 40 to 132"),
        (lambda: qkv(FLINT, tokens=2, blocks=40), "shared memory"),
        (lambda: qkv(TINY, tokens=8, blocks=7), "expected 8 to 32"),
        (lambda: tactics.moe(Dims(experts=260), 1, eps=1e-6), "experts=260"),
        (lambda: tactics.moe(Dims(width=768), 1, eps=1e-6), "width=768"),
        (lambda: tactics.moe(Dims(shared_width=1280), 1, eps=1e-6), "multiple of width"),
        (lambda: tactics.moe(Dims(top_k=9), 1, eps=1e-6), "top_k=9"),
        (lambda: tactics.linear(FLINT, 1, rows=64, width=300), "width=300"),
        # 2^18 equal probabilities would add up to 2^64.
        (lambda: sample(2**18, 1, 264), "vocab=262144, expected 1 to 262143"),
    ],
)
def test_unfit_sizes_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(BuildError, match=message):
        make()


def qkv(dims: Dims, *, tokens: int = 1, ring: int = 0, blocks: int | None = None) -> Tactic:
    return tactics.qkv(dims, tokens, eps=1e-6, rope_theta=1e4, ring_rows=ring, blocks=blocks)


def kernels(dims: Dims, tokens: int) -> list[KernelLaunch]:
    found = [
        tactics.embed(dims, tokens),
        qkv(dims, tokens=tokens),
        tactics.qkv(dims, tokens, eps=1e-6, rope_theta=None, ring_rows=576, has_delta=False),
        tactics.linear(dims, tokens, rows=dims.hidden, width=dims.heads * 128),
        tactics.moe(dims, tokens, eps=1e-6),
        tactics.moe(dims, tokens, eps=1e-6, has_delta=False),
        tactics.dense_mlp(dims, tokens, eps=1e-6),
        tactics.lm_head(dims, tokens, eps=1e-6, logits=True, greedy=True),
        tactics.lm_head(dims, tokens, eps=1e-6, logits=False, greedy=True, norm=False),
        *(qkv(dims, tokens=tokens, blocks=blocks) for blocks in tactics.qkv_blocks(dims, tokens)),
        *(
            tactics.lm_head(dims, tokens, eps=1e-6, logits=True, greedy=True, depth=depth)
            for depth in tactics.head_depths(dims)
        ),
    ]
    every = [kernel for tactic in found for kernel in tactic.kernels]
    return list({(kernel.source, kernel.defines): kernel for kernel in every}.values())


def compile_verbosely(kernel: KernelLaunch) -> str:
    core = pytest.importorskip("cuda.core", reason="NVRTC through cuda.core is not installed")
    options = core.ProgramOptions(
        arch="sm_90a",
        std="c++17",
        define_macro=[(name, str(value)) for name, value in kernel.defines],
        include_path=[str(kernel.source.parent), str(PLUGIN_FOLDER)],
        ptxas_options=["-v"],
    )
    log = io.StringIO()
    core.Program(kernel.source.read_text(), "c++", options).compile("cubin", logs=log)
    return log.getvalue()


def assert_no_spills(kernel: KernelLaunch) -> None:
    log = compile_verbosely(kernel)
    assert "spill stores" in log
    for line in log.splitlines():
        if "spill stores" in line:
            assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in line, (
                f"{kernel.entry} {kernel.defines}: {line.strip()}"
            )


def test_one_kernel_compiles_without_spills() -> None:
    assert_no_spills(tactics.linear(FLINT, 1, rows=2048, width=4096).kernels[0])


def test_bf16_blocks_of_one_token_fit_beside_those_of_the_kernel_before() -> None:
    dims = dataclasses.replace(FLINT, bf16=True)
    (linear,) = tactics.linear(dims, 1, rows=2048, width=4096).kernels
    router, gate_up, down = tactics.moe(dims, 1, eps=1e-6).kernels
    assert shares_of((linear, router)) == (64_512, 217_856)
    assert shares_of((gate_up, down)) == (61_440, 211_584)
    for blocks in tactics.qkv_blocks(dims, 1):
        (qkv_kernel,) = qkv(dims, blocks=blocks).kernels
        # Beside a block of `down`, but not of its own kind: blocks spread over multiprocessors.
        assert shares_of((down, qkv_kernel)) == (53_248, 214_528 if blocks > 80 else 215_552)
        assert 2 * shares_of((qkv_kernel,))[0] > 65_536


def shares_of(kernels: Sequence[KernelLaunch]) -> tuple[int, int]:
    """Registers and shared memory that a block of each takes from a multiprocessor."""
    pytest.importorskip("cuda.core", reason="NVRTC through cuda.core is not installed")
    registers = 0
    for kernel in kernels:
        used = resources(compile_cubin(kernel.source, kernel.defines, "sm_90a"))["registers"]
        registers += -(-used // 8) * 8 * kernel.block[0]
    size = sum(kernel.smem_bytes + 1024 for kernel in kernels)
    assert registers <= 65_536
    assert size <= 233_472
    return registers, size


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("dims", [FLINT, TINY], ids=["flint", "tiny"])
def test_all_kernels_compile_without_spills(dims: Dims, bf16: bool, tokens: int) -> None:
    for kernel in kernels(dataclasses.replace(dims, bf16=bf16), tokens):
        assert_no_spills(kernel)
