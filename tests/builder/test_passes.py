"""What passes do to a tiny graph, as text and in bits.

The graph has a sliding layer, a full layer and, at the start of a residual block, a sliding layer;
in the 40-token step its ring is too short for the write to move ahead. After an intended change
write the snapshots anew, and read their difference:

    INK_UPDATE_SNAPSHOTS=1 pytest tests/builder/test_passes.py
"""

import difflib
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from graph_run import assert_same_run, copies, run_graph, step_inputs
from small_model import (
    DECODE,
    PREFILL40,
    VERIFY3,
    rank_states,
    rank_weights,
    small_graph,
)
from torch import Tensor

from inkrt.builder import dump
from inkrt.builder.passes import PASSES
from inkrt.builder.rewrite import calls
from inkrt.builder.trace import StepGraph
from inkrt.engines.interface import ring_tokens
from inkrt.errors import BuildError
from inkrt.runtime.engine_file import StepSpec

SNAPSHOTS = Path(__file__).with_name("snapshots")
STEPS = [DECODE, VERIFY3, PREFILL40]
# All steps and numbers of ranks; the other pairs would repeat their lines with other sizes.
SHOWN = [(DECODE, 1), (VERIFY3, 2), (PREFILL40, 2)]
# The package exports the function of the same name.
QKV_POST = import_module("inkrt.builder.passes.fuse_qkv_post")


def after_passes(graph: StepGraph) -> Iterator[tuple[str, StepGraph]]:
    """The graph after each pass; it is one graph that changes."""
    for run_pass in PASSES:
        graph = run_pass(graph)
        graph.module.graph.lint()
        yield run_pass.__name__, graph


def history(graph: StepGraph) -> str:
    """The traced graph, then the lines that each pass takes out (-) and puts in (+)."""
    before = dump.graph_text(graph).splitlines()
    lines = ["== traced", *before]
    for name, changed in after_passes(graph):
        after = dump.graph_text(changed).splitlines()
        lines.append(f"== {name}")
        changes = difflib.unified_diff(before, after, n=0, lineterm="")
        lines += [line for line in changes if not line.startswith(("---", "+++", "@@"))]
        before = after
    return "\n".join(lines) + "\n"


def assert_passes_keep_every_bit(
    graph: StepGraph,
    weights: list[dict[str, Tensor]],
    states: list[dict[str, Tensor]],
    inputs: dict[str, Tensor],
) -> None:
    """Outputs and state; on several ranks from the pass on that adds the ranks' parts up."""
    expected = None
    if len(states) == 1:
        written = copies(states)
        expected = (run_graph(graph, weights, written, inputs), written)
    for _, changed in after_passes(graph):
        if expected is None:
            written = copies(states)
            expected = (run_graph(changed, weights, written, inputs), written)
            for mine, other in zip(*expected[0], strict=True):
                assert torch.equal(mine, other)
        else:
            assert_same_run(changed, expected, weights, states, inputs)
    assert expected is not None
    assert all(torch.isfinite(output).all() for output in expected[0][0])
    for before, after in zip(states, expected[1], strict=True):
        assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("step", "tp_size"), SHOWN, ids=lambda value: getattr(value, "name", value)
)
def test_snapshots(step: StepSpec, tp_size: int) -> None:
    text = history(small_graph(step, tp_size))
    path = SNAPSHOTS / f"{step.name}.tp{tp_size}.txt"
    if os.environ.get("INK_UPDATE_SNAPSHOTS") == "1":
        path.write_text(text, encoding="utf-8")
    assert text.splitlines() == path.read_text(encoding="utf-8").splitlines()


def test_no_snapshot_is_left_over() -> None:
    shown = {f"{step.name}.tp{tp_size}.txt" for step, tp_size in SHOWN}
    assert {path.name for path in SNAPSHOTS.iterdir()} == shown


@pytest.mark.parametrize(("tp_size", "moe_split"), [(1, "experts"), (2, "experts"), (2, "width")])
@pytest.mark.parametrize(
    ("step", "num_tokens"),
    [(DECODE, 1), (VERIFY3, 3), (VERIFY3, 2), (PREFILL40, 40), (PREFILL40, 33)],
    ids=lambda value: getattr(value, "name", value),
)
def test_passes_keep_every_bit(
    checkpoint: Path, step: StepSpec, num_tokens: int, tp_size: int, moe_split: str
) -> None:
    """Outputs and state; on several ranks from the pass on that adds the ranks' parts up."""
    weights = rank_weights(checkpoint, tp_size, moe_split)
    states, inputs = rank_states(tp_size), step_inputs(step.num_tokens, num_tokens)
    graph = small_graph(step, tp_size, moe_split)
    assert_passes_keep_every_bit(graph, weights, states, inputs)


