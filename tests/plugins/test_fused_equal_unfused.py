"""Fused operators have the bits of what they replace; collectives add up what the ranks hold."""

import copy
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from oracles import to_float64
from oracles_fused import ORACLES_FUSED
from torch import Tensor

from inkrt.plugins.caseutil import int32, integers, normal, step_arguments
from inkrt.plugins.registry import Arguments, Case, plugins
from inkrt.plugins.sample.op import sampling_arguments

DTYPES = (torch.float32, torch.bfloat16)
OPS: dict[str, Callable[..., Any]] = {name: plugin.op for name, plugin in plugins().items()}


def _moe(
    x, router_weight, router_bias, gate_up, gate_up_scales, gate_up_global_scale, down,
    down_scales, down_global_scale, rank, top_k, route_scale, gate_softcap, up_softcap, partial,
):  # fmt: skip
    weights, ids = OPS["router"](x, router_weight, router_bias, top_k, route_scale)
    return OPS["experts"](
        x, weights, ids, gate_up, gate_up_scales, gate_up_global_scale, down, down_scales,
        down_global_scale, rank, gate_softcap, up_softcap, partial,
    )  # fmt: skip


def _project(x, weight, scales, global_scale, partial):
    if scales is None:
        return OPS["linear"](x, weight, partial)
    return OPS["linear_nvfp4"](x, weight, scales, global_scale, partial)


def _lm_head_sample(
    x, weight, scales, global_scale, vocab_size, cap, logits_dtype, temperature, top_k, top_p,
    min_p, seed, position, num_tokens, last_row, tp_size,
):  # fmt: skip
    shard = _project(x, weight, scales, global_scale, logits_dtype == torch.float32)
    logits = OPS["all_gather"](shard, tp_size)[:, :vocab_size].contiguous()
    if cap:
        logits = OPS["softcap"](logits, cap)
    tokens = OPS["sample"](
        logits, temperature, top_k, top_p, min_p, seed, position, num_tokens, last_row
    )
    return tokens, logits


def _qkv_post(
    q, k, v, rel, q_scale, rel_scale, k_conv_weight, v_conv_weight, k_dynamic, v_dynamic,
    k_conv_state, v_conv_state, k_cache, v_cache, page_table, position, num_tokens, slot,
    qk_threshold, rel_threshold, log_n_floor, log_alpha, eps,
):  # fmt: skip
    step = (position, num_tokens, slot)
    num_rows, (num_kv, head_size) = len(q), k_cache.shape[2:]
    q = OPS["l2_clip"](q.view(num_rows, *q_scale.shape), q_scale, qk_threshold)
    rel = OPS["l2_clip"](rel.view(num_rows, *rel_scale.shape), rel_scale, rel_threshold)
    if log_n_floor:
        q = OPS["log_scale"](q, position, log_n_floor, log_alpha)
        rel = OPS["log_scale"](rel, position, log_n_floor, log_alpha)
    if k_dynamic is None:
        k = OPS["short_conv"](k, k_conv_weight, k_conv_state, *step)
        v = OPS["short_conv"](v, v_conv_weight, v_conv_state, *step)
    else:
        k = OPS["dynamic_short_conv"](k, k_conv_weight, k_dynamic, k_conv_state, *step)
        v = OPS["dynamic_short_conv"](v, v_conv_weight, v_dynamic, v_conv_state, *step)
    k = OPS["l2_clip"](k.view(num_rows, num_kv, head_size), None, qk_threshold)
    v = OPS["rms_norm"](v.view(num_rows, num_kv, head_size), None, eps, v.dtype)
    OPS["kv_write"](k, v, k_cache, v_cache, page_table, *step)
    return q, k, v, rel


def _allreduce_conv_mix(
    partial, conv_weight, conv_state, position, num_tokens, slot, residual, sources, queries,
    norm_weights, mix_eps, norm_eps, residual_dtype, dtype, tp_size,
):  # fmt: skip
    assert tp_size == 1
    update = OPS["short_conv"](partial, conv_weight, conv_state, position, num_tokens, slot)
    out = OPS["residual_add"](residual, update, residual_dtype)
    mixed = OPS["residual_mix"]([*sources, out], queries, mix_eps)
    rows = [
        OPS["rms_norm"](mixed[i], weight, norm_eps, dtype) for i, weight in enumerate(norm_weights)
    ]
    return out, torch.stack(rows) if rows else mixed


def _linear_group(xs, weights, input_of):
    return [OPS["linear"](xs[i], w, False) for i, w in zip(input_of, weights, strict=True)]


def _linear_group_quantized(xs, weights, codes, scales, global_scales, input_of):
    inputs = [xs[i] for i in input_of]
    outs = [OPS["linear"](x, w, False) for x, w in zip(inputs, weights, strict=False)]
    for number, x in enumerate(inputs[len(weights) :]):
        parts = [codes[number], scales[number]]
        name = "linear_nvfp4" if global_scales else "linear_mxfp8"
        outs.append(OPS[name](x, *parts, *global_scales[number : number + 1], False))
    return outs


