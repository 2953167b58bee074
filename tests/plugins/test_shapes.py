"""Messages of the build-time checks, and where state keeps a position."""

import pytest
import torch

from inkrt.errors import BuildError
from inkrt.plugins.caseutil import int32, step_arguments
from inkrt.plugins.kv_write.op import kv_write
from inkrt.plugins.registry import plugins
from inkrt.plugins.shapes import MODEL_DTYPES, Axes
from inkrt.plugins.state import locate, with_older_rows, write_step

NEXT_STEP = "; correct the module or the configuration that makes this call"


def _message(action) -> str:
    with pytest.raises(BuildError) as caught:
        action()
    return str(caught.value)


def test_axis_keeps_its_size():
    axes = Axes("linear")
    axes.fit("x", torch.empty(3, 5), "T", "K")
    axes.fit("weight", torch.empty(7, 5), "N", "K")
    assert (axes["T"], axes["K"], axes["N"]) == (3, 5, 7)
    assert _message(lambda: axes.fit("weight", torch.empty(7, 6), "M", "K")) == (
        "ink::linear: weight has shape [7, 6], expected [M, K=5]" + NEXT_STEP
    )
    # A refused tensor binds nothing.
    assert "M" not in axes.sizes


def test_rank_and_leading_dimensions():
    axes = Axes("rms_norm")
    axes.fit("x", torch.empty(2, 3, 5), "...", "D")
    assert axes["D"] == 5
    assert _message(lambda: axes.fit("y", torch.empty(()), "...", "D")) == (
        "ink::rms_norm: y has shape [], expected [..., D=5]" + NEXT_STEP
    )
    assert _message(lambda: axes.fit("slot", torch.empty(2), 1)) == (
        "ink::rms_norm: slot has shape [2], expected [1]" + NEXT_STEP
    )


def test_dtype():
    axes = Axes("embedding")
    tokens = torch.empty(3, dtype=torch.int64)
    assert _message(lambda: axes.fit("tokens", tokens, "T", dtype=torch.int32)) == (
        "ink::embedding: tokens has dtype int64, expected int32" + NEXT_STEP
    )
    assert _message(lambda: axes.fit("table", tokens, "T", dtype=MODEL_DTYPES)) == (
        "ink::embedding: table has dtype int64, expected float32 or bfloat16" + NEXT_STEP
    )


def _build(name: str, **changes: object) -> str:
    plugin = plugins()[name]
    arguments = plugin.cases()[0].arguments(torch.float32, torch.Generator().manual_seed(0))
    on_meta = {
        key: value.to("meta") if isinstance(value, torch.Tensor) else value
        for key, value in (arguments | changes).items()
    }
    return _message(lambda: plugin.op(**on_meta)).removesuffix(NEXT_STEP)


def test_conditions_between_arguments():
    assert _build("short_conv", state=torch.empty(1, 2, 7)) == (
        "ink::short_conv: state keeps 2 positions, expected at least W-1=3"
    )
    assert _build("dynamic_short_conv", dynamic_weight=torch.empty(1, 8)) == (
        "ink::dynamic_short_conv: dynamic_weight has 8 columns, expected W=4 for each of a number "
        "of heads that divides C=15"
    )
    assert _build("relative_attention", window=0) == (
        "ink::relative_attention: window is 0 (all keys) on a ring cache, expected a page table"
    )
    assert _build("relative_attention", window=10) == (
        "ink::relative_attention: k_cache keeps 8 positions, expected at least window-1=9"
    )
    assert _build("residual_mix", sources=[]) == (
        "ink::residual_mix: sources is empty, expected at least one tensor"
    )
    assert _build("rms_norm", x=torch.empty(55)) == (
        "ink::rms_norm: x has shape [55], expected a row dimension before the last"
    )
    assert _build("l2_clip", threshold=0.0) == "ink::l2_clip: threshold is 0.0, expected > 0"


def test_ring_and_page_addresses():
    positions = torch.tensor([0, 4, 5, 13])
    slots, rows = locate(torch.empty(3, 5, 1), positions, int32(2), None)
    assert slots.tolist() == [2, 2, 2, 2]
    assert rows.tolist() == [0, 4, 0, 3]
    pages, rows = locate(torch.empty(9, 5, 1), positions, int32(2), int32(8, 1, 6))
    assert pages.tolist() == [8, 8, 1, 6]
    assert rows.tolist() == [0, 4, 0, 3]


def test_ring_keeps_the_last_rows_of_a_wide_step():
    ring = torch.full((2, 3, 1), -1.0)
    rows = torch.arange(8.0)[:, None]
    step = step_arguments(position=2, num_tokens=7, slot=1)
    write_step(ring, rows, **step)
    # Positions 6, 7, 8 hold rows 4, 5, 6.
    assert ring[1, :, 0].tolist() == [4.0, 5.0, 6.0]
    assert ring[0, :, 0].tolist() == [-1.0] * 3
    inputs = with_older_rows(ring, rows[:1], 3, int32(9), int32(1))
    assert inputs[:, 0].tolist() == [4.0, 5.0, 6.0, 0.0]
    inputs = with_older_rows(ring, rows[:1], 3, int32(1), int32(1))
    assert inputs[:, 0].tolist() == [0.0, 0.0, 4.0, 0.0]


def test_page_table_that_is_too_short():
    rows = torch.zeros(1, 2, 7)
    pages = torch.zeros(4, 5, 2, 7)
    with pytest.raises(IndexError):
        kv_write(rows, rows, pages, pages.clone(), int32(1, 2), **step_arguments(10, 1))