@pytest.mark.parametrize("moe_split", ["experts", "width"])
def test_ranks_compute_what_one_rank_does(checkpoint: Path, moe_split: str) -> None:
    """In float32 from an empty state, up to the order of additions."""
    results = {}
    for tp_size in (1, 2, 4):
        weights = rank_weights(checkpoint, tp_size, moe_split, torch.float32)
        states = rank_states(tp_size, torch.float32)
        for state in states:
            for value in state.values():
                value.zero_()
        graph = small_graph(PREFILL40, tp_size, moe_split, torch.float32)
        for _, changed in after_passes(graph):
            graph = changed
        outputs = run_graph(graph, weights, states, step_inputs(40, 40, position=0))
        results[tp_size] = outputs[0]
        for other in outputs[1:]:
            assert torch.equal(other[1], outputs[0][1])
    for tp_size in (2, 4):
        torch.testing.assert_close(results[tp_size][1], results[1][1], rtol=1e-4, atol=1e-4)
        assert torch.equal(results[tp_size][0], results[1][0])


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_no_pass_leaves_dead_code(step: StepSpec) -> None:
    graph = small_graph(step, 2)
    for name, changed in after_passes(graph):
        nodes = list(changed.module.graph.nodes)
        dead = [node.name for node in nodes if not node.users and not node.is_impure()]
        assert dead == [], name
        memory = {*changed.weights, *changed.state}
        assert all(node.users for node in nodes if node.name in memory)


def test_dead_code_goes_and_writes_stay() -> None:
    graph = small_graph(DECODE, 1)
    (write, *_) = calls(graph.module.graph, "kv_write")
    with graph.module.graph.inserting_before(write):
        dead = graph.module.graph.call_function(torch.ops.aten.alias.default, (write.args[0],))
    dead.meta["val"] = write.args[0].meta["val"]
    before = len(graph.module.graph.nodes)
    (changed,) = (run_pass(graph) for run_pass in PASSES[-1:])
    assert len(changed.module.graph.nodes) == before - 1
    assert len(calls(changed.module.graph, "kv_write")) == 3
    assert len(calls(changed.module.graph, "short_conv")) == 10


@pytest.mark.parametrize("excess", [0, 1])
def test_write_moves_ahead_up_to_the_length_of_the_ring(
    checkpoint: Path, excess: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest position in sight of a step and its newest must have rows of their own."""
    window = 22
    num_tokens = ring_tokens(window - 1) - (window - 1) + excess
    step = StepSpec("prefill", num_tokens, 1)
    weights, states = rank_weights(checkpoint, 1), rank_states(1)
    inputs = step_inputs(num_tokens, num_tokens)
    graph = small_graph(step, 1)
    written = copies(states)
    expected = (run_graph(graph, weights, written, inputs), written)
    QKV_POST.fuse_qkv_post(graph)
    graph.module.graph.lint()
    # The full layer's pages have room for everything.
    assert len(calls(graph.module.graph, "qkv_post")) == (1 if excess else 3)
    assert_same_run(graph, expected, weights, states, inputs)
    if excess:
        # The bound is no wider than it must be: one token more overwrites what a query still sees.
        monkeypatch.setattr(QKV_POST, "may_write_first", lambda _: True)
        forced = QKV_POST.fuse_qkv_post(small_graph(step, 1))
        with pytest.raises(AssertionError, match="differs at"):
            assert_same_run(forced, expected, weights, states, inputs)


def test_a_row_parallel_weight_that_is_not_summed_up_is_refused() -> None:
    graph = small_graph(DECODE, 2)
    graph.row_parallel |= {"layers.1.attn.wsink", "layers.2.attn.rel_bank"}
    with pytest.raises(BuildError) as caught:
        PASSES[0](graph)
    assert str(caught.value) == (
        "row-parallel weight layers.2.attn.rel_bank is summed over by none of linear, "
        "linear_nvfp4, linear_mxfp8, experts, swiglu_experts, so its partial sums would not be "
        "added up; correct the module"
    )


def test_graphs_that_cannot_be_lowered_can_be_dumped() -> None:
    graph = small_graph(DECODE, 1)
    softcap = calls(graph.module.graph, "softcap")[0]
    with graph.module.graph.inserting_after(softcap):
        mask = graph.module.graph.call_function(torch.ops.aten.gt.Scalar, (softcap, 0.5))
    mask.meta["val"] = softcap.meta["val"] > 0.5
    assert f"%{mask.name}: bool[1, 490] = aten::gt(self=%softcap, other=0.5)" in (
        dump.graph_text(graph).splitlines()
    )
