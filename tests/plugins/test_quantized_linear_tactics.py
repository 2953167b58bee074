"""Streams of quantized row tiles without a GPU: calls, bytes, packings, code without spills."""

import pytest
import torch
from cubin import resources
from torch import Tensor

from inkrt.builder.compile import compile_cubin
from inkrt.builder.tactics import find_tactics
from inkrt.errors import BuildError
from inkrt.plugins import mxfp8, nvfp4
from inkrt.plugins.caseutil import mxfp8_arguments, weight_arguments
from inkrt.plugins.tactic import BLACKWELL, HOPPER, CallArgs, KernelLaunch, TensorArg
from inkrt.plugins.w4a16.quant_tactics import Form, quantized_packing
from inkrt.plugins.w4a16.shapes import LARGE_BLOCK, MAX_SMEM

BF16, U8, F32 = torch.bfloat16, torch.uint8, torch.float32
RANKS = (1, 2, 4, 8)
FORMS: tuple[Form, ...] = ("mxfp8", "nvfp4")
COLUMNS = {"mxfp8": (1, 32), "nvfp4": (2, 16)}
VECTOR_BYTES = {"mxfp8": 1056, "nvfp4": 576}


def group(num_tokens: int, tp: int, form: Form, *, is_full: bool) -> CallArgs:
    """The input projections of a layer of Inkling-2-Small on one rank."""
    rows = [6144 // tp, 768 // tp, 1024 // tp, 1024 // tp, 6144 // tp]
    plain, per_code = [48 // tp, *([32 // tp] * 2 if is_full else [])], COLUMNS[form]
    inputs = [0, 1, 2, 0, 0, 1, 2, 0] if is_full else [0] * 6
    return {
        "xs": [TensorArg((num_tokens, 4608), BF16)] * (max(inputs) + 1),
        "weights": [TensorArg((n, 4608), BF16) for n in plain],
        "codes": [TensorArg((n, 4608 // per_code[0]), U8) for n in rows],
        "scales": [TensorArg((n, 4608 // per_code[1]), U8) for n in rows],
        "global_scales": [TensorArg((1,), F32)] * len(rows) if form == "nvfp4" else [],
        "input_of": inputs,
    }


def linear(
    num_tokens: int, rows: int, width: int, form: Form, *, partial: bool
) -> tuple[str, CallArgs]:
    codes, block = COLUMNS[form]
    args: CallArgs = {
        "x": TensorArg((num_tokens, width), BF16), "partial": partial,
        "codes": TensorArg((rows, width // codes), U8),
    }  # fmt: skip
    scales = TensorArg((rows, width // block), U8)
    if form == "mxfp8":
        return "linear_mxfp8", args | {"exponents": scales}
    return "linear_nvfp4", args | {"scales": scales, "global_scale": TensorArg((1,), F32)}


def kernels(num_tokens: int, form: Form, target: str) -> list[KernelLaunch]:
    calls = [linear(num_tokens, 4608, 6144 // tp, form, partial=tp > 1) for tp in RANKS]
    calls += [
        ("linear_group_quantized", group(num_tokens, tp, form, is_full=is_full))
        for tp in RANKS
        for is_full in (False, True)
    ]
    found = {}
    for name, args in calls:
        for tactic in find_tactics(name, target, args):
            found |= {(kernel.source, kernel.defines): kernel for kernel in tactic.kernels}
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("target", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_tokens", [1, 8, 512])
def test_kernels_compile_without_spills(num_tokens: int, form: Form, target: str) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")
    for kernel in kernels(num_tokens, form, target):
        used = resources(compile_cubin(kernel.source, kernel.defines, target))
        assert used["stack"] == 0, kernel
        assert used["registers"] * kernel.block[0] <= 49152, kernel
        assert kernel.smem_bytes <= MAX_SMEM


@pytest.mark.parametrize("form", FORMS)
def test_one_compiles(form: Form) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC needs cuda.core and nvidia-cuda-nvrtc")
    args = group(1, 4, form, is_full=True)
    kernel = find_tactics("linear_group_quantized", HOPPER, args)[0].kernels[0]
    assert resources(compile_cubin(kernel.source, kernel.defines, HOPPER))["stack"] == 0


@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_full", [False, True])
def test_a_group_is_one_launch_of_all_rows(tp: int, form: Form, is_full: bool) -> None:
    args = group(1, tp, form, is_full=is_full)
    plain = (48 + 64 * is_full) // tp
    quantized = (2 * 6144 + 768 + 2 * 1024) // tp
    for tactic in find_tactics("linear_group_quantized", HOPPER, args):
        (kernel,) = tactic.kernels
        weights = 2 * plain * 4608 + quantized * 72 * VECTOR_BYTES[form] // 16
        others = 2 * 4608 * (3 if is_full else 1) + 2 * (plain + quantized)
        assert tactic.bytes == weights + others
        assert LARGE_BLOCK <= kernel.smem_bytes < MAX_SMEM - 16 * 1024
        macros = dict(kernel.defines)
        assert kernel.grid[0] == macros["BLOCKS"] <= 132
        # Those in bf16 stand first.
        count = 3 if is_full else 1
        assert macros["IS_PLAIN"] == ",".join(["1"] * count + ["0"] * 5)
        assert macros["INPUT_OF"] == ("0,1,2,0,0,0,1,2" if is_full else "0,0,0,0,0,0")


@pytest.mark.parametrize(("form", "megabytes"), [("mxfp8", 101.5), ("nvfp4", 55.5)])
def test_bytes_of_a_layer(form: Form, megabytes: int) -> None:
    name, args = linear(1, 4608, 6144, form, partial=False)
    total = find_tactics(name, HOPPER, args)[0].bytes
    group_args = group(1, 1, form, is_full=False)
    total += find_tactics("linear_group_quantized", HOPPER, group_args)[0].bytes
    assert total / 1e6 == pytest.approx(megabytes, abs=0.2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(40, 96), (2176, 256), (24, 256)])
def test_all_widths_read_the_same_packings(
    form: Form, partial: bool, rows: int, width: int
) -> None:
    found = set()
    for num_tokens in (1, 8, 9, 512):
        name, args = linear(num_tokens, rows, width, form, partial=partial)
        for tactic in find_tactics(name, HOPPER, args):
            found.add(tuple(packing.name for packing in tactic.packings))
    is_flints = form == "nvfp4" and (rows, width, partial) == (24, 256, False)
    assert found == {("nvfp4_chunks_plain",) if is_flints else (f"{form}_tiles",)}


def unpack(packed: Tensor, rows: int, width: int, form: Form) -> Tensor:
    """Values, float64 [rows, width], by where weights.cuh says that each stands."""
    vectors = packed.view(-(-rows // 16), -1, VECTOR_BYTES[form])
    out = torch.zeros(len(vectors) * 16, vectors.shape[1] * 64, dtype=torch.float64)
    for tile, vector in torch.cartesian_prod(*(torch.arange(n) for n in vectors.shape[:2])):
        data = vectors[tile, vector].int()
        for half in range(2):
            for g in range(8):
                row = tile * 16 + half * 8 + g
                for t in range(4):
                    k = vector * 64 + t * 16
                    lane = 4 * g + t
                    if form == "mxfp8":
                        exponent = int(data[1024 + (2 * g + t // 2) * 2 + half]) - 113
                        # Axes: mma / 2, lane, mma % 2, pair of k, k, half of the tile.
                        codes = data[:1024].view(2, 32, 2, 2, 2, 2)[:, lane, ..., half].flatten()
                        number = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
                        out[row, k : k + 16] = number * 2.0 ** (exponent - 127)
                    else:
                        scale = int(data[512 + 2 * lane + half])
                        e5m3 = (8 + scale % 8) / 8 * 2.0 ** (scale // 8 - 22) if scale else 0.0
                        words = data[:512].view(32, 4, 4)[lane]
                        out[row, k : k + 16] = nibbles(words, half) * e5m3
    return out[:rows, :width]


def nibbles(words: Tensor, half: int) -> Tensor:
    """Sixteen E2M1 values of a lane's row, by the shifts and masks of `dequantize`."""
    found = []
    for mma in range(4):
        w = sum(int(words[mma, byte]) << 8 * byte for byte in range(4))
        rotated = (w >> 4 | w << 28) & 0xFFFFFFFF
        placed = (w << 6, w << 2, rotated, (w & 0x81808180) | ((w >> 8) & 0x00400040))[
            half::2
        ]  # registers of this half's row, in the order of k
        for register in placed:
            for shift in (0, 16):
                bits = register >> shift & 0x81C0
                size = nvfp4.E2M1[bits >> 6 & 7]
                found.append(-size if bits & 0x8000 else size)
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize(("rows", "width"), [(5, 32), (16, 256), (19, 320)])
@pytest.mark.parametrize("form", FORMS)
def test_packed_weights_are_the_values(form: Form, rows: int, width: int) -> None:
    """Also where rows and K are padded."""
    generator = torch.Generator().manual_seed(rows)
    if form == "mxfp8":
        made = mxfp8_arguments("w", generator, BF16, rows, width, scale=0.1)
        expected = mxfp8.dequantize(made["w"], made["w_scales"], torch.float64)
    else:
        made = weight_arguments("w", generator, BF16, rows, width, scale=0.1, quantized=True)
        expected = nvfp4.dequantize(made["w"], made["w_scales"], torch.float64)
    packing = quantized_packing(form, "w", "w_scales")
    packed = packing.pack(made["w"], made["w_scales"])
    shapes = [TensorArg(tuple(made[name].shape), U8) for name in ("w", "w_scales")]
    assert packed.numel() == packing.num_bytes(shapes)
    assert packed.numel() == -(-rows // 16) * -(-width // 256) * 4 * VECTOR_BYTES[form]
    assert torch.equal(unpack(packed, rows, width, form), expected)


def test_sizes_that_no_kernel_takes() -> None:
    for num_tokens in (1, 9):
        name, args = linear(num_tokens, 64, 8448, "mxfp8", partial=True)
        with pytest.raises(BuildError, match="width=8448, expected a multiple of 8 up to 8192"):
            find_tactics(name, HOPPER, args)
        args["x"] = TensorArg((num_tokens, 48), BF16)
        with pytest.raises(BuildError, match="width=48, expected a multiple of the 32 columns"):
            find_tactics(name, HOPPER, args)
    name, args = linear(1, 64, 96, "nvfp4", partial=True)
    args["x"] = TensorArg((1, 96), F32)
    assert find_tactics(name, HOPPER, args) == []


def test_calls_of_flint_keep_their_kernels() -> None:
    for num_tokens, wanted in ((1, "w4a16_linear"), (512, "w4a16_tile_linear")):
        name, args = linear(num_tokens, 2048, 4096, "nvfp4", partial=False)
        assert [tactic.name for tactic in find_tactics(name, HOPPER, args)] == [wanted]
