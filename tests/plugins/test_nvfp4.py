"""NVFP4 decodes exactly, and the arguments that hold it are checked."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from oracles_flint import e2m1, e4m3, matrix

from inkrt.errors import BuildError
from inkrt.plugins.caseutil import weight_arguments
from inkrt.plugins.nvfp4 import MAX_SCALE, decode_codes, decode_scales, dequantize
from inkrt.plugins.registry import plugins

SCALES = torch.arange(MAX_SCALE + 1, dtype=torch.uint8)
DTYPES = (torch.float32, torch.bfloat16)


def test_every_code_and_scale_decodes() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    pairs = np.stack([e2m1(codes.numpy() % 16), e2m1(codes.numpy() // 16)], axis=-1)
    np.testing.assert_array_equal(decode_codes(codes).numpy(), pairs.ravel())
    np.testing.assert_array_equal(decode_scales(SCALES).numpy(), e4m3(SCALES.numpy()))
    assert decode_scales(SCALES)[[0, 1, MAX_SCALE]].tolist() == [0, 2**-9, 448]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_product_is_exact(dtype: torch.dtype) -> None:
    """All 16 codes under all 127 scales: at most 6 significant bits, 2^-10 to 2688."""
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    got = dequantize(codes.expand(len(SCALES), 8), SCALES[:, None], dtype)
    exact = e4m3(SCALES.numpy())[:, None] * e2m1(np.arange(16))
    np.testing.assert_array_equal(got.double().numpy(), exact)
    sizes = np.abs(exact[exact != 0])
    assert (sizes.min(), sizes.max()) == (2.0**-10, 2688)
    for size in sizes:
        significand = math.frexp(size)[0] * 2**6
        assert significand == int(significand)


def test_layout_of_a_stack() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = weight_arguments("w", generator, torch.float32, 3, 5, 48, scale=0.1, quantized=True)
    codes, scales, global_scale = weight.values()
    assert [list(t.shape) for t in (codes, scales, global_scale)] == [[3, 5, 24], [3, 5, 3], [3]]
    unscaled = dequantize(codes, scales, torch.float32)
    assert unscaled.is_contiguous()
    expected = matrix(codes, scales, torch.ones(3, dtype=torch.float64))
    assert torch.equal(unscaled.double(), expected)
    assert torch.equal(
        matrix(codes, scales, global_scale.double()),
        expected * global_scale.double()[:, None, None],
    )


def _quantized(name: str) -> dict[str, Any]:
    """Arguments of a plugin's first case with NVFP4 weights, on the meta device."""
    case = next(case for case in plugins()[name].cases() if "nvfp4" in case.name)
    arguments = case.arguments(torch.bfloat16, torch.Generator().manual_seed(0))
    return {
        key: value.to("meta") if isinstance(value, torch.Tensor) else value
        for key, value in arguments.items()
    }


def _uint8(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.uint8, device="meta")


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("dense_mlp", {"down_scales": None}, "down_global_scale is a tensor, expected None without"),
    ("dense_mlp", {"down_global_scale": None}, "down_global_scale is None, expected float32"),
    ("dense_mlp", {"down": _uint8(64, 23)}, "down has 46 columns and down_scales has 3, expected"),
    (
        "dense_mlp",
        {"gate_up": _uint8(96, 64), "gate_up_scales": _uint8(96, 8)},
        "gate_up has 128 columns and gate_up_scales has 8, expected D=64",
    ),
    (
        "dense_mlp",
        {"down_scales": torch.empty(64, 3, device="meta")},
        "down_scales has dtype float32, expected uint8",
    ),
    ("dense_mlp", {"gate_up": _uint8(94, 32)}, "gate_up_scales has shape [96, 4], expected [2F=94"),
    (
        "dense_mlp",
        {"gate_up": _uint8(94, 32), "gate_up_scales": _uint8(94, 4)},
        "gate_up has 94 rows, expected 2F=96",
    ),
    ("flint_moe", {"down_global_scale": torch.empty(1)}, "down_global_scale has shape [1]"),
    (
        "lm_head_sample",
        {"scales": None, "global_scale": None},
        "weight has shape [59, 8], expected [Vs, D=16]",
    ),
    ("norm_qkv_rope", {"qkv": _uint8(99, 16), "qkv_scales": _uint8(99, 2)}, "qkv has 99 rows"),
]


@pytest.mark.parametrize(("name", "changes", "message"), BAD)
def test_build_error(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError) as caught:
        plugins()[name].op(**_quantized(name) | changes)
    assert str(caught.value).startswith(f"ink::{name}: {message}")
