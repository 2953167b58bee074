"""A row of a narrow step has the same bits whatever the step's width and the row's place in it.

Every operator runs once on T rows and then, from the same state, on one row after another.
"""

import copy
from collections.abc import Callable

import pytest
import torch

from inkrt.plugins.caseutil import int32, integers, normal, shuffled_pages, step_arguments
from inkrt.plugins.registry import Arguments, plugins

WIDTHS = (2, 3, 5, 8)
DTYPES = (torch.float32, torch.bfloat16)
Maker = Callable[[int, torch.dtype, torch.Generator], Arguments]


def _embedding(rows, dtype, g):
    return {"tokens": integers(g, 29, rows), "table": normal(g, dtype, 29, 57)}


def _rms_norm(rows, dtype, g):
    x = normal(g, dtype, rows, 1031)
    return {"x": x, "weight": normal(g, dtype, 1031), "eps": 1e-6, "dtype": dtype}


def _head_rms_norm(rows, dtype, g):
    return {"x": normal(g, dtype, rows, 3, 37), "weight": None, "eps": 1e-6, "dtype": dtype}


def _residual_add(rows, dtype, g):
    residual = normal(g, torch.float32, rows, 57)
    return {"residual": residual, "update": normal(g, dtype, rows, 57), "dtype": dtype}


def _residual_mix(rows, dtype, g):
    sources = [normal(g, dtype, rows, 331) for _ in range(9)]
    return {"sources": sources, "queries": normal(g, torch.float32, 3, 331), "eps": 1e-6}


def _linear(rows, dtype, g, partial=False):
    weight = normal(g, dtype, 213, 519, scale=0.05)
    return {"x": normal(g, dtype, rows, 519), "weight": weight, "partial": partial}


def _partial_linear(rows, dtype, g):
    return _linear(rows, dtype, g, partial=True)


def _l2_clip(rows, dtype, g):
    x = normal(g, dtype, rows, 5, 37)
    return {"x": x, "scale": normal(g, dtype, 5, 37), "threshold": 5.0}


def _log_scale(rows, dtype, g):
    x = normal(g, dtype, rows, 5, 37)
    return {"x": x, "position": int32(3), "n_floor": 5, "alpha": 0.1}


def _sigmoid_gate(rows, dtype, g):
    return {"x": normal(g, dtype, rows, 57), "gate": normal(g, dtype, rows, 57, scale=3.0)}


def _short_conv(rows, dtype, g):
    return {
        "x": normal(g, dtype, rows, 57),
        "weight": normal(g, torch.float32, 57, 4),
        "state": normal(g, dtype, 2, 11, 57),
        **step_arguments(7, rows, slot=1),
    }


def _dynamic_short_conv(rows, dtype, g):
    return {
        "x": normal(g, dtype, rows, 57),
        "static_weight": normal(g, dtype, 4, 57),
        "dynamic_weight": normal(g, dtype, rows, 3 * 4),
        "state": normal(g, dtype, 2, 11, 57),
        **step_arguments(7, rows, slot=1),
    }


def _kv_write(rows, dtype, g):
    return {
        "k": normal(g, dtype, rows, 2, 7),
        "v": normal(g, dtype, rows, 2, 7),
        "k_cache": normal(g, dtype, 2, 11, 2, 7),
        "v_cache": normal(g, dtype, 2, 11, 2, 7),
        "page_table": None,
        **step_arguments(7, rows, slot=1),
    }


def _unscaled_short_conv(rows, dtype, g):
    return _short_conv(rows, dtype, g) | {"is_scaled": False}


def _scale(rows, dtype, g):
    return {"x": normal(g, dtype, rows, 57), "factor": normal(g, dtype, 1), "divisor": 3.0}


def _chain_input(rows, dtype, g):
    return {
        "hidden": normal(g, dtype, rows, 57),
        "embedded": normal(g, dtype, rows, 57),
        "state": normal(g, dtype, 2, 16, 57),
        **step_arguments(2, rows, slot=1),
        "first_row": 4,
        "hidden_first": True,
    }


