"""A row of a narrow step has the same bits whatever the step's width: the operators of Flint.

As in test_fused_row_invariance, whose machinery this uses; attention is checked against decode
steps with the write in front and behind.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_fused_row_invariance import ROWS, SAMPLING, Setup, _run
from test_row_invariance import WIDTHS, _row, _write
from torch import Tensor

from inkrt.plugins.caseutil import normal, shuffled_pages, step_arguments, weight_arguments
from inkrt.plugins.registry import Arguments, plugins

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
WIDTH, HIDDEN, EXPERTS = 208, 80, 9


class _Draw:
    """Weights and rows of one setup."""

    def __init__(self, dtype: torch.dtype, g: torch.Generator, *, quantized: bool) -> None:
        self.dtype, self.g, self.quantized = dtype, g, quantized

    def weight(self, name: str, *shape: int) -> Arguments:
        return weight_arguments(
            name, self.g, self.dtype, *shape, scale=shape[-1] ** -0.5, quantized=self.quantized
        )

    def rows(self, *shape: int) -> Tensor:
        return normal(self.g, self.dtype, ROWS, *shape)

    def vector(self, size: int) -> Tensor:
        return 1 + normal(self.g, self.dtype, size, scale=0.2)

    def add_norm(self, name: str = "norm_weight") -> tuple[Arguments, Arguments]:
        fixed = {name: self.vector(WIDTH), "eps": 1e-6}
        return fixed, {"x": self.rows(WIDTH), "delta": self.rows(WIDTH)}


def _linear_nvfp4(draw: _Draw) -> Setup:
    weight = weight_arguments("w", draw.g, draw.dtype, 213, WIDTH, scale=0.1, quantized=True)
    names = ("codes", "scales", "global_scale")
    fixed = dict(zip(names, weight.values(), strict=True))
    return {**fixed, "partial": False}, {"x": draw.rows(WIDTH)}, (0,)


def _add_rms_norm(draw: _Draw) -> Setup:
    fixed, rows = draw.add_norm("weight")
    return {**fixed, "dtype": draw.dtype}, rows, (0, 0)


def _rope(draw: _Draw) -> Setup:
    return {"theta": 10000.0}, {"x": draw.rows(3, 38)}, (0,)


def _silu_mul(draw: _Draw) -> Setup:
    return {}, {"gate_up": draw.rows(2 * 333)}, (0,)


def _router_top_k(draw: _Draw) -> Setup:
    return {"top_k": 6}, {"logits": draw.rows(257)}, (0, 0)


def _experts(draw: _Draw) -> Arguments:
    return {
        **draw.weight("gate_up", EXPERTS, 2 * HIDDEN, WIDTH),
        **draw.weight("down", EXPERTS, WIDTH, HIDDEN),
        "rank": None,
    }


def _swiglu_experts(draw: _Draw) -> Setup:
    shuffled = torch.rand(ROWS, EXPERTS, generator=draw.g).argsort(dim=1)
    rows = {
        "x": draw.rows(WIDTH),
        "routing_weights": draw.rows(6).abs(),
        "expert_ids": shuffled[:, :6].int(),
    }
    return {**_experts(draw), "partial": False}, rows, (0,)


def _flint_moe(draw: _Draw) -> Setup:
    fixed = {
        **_experts(draw),
        **draw.weight("shared_down", WIDTH, 2 * HIDDEN),
        "top_k": 6,
        "partial": True,
    }
    rows = {
        "x": draw.rows(WIDTH), "logits": draw.rows(EXPERTS), "shared": draw.rows(2 * HIDDEN)
    }  # fmt: skip
    return fixed, rows, (0,)


def _norm_router_shared(draw: _Draw) -> Setup:
    fixed, rows = draw.add_norm()
    router = normal(draw.g, draw.dtype, EXPERTS, WIDTH)
    shared = draw.weight("shared_gate_up", 2 * HIDDEN, WIDTH)
    return {**fixed, "router": router, **shared}, rows, (0, 0, 0, 0)


def _dense_mlp(draw: _Draw) -> Setup:
    fixed, rows = draw.add_norm()
    weights = {**draw.weight("gate_up", 2 * 112, WIDTH), **draw.weight("down", WIDTH, 112)}
    return {**fixed, **weights, "partial": False}, rows, (0, 0)


def _norm_qkv_rope(draw: _Draw, *, paged: bool = False) -> Setup:
    fixed, rows = draw.add_norm()
    cache = (8, 4, 2, 38) if paged else (2, 24, 2, 38)
    fixed |= {
        **draw.weight("qkv", 20 * 38, WIDTH),
        "q_norm": draw.vector(38),
        "k_norm": draw.vector(38),
        "k_cache": normal(draw.g, draw.dtype, *cache),
        "v_cache": normal(draw.g, draw.dtype, *cache),
        "page_table": shuffled_pages(draw.g, 8, 8) if paged else None,
        "rope_theta": 0.0 if paged else 10000.0,
    }
    return fixed, rows, (0, 0, 0, 0)


def _norm_qkv_in_pages(draw: _Draw) -> Setup:
    return _norm_qkv_rope(draw, paged=True)


def _lm_head_sample(draw: _Draw) -> Setup:
    fixed = {
        **draw.weight("weight", 517, WIDTH),
        "vocab_size": 509,
        "cap": 0.0,
        "logits_dtype": torch.float32,
        **SAMPLING,
        "last_row": False,
        "tp_size": 1,
    }
    return fixed, {"x": draw.rows(WIDTH)}, (0, 0)


SETUPS: dict[str, Callable[[_Draw], Setup]] = {
    "linear_nvfp4": _linear_nvfp4,
    "add_rms_norm": _add_rms_norm,
    "rope": _rope,
    "silu_mul": _silu_mul,
    "router_top_k": _router_top_k,
    "swiglu_experts": _swiglu_experts,
    "flint_moe": _flint_moe,
    "norm_router_shared": _norm_router_shared,
    "dense_mlp": _dense_mlp,
    "norm_qkv_rope": _norm_qkv_rope,
    "norm_qkv_rope/pages": _norm_qkv_in_pages,
    "lm_head_sample": _lm_head_sample,
}
FORMS = pytest.mark.parametrize("quantized", [False, True], ids=["plain", "nvfp4"])


def _assert_equal(got: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    for mine, other in zip(got, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@DTYPES
@FORMS
@pytest.mark.parametrize("name", SETUPS)
def test_rows_do_not_depend_on_the_width_of_the_step(
    name: str, quantized: bool, dtype: torch.dtype
):
    setup = SETUPS[name](_Draw(dtype, torch.Generator().manual_seed(41), quantized=quantized))
    one_by_one = _run(name, setup, [1] * ROWS)
    for splits in ([8], [7, 1], [2, 6], [3, 5]):
        _assert_equal(_run(name, setup, splits), one_by_one)


@DTYPES
@pytest.mark.parametrize("name", SETUPS)
def test_padding_rows_change_neither_valid_rows_nor_state(name: str, dtype: torch.dtype):
    setup = SETUPS[name](_Draw(dtype, torch.Generator().manual_seed(42), quantized=True))
    _assert_equal(_run(name, setup, [3, 5], width=ROWS), _run(name, setup, [3, 5]))


def _attention(
    rows: int, dtype: torch.dtype, g: torch.Generator, position: int, window: int
) -> Arguments:
    entries, max_pages = (9, 7) if window == 0 else (2, None)
    cache_rows = 5 if max_pages else window - 1 + max(WIDTHS)
    return {
        "q": normal(g, dtype, rows, 16, 38),
        "k": normal(g, dtype, rows, 2, 38),
        "v": normal(g, dtype, rows, 2, 38),
        "sinks": normal(g, torch.float32, 16),
        "k_cache": normal(g, dtype, entries, cache_rows, 2, 38),
        "v_cache": normal(g, dtype, entries, cache_rows, 2, 38),
        "page_table": shuffled_pages(g, entries, max_pages) if max_pages else None,
        **step_arguments(position, rows, slot=1),
        "window": window,
        "scale": 38**-0.5,
    }


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("position", "window"), [(0, 6), (40, 6), (1001, 33), (0, 0), (22, 0)])
def test_attention_equals_decode(position: int, window: int, width: int, dtype: torch.dtype):
    attention = plugins()["sink_attention"]
    arguments = _attention(width, dtype, torch.Generator().manual_seed(width), position, window)
    alone = copy.deepcopy(arguments)
    before_write = attention.op(**arguments)
    _write(arguments)
    after_write = attention.op(**arguments)
    rows = []
    for i in range(width):
        step = _row(alone, ("q", "k", "v"), i)
        rows.append(attention.op(**step))
        _write(step)
    assert torch.equal(before_write, torch.cat(rows))
    assert torch.equal(after_write, torch.cat(rows))


@DTYPES
@pytest.mark.parametrize("num_rows", [8, 13])
def test_attention_ignores_padding(num_rows: int, dtype: torch.dtype):
    attention = plugins()["sink_attention"]
    padded = _attention(num_rows, dtype, torch.Generator().manual_seed(0), 11, 6)
    count = num_rows - 2
    padded["num_tokens"] = step_arguments(0, count)["num_tokens"]
    exact = padded | {name: padded[name][:count].clone() for name in "qkv"}
    for name in "qkv":
        padded[name][count:] = 100.0
    out = attention.op(**padded)
    assert torch.equal(out[:count], attention.op(**exact))
    assert torch.count_nonzero(out[count:]) == 0
