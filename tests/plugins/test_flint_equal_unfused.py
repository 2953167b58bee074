"""Flint's fused operators have the bits of what they replace, and ranks' parts add up."""

import copy
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import to_float64
from oracles_flint import ORACLES_FLINT
from torch import Tensor

from inkrt.plugins.caseutil import int32, normal, weight_arguments
from inkrt.plugins.registry import Arguments, Case, plugins
from inkrt.plugins.sample.op import sampling_arguments

DTYPES = (torch.float32, torch.bfloat16)
OPS: dict[str, Callable[..., Any]] = {name: plugin.op for name, plugin in plugins().items()}


def _project(x, weight, scales, global_scale, partial=False):
    if scales is None:
        return OPS["linear"](x, weight, partial)
    return OPS["linear_nvfp4"](x, weight, scales, global_scale, partial)


def _norm_qkv_rope(
    x, delta, norm_weight, qkv, qkv_scales, qkv_global_scale, q_norm, k_norm, k_cache, v_cache,
    page_table, position, num_tokens, slot, eps, rope_theta,
):  # fmt: skip
    residual, z = OPS["add_rms_norm"](x, delta, norm_weight, eps, x.dtype)
    rows = _project(z, qkv, qkv_scales, qkv_global_scale)
    num_kv, head_dim = k_cache.shape[2:]
    q_width = rows.shape[1] - 2 * num_kv * head_dim
    q, k, v = rows.split([q_width, num_kv * head_dim, num_kv * head_dim], dim=1)
    q, k, v = (part.view(len(x), -1, head_dim) for part in (q, k, v))
    q = OPS["rms_norm"](q, q_norm, eps, x.dtype)
    k = OPS["rms_norm"](k, k_norm, eps, x.dtype)
    if rope_theta:
        q, k = (OPS["rope"](part, position, rope_theta) for part in (q, k))
    OPS["kv_write"](k, v, k_cache, v_cache, page_table, position, num_tokens, slot)
    return residual, q, k, v


def _norm_router_shared(
    x, delta, norm_weight, router, shared_gate_up, shared_gate_up_scales,
    shared_gate_up_global_scale, eps,
):  # fmt: skip
    residual, z = OPS["add_rms_norm"](x, delta, norm_weight, eps, x.dtype)
    gate_up = _project(z, shared_gate_up, shared_gate_up_scales, shared_gate_up_global_scale)
    return residual, z, OPS["linear"](z, router, False), OPS["silu_mul"](gate_up)


def _flint_moe(
    x, logits, shared, gate_up, gate_up_scales, gate_up_global_scale, down, down_scales,
    down_global_scale, shared_down, shared_down_scales, shared_down_global_scale, rank, top_k,
    partial,
):  # fmt: skip
    weights, ids = OPS["router_top_k"](logits, top_k)
    routed = OPS["swiglu_experts"](
        x, weights, ids, gate_up, gate_up_scales, gate_up_global_scale, down, down_scales,
        down_global_scale, rank, partial,
    )  # fmt: skip
    other = _project(shared, shared_down, shared_down_scales, shared_down_global_scale, partial)
    return OPS["residual_add"](routed, other, torch.float32 if partial else x.dtype)


def _dense_mlp(
    x, delta, norm_weight, gate_up, gate_up_scales, gate_up_global_scale, down, down_scales,
    down_global_scale, eps, partial,
):  # fmt: skip
    residual, z = OPS["add_rms_norm"](x, delta, norm_weight, eps, x.dtype)
    hidden = OPS["silu_mul"](_project(z, gate_up, gate_up_scales, gate_up_global_scale))
    return residual, _project(hidden, down, down_scales, down_global_scale, partial)


def _flint_layers(
    x, delta, page_table, position, num_tokens, slot, windows, rope_thetas, eps, scale, top_k,
    **lists,
):  # fmt: skip
    for index, window in enumerate(windows):
        layer = {name: values[index] for name, values in lists.items()}

        def matrix(name, of=layer):
            return of[name], of[f"{name}_scales"], of[f"{name}_global_scale"]

        where = (
            layer["k_cache"], layer["v_cache"], None if window else page_table,
            position, num_tokens, slot,
        )  # fmt: skip
        x, q, k, v = _norm_qkv_rope(
            x, delta, layer["input_norm"], *matrix("qkv"), layer["q_norm"], layer["k_norm"],
            *where, eps, rope_thetas[index],
        )  # fmt: skip
        heads = OPS["sink_attention"](q, k, v, layer["sinks"], *where, window, scale)
        delta = OPS["linear_nvfp4"](heads.flatten(1), *matrix("o"), False)
        x, z, logits, shared = _norm_router_shared(
            x, delta, layer["mlp_norm"], layer["router"], *matrix("shared_gate_up"), eps
        )
        delta = _flint_moe(
            z, logits, shared, *matrix("gate_up"), *matrix("down"), *matrix("shared_down"),
            None, top_k, False,
        )  # fmt: skip
    return x, delta


UNFUSED = {
    "norm_qkv_rope": _norm_qkv_rope,
    "norm_router_shared": _norm_router_shared,
    "flint_moe": _flint_moe,
    "dense_mlp": _dense_mlp,
    "flint_layers": _flint_layers,
}
CASES = [
    pytest.param(name, case, dtype, id=f"{name}/{case.name}/{str(dtype)[6:]}")
    for name in UNFUSED
    for case in plugins()[name].cases()
    for dtype in DTYPES
]


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


