"""Quantized activations: recorded bits, exact values, ends of ranges, and the better of two scales.

The golden vectors are those of inkling2.md section 9.1, made apart from this repository.
"""

import numpy as np
import pytest
import torch
from oracles_flint import matrix
from oracles_quantize import F32, ORACLES_QUANTIZE, four_over_six
from torch import Tensor
from torch.fx import Graph

from inkrt.builder.tactics import TacticChooser, choose_tactic
from inkrt.errors import BuildError
from inkrt.plugins import mxfp8, nvfp4
from inkrt.plugins.registry import plugins
from inkrt.plugins.tactic import GPU_TARGETS

quantize_nvfp4 = plugins()["quantize_nvfp4"].op
quantize_mxfp8 = plugins()["quantize_mxfp8"].op
LARGEST = torch.finfo(torch.float32).max
MAXIMA = pytest.mark.parametrize("e4m3_max", [448, 256])


def normal_rows(num_rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


def values_of(codes: Tensor, scales: Tensor, token_scales: Tensor) -> Tensor:
    """What NVFP4 rows stand for, in float64."""
    unscaled = matrix(codes, scales, torch.ones(1, dtype=torch.float64))
    return unscaled * token_scales.double()[:, None]


GOLDEN = {
    448: (
        0x3AC30C31,
        "7e7e7e7e",
        "1d5d4ce8d3a4162e5c7ad1c4862d5d5ae0b4a4273c6cd9d2c5053e4d6ae1b295",
    ),
    256: (
        0x3B2AAAAB,
        "74787a79",
        "2e6e5df8e4a4173f5c7ad1c4862d5d5ad0a394163b5bc9c1b4043d3d69e1b295",
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@MAXIMA
def test_golden_rows(e4m3_max: int, dtype: torch.dtype) -> None:
    i = torch.arange(64)
    x = ((37 * i % 64 - 31) / 16 * (1 + 0.25 * (i % 5))).bfloat16().to(dtype)
    codes, scales, token_scales = quantize_nvfp4(x[None], e4m3_max)
    token_scale, scale_bytes, code_bytes = GOLDEN[e4m3_max]
    assert token_scales.view(torch.int32).tolist() == [token_scale]
    assert scales.numpy().tobytes().hex() == scale_bytes
    assert codes.numpy().tobytes().hex() == code_bytes


@pytest.mark.parametrize("factor", [1.0, 2.0**-20, 2.0**60])
@MAXIMA
def test_values_of_nvfp4_come_back(e4m3_max: int, factor: float) -> None:
    """All codes under all scales up to the maximum, those of the first block under the maximum."""
    most = int(nvfp4.encode_scales(torch.tensor(float(e4m3_max))))
    scales = torch.tensor([[most, *range(1, most + 1)]], dtype=torch.uint8)
    # Both zeros are among them, and in every block a 3 beside the 6, which only a 6 leaves exact.
    of_block = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    codes = torch.tensor(of_block * scales.shape[1], dtype=torch.uint8)[None]
    x = nvfp4.dequantize(codes, scales, torch.float32) * factor
    got = quantize_nvfp4(x, e4m3_max)
    assert torch.equal(got[0], codes)
    assert torch.equal(got[1], scales)
    torch.testing.assert_close(values_of(*got), x.double(), rtol=2e-7, atol=0)


@MAXIMA
def test_blocks_up_to_4_come_back(e4m3_max: int) -> None:
    """Largest at 4: with 1.5 it has values that no scale for a largest of 6 gives."""
    most = int(nvfp4.encode_scales(torch.tensor(1.5 * e4m3_max)))
    scales = torch.tensor([list(range(0x10, most + 1))], dtype=torch.uint8)
    of_block = [0x16, 0x32, 0x54, 0x56, 0x91, 0xBA, 0xDC, 0xEE]
    codes = torch.tensor(of_block * scales.shape[1], dtype=torch.uint8)[None]
    first = torch.full((1, 16), 6.0 * e4m3_max)
    x = torch.cat([first, nvfp4.dequantize(codes, scales, torch.float32)], dim=1)
    got = quantize_nvfp4(x, e4m3_max)
    assert torch.equal(got[0][:, 8:], codes)
    assert torch.equal(got[1][:, 1:], scales)


@MAXIMA
def test_error_is_that_of_the_better_scale(e4m3_max: int) -> None:
    """Never above that of the plain choice, which is recomputed here; both are taken."""
    x = normal_rows(4, 160)
    _, scales, _ = quantize_nvfp4(x, e4m3_max)
    taken = {1.0: 0, 1.5: 0}
    for t, values in enumerate(x.numpy()):
        row = np.abs(values).max()
        enc = (F32(1) / (F32(1) / F32(6 * e4m3_max))) / row
        for b, block in enumerate(values.reshape(-1, 16)):
            alone = {f: four_over_six(block, row, enc, e4m3_max, (f,)) for f in taken}
            is_better = alone[1.5][2] < alone[1.0][2]
            best = alone[1.5 if is_better else 1.0]
            assert scales[t, b] == best[1]
            assert best[2] <= alone[1.0][2]
            taken[1.5 if is_better else 1.0] += 1
    assert min(taken.values()) >= 4


def test_equal_errors_leave_the_largest_at_6() -> None:
    """One size in all places is exact under both scales, 256 and 384."""
    codes, scales, token_scales = quantize_nvfp4(torch.full((1, 16), 1536.0), 256)
    assert (codes.unique().tolist(), scales.tolist()) == ([0x77], [[0x78]])
    assert token_scales.tolist() == [1.0]


# In eighths; their two errors differ by less than the roundings on the way to them.
CLOSE_448 = [
    (-3, 0, -10, -4, -24, -1, 9, -5, 14, -4, 11, 6, -7, 3, 7, -3),
    (-22, 2, 0, -2, 5, 5, 2, -6, 1, 1, 2, -6, 7, -13, 8, -8),
]
CLOSE_256 = [
    (-6, 0, 1, 8, 20, 5, -8, -2, 2, -9, 1, 5, -2, 12, -7, -12),
    (-11, -5, -9, -6, 4, -3, 4, -15, 11, 1, -22, -5, 4, -15, 0, 3),
]


@pytest.mark.parametrize(("e4m3_max", "eighths"), [(448, CLOSE_448), (256, CLOSE_256)])
def test_every_rounding_of_the_errors_counts(e4m3_max: int, eighths: list[tuple[int, ...]]) -> None:
    """Other orders of addition, or a reciprocal in place of the last division, choose otherwise."""
    x = torch.tensor(eighths).flatten()[None] / 8
    (codes, scales, token_scales), _ = ORACLES_QUANTIZE["quantize_nvfp4"](x, e4m3_max)
    got = quantize_nvfp4(x, e4m3_max)
    assert torch.equal(got[0], codes)
    assert torch.equal(got[1], scales)
    assert torch.equal(got[2].double(), token_scales)
    backwards = quantize_nvfp4(x.flip(-1), e4m3_max)[1].flip(-1)
    assert not torch.equal(backwards, scales)


def test_scales_end_at_448() -> None:
    x = normal_rows(64, 64)
    assert quantize_nvfp4(x, 448)[1].max() == 0x7E
    assert quantize_nvfp4(x, 256)[1].max() == 0x7C  # 384
    # With 0.7 at 4 the scale is 470, which rounds to 480; 448 is better for the others than 320.
    block = torch.tensor([0.7, *[0.5, 0.25, 1 / 3] * 5])
    codes, scales, _ = quantize_nvfp4(torch.cat([torch.ones(16), block])[None], 448)
    assert scales[0, 1] == 0x7E
    assert nvfp4.decode_codes(codes)[0, 16:20].tolist() == [4, 3, 1.5, 2]


@MAXIMA
def test_zeros_of_nvfp4(e4m3_max: int) -> None:
    x = normal_rows(3, 64)
    x[1] = 0
    x[2, 16:32] = -0.0
    codes, scales, token_scales = quantize_nvfp4(x, e4m3_max)
    assert not codes[1].any()
    assert not scales[1].any()
    assert token_scales[1] == 0
    assert not codes[2, 8:16].any()
    assert scales[2].count_nonzero() == 3
    for rows in (torch.zeros(2, 32), -torch.zeros(2, 32)):
        assert not any(part.any() for part in quantize_nvfp4(rows, e4m3_max))


@pytest.mark.parametrize("huge", [1e10, -3e38, LARGEST])
@MAXIMA
def test_one_huge_value_silences_the_others(e4m3_max: int, huge: float) -> None:
    x = normal_rows(1, 64)
    x[0, 37] = huge
    got = quantize_nvfp4(x, e4m3_max)
    values = values_of(*got)
    assert torch.isfinite(got[2]).all()
    assert values[0, 37] == pytest.approx(huge, rel=3e-7)
    assert values.count_nonzero() == 1


@pytest.mark.parametrize("least", [1e-38, 1e-40, 2.0**-149])
def test_rows_of_subnormal_numbers_end_at_the_largest_factor(least: float) -> None:
    """enc would be infinite; it ends at the largest float32, whose reciprocal is subnormal."""
    x = torch.full((1, 16), least)
    codes, scales, token_scales = quantize_nvfp4(x, 448)
    assert token_scales[0] == 1 / torch.tensor(LARGEST)
    assert torch.isfinite(values_of(codes, scales, token_scales)).all()
    assert scales.max() <= 0x7E


def test_ties_of_e2m1_go_to_the_even_code() -> None:
    below = torch.tensor(nvfp4.E2M1[:-1])
    ties = (below + torch.tensor(nvfp4.E2M1[1:])) / 2
    up = torch.nextafter(ties, torch.tensor(9.0))
    down = torch.nextafter(ties, torch.tensor(0.0))
    wanted = {
        "ties": (ties, [0, 2, 2, 4, 4, 6, 6]),
        "above": (up, [1, 2, 3, 4, 5, 6, 7]),
        "below": (down, [0, 1, 2, 3, 4, 5, 6]),
        "ends": (torch.tensor([6.0, 6.5, 1e30, torch.inf]), [7] * 4),
    }
    for values, codes in wanted.values():
        for sign, bit in ((1, 0), (-1, 8)):
            pair = torch.stack([sign * values, torch.zeros_like(values)], dim=-1)
            assert nvfp4.encode_codes(pair).flatten().tolist() == [code + bit for code in codes]
    assert nvfp4.encode_codes(torch.tensor([-0.0, 6.0])).tolist() == [0x78]


def test_ties_of_e4m3_go_to_the_even_byte() -> None:
    values = nvfp4.decode_scales(torch.arange(0x7F, dtype=torch.uint8))
    ties = (values[:-1] + values[1:]) / 2
    even = torch.arange(0x7E) + torch.arange(0x7E) % 2
    for encode in (nvfp4.encode_scales, mxfp8.encode_codes):
        assert torch.equal(encode(values).int(), torch.arange(0x7F).int())
        assert torch.equal(encode(ties).int(), even.int())
        above = torch.nextafter(ties, torch.tensor(1e3))
        assert torch.equal(encode(above).int(), torch.arange(1, 0x7F).int())
        assert encode(torch.tensor([449.0, 464.0, 480.0, 1e30, torch.inf])).unique() == 0x7E
    assert mxfp8.encode_codes(torch.tensor([-449.0, -480.0, -0.0])).tolist() == [0xFE, 0xFE, 0x80]


@pytest.mark.parametrize("exponent", [1, 2, 100, 127, 160, 246])
def test_values_of_mxfp8_come_back(exponent: int) -> None:
    """All codes, a 448 in every block: the exponent is that of the block."""
    numbers = torch.tensor([code for code in range(256) if code & 0x7F != mxfp8.NO_NUMBER])
    codes = torch.full((1, 32 * 9), 0x7E)
    places = [i for i in range(32 * 9) if i % 32]
    codes[0, places[: len(numbers)]] = numbers
    exponents = torch.full((1, 9), exponent, dtype=torch.uint8)
    x = mxfp8.dequantize(codes.to(torch.uint8), exponents, torch.float32)
    got_codes, got_exponents = quantize_mxfp8(x)
    assert torch.equal(got_exponents, exponents)
    assert torch.equal(got_codes.int(), codes.int())


def test_exponents_are_rounded_up() -> None:
    """At 448 times a power of two, just below it and above it, and half of it."""
    exact = 448 * 2.0 ** torch.arange(-100, 100)
    for x, offset in ((exact, 0), (torch.nextafter(exact, torch.tensor(0.0)), 0), (exact / 2, -1)):
        rows = torch.zeros(len(x), 32)
        rows[:, 5] = x
        codes, exponents = quantize_mxfp8(rows)
        assert (exponents[:, 0].int() - 127 - offset).tolist() == list(range(-100, 100))
        assert codes[:, 5].unique().tolist() == [0x7E]
    rows[:, 5] = torch.nextafter(exact, torch.tensor(LARGEST))
    codes, exponents = quantize_mxfp8(rows)
    assert (exponents[:, 0].int() - 128).tolist() == list(range(-100, 100))
    assert codes[:, 5].unique().tolist() == [0x76]  # 224


def test_ends_of_mxfp8() -> None:
    x = torch.zeros(1, 32 * 6)
    least = 448 * 2.0**-127
    x[0, 0::32] = torch.tensor([0.0, 2.0**-149, least, least * 1.01, -LARGEST, -0.0])
    codes, exponents = quantize_mxfp8(x)
    assert exponents.tolist() == [[0, 0, 0, 1, 247, 0]]
    # An exponent of 0 has zeros, which keep their sign. The largest float32 is 256 * 2^120.
    assert codes[0, 0::32].tolist() == [0, 0, 0, 0x76, 0xF8, 0x80]
    assert codes.count_nonzero() == 3


def test_error_of_mxfp8_is_half_a_step() -> None:
    x = normal_rows(8, 256) * torch.logspace(-20, 20, 8, base=2)[:, None]
    codes, exponents = quantize_mxfp8(x)
    values = mxfp8.dequantize(codes, exponents, torch.float32).double()
    unit = 2.0 ** (exponents.double() - 127).repeat_interleave(32, dim=1)
    assert ((values - x).abs() <= torch.maximum(x.abs().double() / 16, unit * 2.0**-10)).all()
    assert (values - x).abs().max() > 0


def test_rows_do_not_depend_on_those_beside_them() -> None:
    x = normal_rows(11, 96).bfloat16()
    for op, rest in ((quantize_nvfp4, (448,)), (quantize_mxfp8, ())):
        together = op(x, *rest)
        alone = [op(x[i : i + 1].clone(), *rest) for i in range(len(x))]
        for whole, rows in zip(together, zip(*alone, strict=True), strict=True):
            assert torch.equal(whole, torch.cat(rows))


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        (quantize_nvfp4, (torch.zeros(2, 24), 448), "x has 24 columns, expected a multiple of 16"),
        (quantize_nvfp4, (torch.zeros(2, 32), 6), "e4m3_max is 6, expected 448 or 256"),
        (quantize_mxfp8, (torch.zeros(2, 48),), "x has 48 columns, expected a multiple of 32"),
    ],
)
def test_other_calls_are_refused(op, arguments, message: str) -> None:
    on_meta = [x.to("meta") if isinstance(x, Tensor) else x for x in arguments]
    with pytest.raises(BuildError, match=f"ink::{op.name().split('::')[1]}: {message}"):
        op(*on_meta)


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize(("name", "rest"), [("quantize_nvfp4", (448,)), ("quantize_mxfp8", ())])
def test_a_build_for_a_gpu_says_that_there_is_no_kernel(
    name: str, rest: tuple[int, ...], target: str
) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, 64, dtype=torch.bfloat16, device="meta")
    plugin = plugins()[name]
    node = graph.call_function(plugin.op, (x, *rest))
    with pytest.raises(BuildError, match=f"ink::{name} has no kernel for {target} with shapes"):
        choose_tactic(node, plugin, target, TacticChooser(target))
