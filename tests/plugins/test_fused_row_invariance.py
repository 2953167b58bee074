"""In steps of at most eight tokens a row has the same bits whatever the number of rows."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from inkrt.plugins.caseutil import (
    int32,
    mxfp8_arguments,
    normal,
    shuffled_pages,
    weight_arguments,
)
from inkrt.plugins.experts.op import WeightForm, expert_arguments
from inkrt.plugins.registry import MAX_VERIFY_TOKENS, Arguments, plugins
from inkrt.plugins.sample.op import sampling_arguments

# Each maker gives the arguments that do not depend on the step, the arguments with one row per
# token, and the dimension that counts tokens in each output.
Setup = tuple[Arguments, Arguments, tuple[int, ...]]
ROWS = MAX_VERIFY_TOKENS
FIRST_POSITION = 13  # so that rings of 16 wrap within the step


def _router(dtype: torch.dtype, g: torch.Generator) -> Setup:
    fixed = {
        "weight": normal(g, torch.float32, 129, 203, scale=0.07),
        "bias": normal(g, torch.float32, 129, scale=0.1),
        "top_k": 8,
        "scale": 8.0,
    }
    return fixed, {"x": normal(g, dtype, ROWS, 203)}, (0, 0)


def _expert_weights(dtype: torch.dtype, g: torch.Generator) -> Arguments:
    return {
        "gate_up": normal(g, dtype, 5, 2 * 71, 203, scale=0.1),
        "gate_up_scales": None,
        "gate_up_global_scale": None,
        "down": normal(g, dtype, 5, 203, 71, scale=0.1),
        "down_scales": None,
        "down_global_scale": None,
        "rank": None,
        "gate_softcap": 4.0,
        "up_softcap": 25.0,
    }


def _experts(dtype: torch.dtype, g: torch.Generator, *, partial: bool = False) -> Setup:
    rows = {
        "x": normal(g, dtype, ROWS, 203),
        "routing_weights": torch.rand(ROWS, 3, generator=g),
        "expert_ids": torch.rand(ROWS, 5, generator=g).argsort(dim=1)[:, :3].int(),
    }
    return {**_expert_weights(dtype, g), "partial": partial}, rows, (0,)


def _experts_partial(dtype: torch.dtype, g: torch.Generator) -> Setup:
    return _experts(dtype, g, partial=True)


def _experts_quantized(form: WeightForm, dtype: torch.dtype, g: torch.Generator) -> Setup:
    fixed, rows, outputs = _experts(dtype, g)
    rows["x"] = normal(g, dtype, ROWS, 96)
    return {**fixed, **expert_arguments(g, dtype, 5, 96, 64, form)}, rows, outputs


def _moe(dtype: torch.dtype, g: torch.Generator) -> Setup:
    fixed = {
        **_expert_weights(dtype, g),
        "router_weight": normal(g, torch.float32, 5, 203, scale=0.07),
        "router_bias": normal(g, torch.float32, 5, scale=0.1),
        "top_k": 3,
        "route_scale": 8.0,
        "partial": False,
    }
    return fixed, {"x": normal(g, dtype, ROWS, 203)}, (0,)


def _softcap(dtype: torch.dtype, g: torch.Generator) -> Setup:
    return {"cap": 30.0}, {"x": normal(g, dtype, ROWS, 1003, scale=20)}, (0,)


def _all_reduce(dtype: torch.dtype, g: torch.Generator) -> Setup:
    return {"dtype": dtype, "tp_size": 1}, {"x": normal(g, torch.float32, ROWS, 203)}, (0,)


def _all_gather(dtype: torch.dtype, g: torch.Generator) -> Setup:
    return {"tp_size": 1}, {"x": normal(g, dtype, ROWS, 203)}, (0,)


SAMPLING = sampling_arguments(temperature=1.5, top_k=100, top_p=0.97, min_p=1e-4, seed=2**40 + 9)


def _sample(dtype: torch.dtype, g: torch.Generator) -> Setup:
    fixed = {**SAMPLING, "last_row": False}
    return fixed, {"logits": normal(g, torch.float32, ROWS, 1003, scale=4)}, (0,)


def _lm_head_sample(dtype: torch.dtype, g: torch.Generator) -> Setup:
    fixed = {
        "weight": normal(g, dtype, 517, 203, scale=0.3),
        "scales": None,
        "global_scale": None,
        "vocab_size": 509,
        "cap": 30.0,
        "logits_dtype": dtype,
        **SAMPLING,
        "last_row": False,
        "tp_size": 1,
    }
    return fixed, {"x": normal(g, dtype, ROWS, 203)}, (0, 0)


def _linear_group(dtype: torch.dtype, g: torch.Generator) -> Setup:
    weights = [normal(g, dtype, rows, 203, scale=0.07) for rows in (57, 16, 1)]
    xs = [normal(g, dtype, ROWS, 203) for _ in range(2)]
    return {"weights": weights, "input_of": [0, 1, 0]}, {"xs": xs}, (0, 0, 0)


def _linear_mxfp8(dtype: torch.dtype, g: torch.Generator) -> Setup:
    weight = mxfp8_arguments("w", g, dtype, 57, 224, scale=0.07)
    fixed = {"codes": weight["w"], "exponents": weight["w_scales"], "partial": False}
    return fixed, {"x": normal(g, dtype, ROWS, 224)}, (0,)


def _linear_group_quantized(dtype: torch.dtype, g: torch.Generator) -> Setup:
    made = [
        weight_arguments("w", g, dtype, rows, 208, scale=0.07, quantized=True) for rows in (57, 16)
    ]
    fixed: Arguments = {
        "weights": [normal(g, dtype, 3, 208, scale=0.07)],
        "codes": [weight["w"] for weight in made],
        "scales": [weight["w_scales"] for weight in made],
        "global_scales": [weight["w_global_scale"] for weight in made],
        "input_of": [1, 0, 1],
    }
    return fixed, {"xs": [normal(g, dtype, ROWS, 208) for _ in range(2)]}, (0, 0, 0)


def _qkv_post(dtype: torch.dtype, g: torch.Generator, *, dynamic: bool = False) -> Setup:
    heads, num_kv, size, rel_size, taps = 6, 3, 37, 5, 4
    channels = num_kv * size
    shape = (taps, channels) if dynamic else (channels, taps)
    weight_dtype = dtype if dynamic else torch.float32
    cache = (8, 4, num_kv, size) if dynamic else (2, 24, num_kv, size)
    fixed: Arguments = {
        "q_scale": normal(g, dtype, heads, size),
        "rel_scale": normal(g, dtype, heads, rel_size),
        "k_conv_weight": normal(g, weight_dtype, *shape),
        "v_conv_weight": normal(g, weight_dtype, *shape),
        "k_conv_state": normal(g, dtype, 2, 16, channels),
        "v_conv_state": normal(g, dtype, 2, 16, channels),
        "k_cache": normal(g, dtype, *cache),
        "v_cache": normal(g, dtype, *cache),
        "page_table": shuffled_pages(g, 8, 8) if dynamic else None,
        "qk_threshold": 5.0,
        "rel_threshold": 2.0,
        "log_n_floor": 15 if dynamic else 0,
        "log_alpha": 0.1,
        "eps": 1e-6,
    }
    rows = {
        "q": normal(g, dtype, ROWS, heads * size),
        "k": normal(g, dtype, ROWS, channels),
        "v": normal(g, dtype, ROWS, channels),
        "rel": normal(g, dtype, ROWS, heads * rel_size),
    }
    if dynamic:
        rows |= {
            "k_dynamic": normal(g, dtype, ROWS, num_kv * taps),
            "v_dynamic": normal(g, dtype, ROWS, num_kv * taps),
        }
    else:
        fixed |= {"k_dynamic": None, "v_dynamic": None}
    return fixed, rows, (0, 0, 0, 0)


def _qkv_post_dynamic(dtype: torch.dtype, g: torch.Generator) -> Setup:
    return _qkv_post(dtype, g, dynamic=True)


def _allreduce_conv_mix(dtype: torch.dtype, g: torch.Generator) -> Setup:
    fixed = {
        "conv_weight": normal(g, torch.float32, 203, 4),
        "conv_state": normal(g, dtype, 2, 16, 203),
        "queries": normal(g, torch.float32, 3, 203),
        "norm_weights": [normal(g, dtype, 203) for _ in range(3)],
        "mix_eps": 1e-6,
        "norm_eps": 1e-4,
        "residual_dtype": torch.float32,
        "dtype": dtype,
        "tp_size": 1,
    }
    rows = {
        "partial": normal(g, dtype, ROWS, 203),
        "residual": normal(g, dtype, ROWS, 203),
        "sources": [normal(g, dtype, ROWS, 203) for _ in range(4)],
    }
    return fixed, rows, (0, 1)


SETUPS: dict[str, Callable[[torch.dtype, torch.Generator], Setup]] = {
    "router": _router,
    "experts": _experts,
    "experts/partial": _experts_partial,
    "experts/nvfp4": partial(_experts_quantized, "nvfp4"),
    "experts/mxfp8": partial(_experts_quantized, "mxfp8"),
    "moe": _moe,
    "softcap": _softcap,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "sample": _sample,
    "linear_group": _linear_group,
    "linear_mxfp8": _linear_mxfp8,
    "linear_group_quantized": _linear_group_quantized,
    "lm_head_sample": _lm_head_sample,
    "qkv_post": _qkv_post,
    "qkv_post/dynamic": _qkv_post_dynamic,
    "allreduce_conv_mix": _allreduce_conv_mix,
}
STEP_NAMES = ("position", "num_tokens", "slot")


def _slice(value: Any, begin: int, end: int, width: int) -> Any:
    """Rows [begin, end), padded to `width` rows with large numbers that must not leak."""
    if isinstance(value, list):
        return [_slice(item, begin, end, width) for item in value]
    rows = value[begin:end]
    # Expert ids stay valid.
    padding = value[:1].expand(width - len(rows), *value.shape[1:]) * (
        100 if value.is_floating_point() else 1
    )
    return torch.cat([rows, padding])


def _run(name: str, setup: Setup, splits: list[int], width: int = 0) -> tuple[list[Tensor], ...]:
    """Outputs, joined over the steps, and state after running the rows in steps of given sizes."""
    plugin = plugins()[name.partition("/")[0]]
    fixed, rows, dims = setup
    fixed = {key: v.clone() if isinstance(v, Tensor) else v for key, v in fixed.items()}
    wanted = {a.name for a in plugin.op._schema.arguments}
    pieces: list[tuple[Tensor, ...]] = []
    begin = 0
    for size in splits:
        step = (int32(FIRST_POSITION + begin), int32(size), int32(1))
        arguments = {
            **fixed,
            **{key: _slice(v, begin, begin + size, width or size) for key, v in rows.items()},
            **{key: v for key, v in zip(STEP_NAMES, step, strict=True) if key in wanted},
        }
        outputs = plugin.op(**arguments)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        pieces.append(tuple(o.narrow(d, 0, size) for o, d in zip(outputs, dims, strict=True)))
        begin += size
    joined = [
        torch.cat(part, dim=d) for part, d in zip(zip(*pieces, strict=True), dims, strict=True)
    ]
    return joined, [fixed[key] for key in plugin.mutates]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SETUPS)
def test_rows_do_not_depend_on_the_width_of_the_step(name: str, dtype: torch.dtype):
    setup = SETUPS[name](dtype, torch.Generator().manual_seed(31))
    one_by_one = _run(name, setup, [1] * ROWS)
    for splits in ([8], [7, 1], [2, 6], [3, 5], [4, 4]):
        for got, expected in zip(_run(name, setup, splits), one_by_one, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), splits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SETUPS)
def test_padding_rows_change_neither_valid_rows_nor_state(name: str, dtype: torch.dtype):
    setup = SETUPS[name](dtype, torch.Generator().manual_seed(32))
    exact = _run(name, setup, [3, 5])
    padded = _run(name, setup, [3, 5], width=ROWS)
    for got, expected in zip(padded, exact, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