# Operator, maker of a step's arguments, names of those that have a row per token.
STEPS: dict[str, tuple[str, Maker, tuple[str, ...]]] = {
    "embedding": ("embedding", _embedding, ("tokens",)),
    "rms_norm": ("rms_norm", _rms_norm, ("x",)),
    "rms_norm of heads": ("rms_norm", _head_rms_norm, ("x",)),
    "residual_add": ("residual_add", _residual_add, ("residual", "update")),
    "residual_mix": ("residual_mix", _residual_mix, ("sources",)),
    "linear": ("linear", _linear, ("x",)),
    "partial linear": ("linear", _partial_linear, ("x",)),
    "l2_clip": ("l2_clip", _l2_clip, ("x",)),
    "log_scale": ("log_scale", _log_scale, ("x",)),
    "sigmoid_gate": ("sigmoid_gate", _sigmoid_gate, ("x", "gate")),
    "short_conv": ("short_conv", _short_conv, ("x",)),
    "dynamic_short_conv": ("dynamic_short_conv", _dynamic_short_conv, ("x", "dynamic_weight")),
    "kv_write": ("kv_write", _kv_write, ("k", "v")),
    "short_conv, unscaled": ("short_conv", _unscaled_short_conv, ("x",)),
    "scale": ("scale", _scale, ("x",)),
    "chain_input": ("chain_input", _chain_input, ("hidden", "embedded")),
}


def _row(arguments: Arguments, names: tuple[str, ...], i: int) -> Arguments:
    """Arguments of the one-row step for row i; state tensors are shared, not copied."""
    out = dict(arguments)
    for name in names:
        value = arguments[name]
        rows = [v[i : i + 1].clone() for v in (value if isinstance(value, list) else [value])]
        out[name] = rows if isinstance(value, list) else rows[0]
    if "position" in out:
        out["position"] = arguments["position"] + i
    if "num_tokens" in out:
        out["num_tokens"] = int32(1)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", STEPS)
def test_step_equals_single_rows(name: str, width: int, dtype: torch.dtype):
    op_name, make, row_names = STEPS[name]
    plugin = plugins()[op_name]
    arguments = make(width, dtype, torch.Generator().manual_seed(width))
    alone = copy.deepcopy(arguments)
    together = plugin.op(**arguments)
    rows = [plugin.op(**_row(alone, row_names, i)) for i in range(width)]
    if together is not None:
        row_dim = 1 if op_name == "residual_mix" else 0
        assert torch.equal(together, torch.cat(rows, dim=row_dim))
    for state in plugin.mutates:
        assert torch.equal(arguments[state], alone[state])


@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("name", ["short_conv", "dynamic_short_conv", "kv_write", "chain_input"])
def test_padding_changes_nothing(name: str, dtype: torch.dtype):
    op_name, make, row_names = STEPS[name]
    plugin = plugins()[op_name]
    padded = make(8, dtype, torch.Generator().manual_seed(8))
    padded["num_tokens"] = int32(3)
    exact = copy.deepcopy(padded) | {n: padded[n][:3].clone() for n in row_names}
    out, expected = plugin.op(**padded), plugin.op(**exact)
    if expected is not None:
        assert torch.equal(out[:3], expected)
    for state in plugin.mutates:
        assert torch.equal(padded[state], exact[state])


def _attention(rows, dtype, g, position, window, page_tokens):
    entries, max_pages = (9, 7) if window == 0 else (2, None)
    cache_rows = page_tokens if max_pages else window - 1 + max(WIDTHS)
    return {
        "q": normal(g, dtype, rows, 6, 37),
        "k": normal(g, dtype, rows, 2, 37),
        "v": normal(g, dtype, rows, 2, 37),
        "rel": normal(g, dtype, rows, 6, 16),
        "bank": normal(g, dtype, 16, window or 9),
        "sinks": normal(g, dtype, rows, 6),
        "k_cache": normal(g, dtype, entries, cache_rows, 2, 37),
        "v_cache": normal(g, dtype, entries, cache_rows, 2, 37),
        "page_table": shuffled_pages(g, entries, max_pages) if max_pages else None,
        **step_arguments(position, rows, slot=1),
        "window": window,
        "scale": 37**-0.5,
    }