def _linear_conv_mix(x, weight, tp_size, **of_mix):
    return OPS["allreduce_conv_mix"](
        OPS["linear"](x, weight, tp_size > 1), tp_size=tp_size, **of_mix
    )


def _moe_conv_mix(**arguments):
    names = [argument.name for argument in OPS["moe"]._schema.arguments]
    of_moe = {name: arguments.pop(name) for name in names if name != "partial"}
    partial = OPS["moe"](**of_moe, partial=arguments["tp_size"] > 1)
    return OPS["allreduce_conv_mix"](partial, **arguments)


UNFUSED = {
    "linear_conv_mix": _linear_conv_mix,
    "moe_conv_mix": _moe_conv_mix,
    "linear_group_quantized": _linear_group_quantized,
    "linear_group": _linear_group,
    "moe": _moe,
    "lm_head_sample": _lm_head_sample,
    "qkv_post": _qkv_post,
    "allreduce_conv_mix": _allreduce_conv_mix,
}
CASES = [
    pytest.param(name, case, dtype, id=f"{name}/{case.name}/{str(dtype)[6:]}")
    for name in UNFUSED
    for case in plugins()[name].cases()
    for dtype in DTYPES
]


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _assert_equal_bits(got: Any, expected: Any) -> None:
    got, expected = _tuple(got), _tuple(expected)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def _relative_error(got: Tensor, expected: Tensor) -> float:
    difference = torch.linalg.vector_norm(got.double() - expected)
    return float(difference / torch.linalg.vector_norm(expected))


@pytest.mark.parametrize(("name", "case", "dtype"), CASES)
def test_fused_has_the_bits_of_unfused(name: str, case: Case, dtype: torch.dtype):
    seed = zlib.crc32(case.name.encode())
    fused = case.arguments(dtype, torch.Generator().manual_seed(seed))
    unfused = copy.deepcopy(fused)
    _assert_equal_bits(OPS[name](**fused), UNFUSED[name](**unfused))
    for mutated in plugins()[name].mutates:
        assert torch.equal(fused[mutated], unfused[mutated]), mutated


def _run_ranks(name: str, ranks: Sequence[Arguments]) -> list[Any]:
    """One call of a collective on every rank: all payloads first, then every rank combines."""
    collective = plugins()[name].collective
    assert collective is not None
    payloads = [collective.payload(**arguments) for arguments in ranks]
    return [collective.combine(payloads, **arguments) for arguments in ranks]


num_ranks = pytest.mark.parametrize("tp_size", [2, 4])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
widths = pytest.mark.parametrize("num_rows", [1, 5, 11])


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(21)


@num_ranks
@dtypes
@widths
def test_all_reduce_adds_in_float32_and_rounds_once(
    num_rows: int, dtype: torch.dtype, tp_size: int
):
    generator = _generator()
    parts = [normal(generator, torch.float32, num_rows, 57) for _ in range(tp_size)]
    kept = copy.deepcopy(parts)
    results = _run_ranks(
        "all_reduce", [{"x": x, "dtype": dtype, "tp_size": tp_size} for x in parts]
    )
    exact = torch.stack(parts).double().sum(dim=0)
    in_order = parts[0]
    for part in parts[1:]:
        in_order = in_order + part
    for result in results:
        assert result.dtype == dtype
        assert torch.equal(result, in_order.to(dtype))
        # Rounding the float64 sum to bfloat16 errs as much, so the sum itself is not at fault.
        bound = {torch.float32: 2e-7, torch.bfloat16: 3e-3}[dtype]
        assert _relative_error(result, exact) <= bound
    assert all(torch.equal(a, b) for a, b in zip(parts, kept, strict=True))


@num_ranks
@dtypes
def test_all_gather_joins_in_rank_order(dtype: torch.dtype, tp_size: int):
    whole = normal(_generator(), dtype, 5, 12 * tp_size)
    parts = whole.chunk(tp_size, dim=1)
    for result in _run_ranks("all_gather", [{"x": x, "tp_size": tp_size} for x in parts]):
        assert torch.equal(result, whole)