@pytest.mark.parametrize(("name", "case", "dtype"), CASES)
def test_fused_has_the_bits_of_unfused(name: str, case: Case, dtype: torch.dtype):
    seed = zlib.crc32(case.name.encode())
    fused = case.arguments(dtype, torch.Generator().manual_seed(seed))
    unfused = copy.deepcopy(fused)
    got, expected = _tuple(OPS[name](**fused)), _tuple(UNFUSED[name](**unfused))
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    for mutated in plugins()[name].mutates:
        pairs = zip(_tuple(fused[mutated]), _tuple(unfused[mutated]), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), mutated


num_ranks = pytest.mark.parametrize("tp_size", [2, 4])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
forms = pytest.mark.parametrize("quantized", [False, True], ids=["plain", "nvfp4"])


def _relative_error(got: Tensor, expected: Tensor) -> float:
    difference = torch.linalg.vector_norm(got.double() - expected)
    return float(difference / torch.linalg.vector_norm(expected))


def _columns(value: Tensor | None, rank: int, tp_size: int) -> Tensor | None:
    """A rank's share of the last dimension, of codes and scales as well."""
    return None if value is None else value.chunk(tp_size, dim=-1)[rank].contiguous()


def _gated_rows(value: Tensor | None, rank: int, tp_size: int) -> Tensor | None:
    """A rank's share of the gates and of the ups, dimension -2."""
    if value is None:
        return None
    halves = [half.chunk(tp_size, dim=-2)[rank] for half in value.chunk(2, dim=-2)]
    return torch.cat(halves, dim=-2)


@num_ranks
@dtypes
@forms
@pytest.mark.parametrize("num_rows", [1, 5, 11])
@pytest.mark.parametrize("moe_split", ["experts", "width"])
def test_sharded_moe_adds_up_to_the_whole(
    moe_split: str, num_rows: int, quantized: bool, dtype: torch.dtype, tp_size: int
):
    g = torch.Generator().manual_seed(7)
    width, hidden, num_experts = 32, 64, 8

    def weight(name: str, *shape: int) -> Arguments:
        return weight_arguments(name, g, dtype, *shape, scale=0.15, quantized=quantized)

    gate_up = weight("gate_up", num_experts, 2 * hidden, width)
    down = weight("down", num_experts, width, hidden)
    shared_down = weight("shared_down", width, hidden)
    whole: Arguments = {
        "x": normal(g, dtype, num_rows, width),
        "logits": normal(g, dtype, num_rows, num_experts),
        "shared": normal(g, dtype, num_rows, hidden),
        **gate_up,
        **down,
        **shared_down,
        "rank": None,
        "top_k": 3,
        "partial": True,
    }
    parts = []
    for rank in range(tp_size):
        share = whole | {"shared": _columns(whole["shared"], rank, tp_size)}
        share |= {
            name: value if "global" in name else _columns(value, rank, tp_size)
            for name, value in shared_down.items()
        }
        if moe_split == "experts":
            share["rank"] = int32(rank)
            share |= {
                name: None if value is None else value.chunk(tp_size)[rank]
                for name, value in {**gate_up, **down}.items()
            }
        else:
            for of_weight, cut in ((gate_up, _gated_rows), (down, _columns)):
                share |= {
                    name: value if "global" in name else cut(value, rank, tp_size)
                    for name, value in of_weight.items()
                }
        parts.append(OPS["flint_moe"](**share))
    assert all(part.dtype == torch.float32 for part in parts)
    (exact,), _ = ORACLES_FLINT["flint_moe"](**{k: to_float64(v) for k, v in whole.items()})
    total = torch.stack(parts).double().sum(dim=0)
    assert _relative_error(total, exact) <= {torch.float32: 1e-6, torch.bfloat16: 5e-3}[dtype]


@num_ranks
@dtypes
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_sharded_nvfp4_head_equals_the_whole(temperature: float, dtype: torch.dtype, tp_size: int):
    g = torch.Generator().manual_seed(8)
    vocab_size, shard_rows = 45, 12 if tp_size == 4 else 24
    weight = weight_arguments(
        "weight", g, dtype, tp_size * shard_rows, 32, scale=0.5, quantized=True
    )
    # The padding rows of the last shard would win, but are never drawn.
    weight["weight"][vocab_size:] = 0x77
    whole: Arguments = {
        "x": normal(g, dtype, 5, 32),
        **weight,
        "vocab_size": vocab_size,
        "cap": 0.0,
        "logits_dtype": torch.float32,
        **sampling_arguments(temperature=temperature, top_k=30, top_p=0.95, seed=3),
        "position": int32(9),
        "num_tokens": int32(5),
        "last_row": False,
        "tp_size": 1,
    }
    expected = OPS["lm_head_sample"](**whole)
    collective = plugins()["lm_head_sample"].collective
    ranks = [
        whole | {"weight": codes, "scales": scales, "tp_size": tp_size}
        for codes, scales in zip(
            weight["weight"].chunk(tp_size), weight["scales"].chunk(tp_size), strict=True
        )
    ]
    payloads = [collective.payload(**arguments) for arguments in ranks]
    for arguments in ranks:
        tokens, logits = collective.combine(payloads, **arguments)
        assert torch.equal(tokens, expected[0])
        torch.testing.assert_close(logits, expected[1], rtol=1e-5, atol=1e-5)
    assert int(expected[0].max()) < vocab_size