ATTENTION_ROWS = ("q", "k", "v", "rel", "sinks")
WRITE_ARGUMENTS = ("k", "v", "k_cache", "v_cache", "page_table", "position", "num_tokens", "slot")


def _write(arguments: Arguments) -> None:
    plugins()["kv_write"].op(**{name: arguments[name] for name in WRITE_ARGUMENTS})


@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("position", "window"), [(0, 6), (3, 6), (40, 6), (1001, 33), (0, 0), (7, 0), (22, 0)]
)
def test_attention_equals_decode(position: int, window: int, width: int, dtype: torch.dtype):
    attention = plugins()["relative_attention"]
    g = torch.Generator().manual_seed(width)
    arguments = _attention(width, dtype, g, position, window, page_tokens=5)
    alone = copy.deepcopy(arguments)
    before_write = attention.op(**arguments)
    _write(arguments)
    after_write = attention.op(**arguments)

    rows = []
    for i in range(width):
        step = _row(alone, ATTENTION_ROWS, i)
        rows.append(attention.op(**step))
        _write(step)
    assert torch.equal(before_write, torch.cat(rows))
    assert torch.equal(after_write, torch.cat(rows))
    assert torch.equal(arguments["k_cache"], alone["k_cache"])
    assert torch.equal(arguments["v_cache"], alone["v_cache"])


@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
@pytest.mark.parametrize(("window", "width"), [(6, 8), (6, 3), (0, 8)])
def test_attention_behind_a_first_key_is_that_of_a_shorter_session(
    window: int, width: int, dtype: torch.dtype
):
    """Keys before the first are out of sight, whatever they hold; rows before it are zero."""
    attention = plugins()["relative_attention"]
    g = torch.Generator().manual_seed(width)
    arguments = _attention(width, dtype, g, 0, window, page_tokens=5) | {"sinks": None}
    late = attention.op(**arguments, first_key=2)
    assert torch.count_nonzero(late[:2]) == 0
    early = arguments | {name: arguments[name][2:].clone() for name in ("q", "k", "v", "rel")}
    early["num_tokens"] = int32(width - 2)
    assert torch.equal(late[2:], attention.op(**early))
    # A step that writes nothing has all of its rows.
    assert torch.equal(late, attention.op(**arguments | {"num_tokens": None}, first_key=2))


@pytest.mark.parametrize("name", ["short_conv", "chain_input"])
def test_a_step_without_a_count_writes_nothing(name: str):
    op_name, make, _ = STEPS[name]
    plugin = plugins()[op_name]
    arguments = make(5, torch.float32, torch.Generator().manual_seed(5))
    state = arguments["state"].clone()
    out = plugin.op(**arguments | {"num_tokens": None})
    assert torch.equal(arguments["state"], state)
    assert torch.equal(out, plugin.op(**arguments))
    assert not torch.equal(arguments["state"], state)
    if name == "chain_input":  # the last hidden row is not read
        short = arguments | {"state": state, "num_tokens": None}
        assert torch.equal(out, plugin.op(**short | {"hidden": arguments["hidden"][:4].clone()}))


@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))
@pytest.mark.parametrize("num_rows", [8, 13])
def test_attention_ignores_padding(num_rows: int, dtype: torch.dtype):
    attention = plugins()["relative_attention"]
    padded = _attention(num_rows, dtype, torch.Generator().manual_seed(0), 11, 6, page_tokens=5)
    padded["num_tokens"] = int32(num_rows - 2)
    changed = copy.deepcopy(padded)
    for name in ATTENTION_ROWS:
        changed[name][num_rows - 2 :] = 100.0
    exact = padded | {name: padded[name][: num_rows - 2].clone() for name in ATTENTION_ROWS}
    out = attention.op(**padded)
    assert torch.equal(out, attention.op(**changed))
    assert torch.equal(out[: num_rows - 2], attention.op(**exact))
    assert torch.count_nonzero(out[num_rows - 2 :]) == 0
    assert torch.count_nonzero(out[: num_rows - 2]) == out[: num_rows - 2].numel()