@num_ranks
@dtypes
@widths
@pytest.mark.parametrize("moe_split", ["experts", "width"])
def test_sharded_experts_add_up_to_the_whole(
    moe_split: str, num_rows: int, dtype: torch.dtype, tp_size: int
):
    generator = _generator()
    width, num_hidden, num_experts = 40, 24, 12
    whole: Arguments = {
        "x": normal(generator, dtype, num_rows, width),
        "router_weight": normal(generator, torch.float32, num_experts, width, scale=0.2),
        "router_bias": normal(generator, torch.float32, num_experts, scale=0.1),
        "gate_up": normal(generator, dtype, num_experts, 2 * num_hidden, width, scale=0.2),
        "gate_up_scales": None,
        "gate_up_global_scale": None,
        "down": normal(generator, dtype, num_experts, width, num_hidden, scale=0.2),
        "down_scales": None,
        "down_global_scale": None,
        "rank": None,
        "top_k": 3,
        "route_scale": 8.0,
        "gate_softcap": 4.0,
        "up_softcap": 25.0,
        "partial": True,
    }
    if moe_split == "experts":
        shares = [
            {"gate_up": gate_up, "down": down, "rank": int32(rank)}
            for rank, (gate_up, down) in enumerate(
                zip(whole["gate_up"].chunk(tp_size), whole["down"].chunk(tp_size), strict=True)
            )
        ]
    else:
        gates, ups = (half.chunk(tp_size, dim=1) for half in whole["gate_up"].chunk(2, dim=1))
        downs = whole["down"].chunk(tp_size, dim=2)
        shares = [
            {"gate_up": torch.cat([gate, up], dim=1), "down": down}
            for gate, up, down in zip(gates, ups, downs, strict=True)
        ]
    parts = [OPS["moe"](**whole | share) for share in shares]
    assert all(part.dtype == torch.float32 for part in parts)
    ranks = [{"x": part, "dtype": torch.float32, "tp_size": tp_size} for part in parts]
    (exact,), _ = ORACLES_FUSED["moe"](**{name: to_float64(a) for name, a in whole.items()})
    bound = {torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    for result in _run_ranks("all_reduce", ranks):
        assert _relative_error(result, exact) <= bound
        if moe_split == "experts":  # the roundings of a single rank, other orders of addition
            single = OPS["moe"](**whole | {"partial": False})
            near = {torch.float32: 1e-6, torch.bfloat16: 1e-7}[dtype]
            rounded = result.to(dtype)
            assert _relative_error(rounded, single) <= near


@num_ranks
@dtypes
@widths
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_sharded_head_equals_the_whole(
    temperature: float, num_rows: int, dtype: torch.dtype, tp_size: int
):
    generator = _generator()
    vocab_size, shard_rows = 45, 12 if tp_size == 4 else 24
    # Small whole numbers: every product and sum is exact, so shards have the bits of the whole.
    weight = (integers(generator, 7, tp_size * shard_rows, 13) - 3).to(dtype)
    weight[vocab_size:] = 50
    whole: Arguments = {
        "x": (integers(generator, 3, num_rows, 13) - 1).to(dtype),
        "weight": weight,
        "scales": None,
        "global_scale": None,
        "vocab_size": vocab_size,
        "cap": 30.0,
        "logits_dtype": dtype,
        **sampling_arguments(temperature=temperature, top_k=30, top_p=0.95, seed=3),
        "position": int32(9),
        "num_tokens": int32(num_rows),
        "last_row": False,
        "tp_size": 1,
    }
    expected = OPS["lm_head_sample"](**whole)
    shards = weight.chunk(tp_size)
    ranks = [{**whole, "weight": shard, "tp_size": tp_size} for shard in shards]
    for result in _run_ranks("lm_head_sample", ranks):
        _assert_equal_bits(result, expected)
    assert expected[1].shape == (num_rows, vocab_size)
    assert int(expected[0].max()) < vocab_size


@num_ranks
@dtypes
@widths
def test_reduced_boundary_equals_all_reduce_and_boundary(
    num_rows: int, dtype: torch.dtype, tp_size: int
):
    generator = _generator()
    width = 33
    parts = [normal(generator, torch.float32, num_rows, width) for _ in range(tp_size)]
    shared: Arguments = {
        "conv_weight": normal(generator, torch.float32, width, 4),
        **step_arguments(14, num_rows, slot=1),
        "residual": normal(generator, dtype, num_rows, width),
        "sources": [normal(generator, dtype, num_rows, width) for _ in range(3)],
        "queries": normal(generator, torch.float32, 3, width),
        "norm_weights": [normal(generator, dtype, width) for _ in range(3)],
        "mix_eps": 1e-6,
        "norm_eps": 1e-4,
        "residual_dtype": torch.float32,
        "dtype": dtype,
    }
    state = normal(generator, dtype, 2, 16, width)
    ranks = [
        {**shared, "partial": part, "conv_state": state.clone(), "tp_size": tp_size}
        for part in parts
    ]
    results = _run_ranks("allreduce_conv_mix", ranks)

    sums = _run_ranks("all_reduce", [{"x": x, "dtype": dtype, "tp_size": tp_size} for x in parts])
    single = {**shared, "partial": sums[0], "conv_state": state.clone(), "tp_size": 1}
    expected = _allreduce_conv_mix(**single)
    for result, arguments in zip(results, ranks, strict=True):
        _assert_equal_bits(result, expected)
        assert torch.equal(arguments["conv_state"], single["conv_state"])

    wide = {name: to_float64(value) for name, value in single.items()}
    wide |= {"partial": torch.stack(parts).double().sum(dim=0), "conv_state": state.double()}
    exact, _ = ORACLES_FUSED["allreduce_conv_mix"](**wide)
    bound = {torch.float32: 2e-6, torch.bfloat16: 6e-3}[dtype]
    for got, reference in zip(results[0], exact, strict=True):
        assert _relative_error(got, reference) <= bound
