"""What passes do to a tiny Flint, as text and in bits, and what they leave alone.

In the 40-token step the sliding layer's ring is too short for the write to move ahead. After an
intended change write the snapshots anew, and read their difference:

    INK_UPDATE_SNAPSHOTS=1 pytest tests/builder/test_flint_passes.py
"""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from graph_run import assert_same_run, copies, run_graph
from small_flint import inputs_of, rank_states, rank_weights, small_graph, write_small
from small_model import DECODE, PREFILL40, VERIFY3
from test_pass_patterns import argument, assert_one_stays_unfused, read_before, tap
from test_passes import after_passes, assert_passes_keep_every_bit, history
from torch.fx import Node

from inkrt.builder.passes.fuse_flint_moe import fuse_flint_moe
from inkrt.builder.rewrite import arguments, calls, set_argument
from inkrt.builder.trace import StepGraph
from inkrt.engines.interface import Sharding, ring_tokens
from inkrt.engines.tiny import flint
from inkrt.runtime.engine_file import StepSpec

SNAPSHOTS = Path(__file__).with_name("snapshots_flint")
ONE, BY_EXPERT, BY_WIDTH = Sharding(1, "experts"), Sharding(2, "experts"), Sharding(2, "width")
SHOWN = [("decode.nvfp4", DECODE, ONE, True), ("prefill40.tp2", PREFILL40, BY_EXPERT, False)]
FUSED = ("norm_qkv_rope", "flint_moe", "norm_router_shared", "dense_mlp", "lm_head_sample")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Checkpoints with and without NVFP4."""
    root = tmp_path_factory.mktemp("flint")
    return {
        False: write_small(root / "plain"),
        True: write_small(root / "nvfp4", format="gguf"),
    }


@pytest.mark.parametrize(("name", "step", "sharding", "is_nvfp4"), SHOWN, ids=lambda x: str(x)[:14])
def test_snapshots(name: str, step: StepSpec, sharding: Sharding, is_nvfp4: bool) -> None:
    text = history(small_graph(step, sharding, is_nvfp4=is_nvfp4))
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("INK_UPDATE_SNAPSHOTS") == "1":
        path.write_text(text, encoding="utf-8")
    assert text.splitlines() == path.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("is_nvfp4", [False, True], ids=["plain", "nvfp4"])
@pytest.mark.parametrize("sharding", [ONE, BY_EXPERT, BY_WIDTH], ids=["1", "2", "2 by width"])
@pytest.mark.parametrize(
    ("step", "num_tokens"), [(DECODE, 1), (VERIFY3, 2), (PREFILL40, 33)], ids=lambda x: str(x)[:20]
)
def test_passes_keep_every_bit(
    folders: dict[bool, Path], step: StepSpec, num_tokens: int, sharding: Sharding, is_nvfp4: bool
) -> None:
    """Outputs and state; on several ranks from the pass on that adds the ranks' parts up."""
    weights, states = rank_weights(folders[is_nvfp4], sharding), rank_states(sharding)
    inputs = inputs_of(step.num_tokens, num_tokens)
    graph = small_graph(step, sharding, is_nvfp4=is_nvfp4)
    assert_passes_keep_every_bit(graph, weights, states, inputs)


@pytest.mark.parametrize("is_nvfp4", [False, True], ids=["plain", "nvfp4"])
@pytest.mark.parametrize("step", [DECODE, PREFILL40], ids=lambda step: step.name)
def test_launches_of_a_step(step: StepSpec, is_nvfp4: bool) -> None:
    """Four launches for a dense layer, five for one with experts, three for the ends."""
    graph = small_graph(step, ONE, is_nvfp4=is_nvfp4)
    for _, changed in after_passes(graph):
        graph = changed
    names = [str(node.target) for node in graph.module.graph.nodes if "ink." in str(node.target)]
    counts = {name: len(calls(graph.module.graph, name)) for name in FUSED}
    is_prefill = step is PREFILL40
    assert counts == {
        "norm_qkv_rope": 3 if is_prefill else 4,
        "flint_moe": 2,
        "norm_router_shared": 2,
        "dense_mlp": 2,
        "lm_head_sample": 1,
    }
    # A prefill keeps the sliding layer's norm, projection, head norms, rotations and write.
    assert len(names) == 2 * 4 + 2 * 5 + 3 + (7 if is_prefill else 0)
    assert len(calls(graph.module.graph, "kv_write")) == (1 if is_prefill else 0)


@pytest.mark.parametrize("excess", [0, 1])
def test_write_moves_ahead_up_to_the_length_of_the_ring(
    folders: dict[bool, Path], excess: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens = ring_tokens(flint.TINY.window - 1) - (flint.TINY.window - 1) + excess
    step = StepSpec("prefill", num_tokens, 1)
    weights, states = rank_weights(folders[False], ONE), rank_states(ONE)
    inputs = inputs_of(num_tokens, num_tokens)
    graph = small_graph(step, ONE)
    written = copies(states)
    expected = (run_graph(graph, weights, written, inputs), written)
    module = import_module("inkrt.builder.passes.fuse_norm_qkv_rope")
    module.fuse_norm_qkv_rope(graph)
    graph.module.graph.lint()
    assert len(calls(graph.module.graph, "norm_qkv_rope")) == (3 if excess else 4)
    assert_same_run(graph, expected, weights, states, inputs)
    if excess:
        monkeypatch.setattr(module, "may_write_first", lambda _: True)
        forced = module.fuse_norm_qkv_rope(small_graph(step, ONE))
        with pytest.raises(AssertionError, match="differs at"):
            assert_same_run(forced, expected, weights, states, inputs)


def attention(graph: StepGraph, layer: int = 2) -> Node:
    return calls(graph.module.graph, "sink_attention")[layer]


def norm(graph: StepGraph, layer: int = 2, half: int = 0) -> Node:
    return calls(graph.module.graph, "add_rms_norm")[2 * layer + half]


def output(node: Node, index: int) -> Node:
    return next(user for user in node.users if user.args[1] == index)


def other_columns(graph: StepGraph) -> None:
    """Values come from the columns of the keys."""
    node = attention(graph)
    keys = arguments(argument(node, "k", "x"))["x"]
    for user in (node, *calls(graph.module.graph, "kv_write")[2:3]):
        set_argument(user, "v", keys)


QKV: dict[str, Callable[[StepGraph], object]] = {
    "the norm has a second reader": lambda g: tap(g, output(norm(g), 1)),
    "the projection has a second reader": lambda g: tap(g, _rows(g)),
    "keys are not rotated": lambda g: _unrotated(g, "k"),
    "another base": lambda g: set_argument(argument(attention(g), "k"), "theta", 500.0),
    "head norms have different epsilons": lambda g: set_argument(
        argument(attention(g), "q", "x"), "eps", 1e-3
    ),
    "values are other columns": other_columns,
    "cache has a third reader": lambda g: tap(g, argument(attention(g), "k_cache")),
}


def _rows(graph: StepGraph) -> Node:
    """The projection of a sliding layer's queries, keys and values."""
    node = output(norm(graph), 1)
    (rows,) = node.users
    return rows


def _unrotated(graph: StepGraph, name: str) -> None:
    node = attention(graph)
    rotated = arguments(node)[name]
    plain = arguments(rotated)["x"]
    for user in list(rotated.users):
        set_argument(user, name, plain)


def moe_parts(graph: StepGraph) -> tuple[Node, Node]:
    """Routed experts and addition of layer 2."""
    return calls(graph.module.graph, "swiglu_experts")[0], calls(
        graph.module.graph, "residual_add"
    )[0]


def _other_ids(graph: StepGraph) -> None:
    """The second layer's experts are chosen by the first layer's router."""
    first, second = calls(graph.module.graph, "swiglu_experts")
    set_argument(second, "expert_ids", arguments(first)["expert_ids"])


MOE: dict[str, Callable[[StepGraph], object]] = {
    "routed experts have a second reader": lambda g: tap(g, moe_parts(g)[0]),
    "shared expert has a second reader": lambda g: tap(g, arguments(moe_parts(g)[1])["update"]),
    "the sum is kept in float32": lambda g: set_argument(moe_parts(g)[1], "dtype", torch.float32),
    "ids are another router's": _other_ids,
}


def moe(graph: StepGraph) -> Node:
    return calls(graph.module.graph, "flint_moe")[0]


ROUTER: dict[str, Callable[[StepGraph], object]] = {
    "experts read the input of the attention": lambda g: set_argument(
        moe(g), "x", output(norm(g, 2, 0), 1)
    ),
    "router reads the input of the attention": lambda g: set_argument(
        argument(moe(g), "logits"), "x", output(norm(g, 2, 0), 1)
    ),
    "shared expert reads the input of the attention": lambda g: set_argument(
        argument(moe(g), "shared", "gate_up"), "x", output(norm(g, 2, 0), 1)
    ),
}
DENSE: dict[str, Callable[[StepGraph], object]] = {
    "the norm has a second reader": lambda g: tap(g, output(norm(g, 0, 1), 1)),
    "the activation has a second reader": lambda g: tap(g, calls(g.module.graph, "silu_mul")[0]),
    "the gates have a second reader": lambda g: tap(
        g, argument(calls(g.module.graph, "silu_mul")[0], "gate_up")
    ),
}
HEAD: dict[str, Callable[[StepGraph], object]] = {
    "logits are read before": lambda g: read_before(
        g,
        arguments(calls(g.module.graph, "sample")[0])["logits"],
        calls(g.module.graph, "sample")[0],
    ),
}
NORMALLY = {
    "norm_qkv_rope": 4,
    "flint_moe": 2,
    "norm_router_shared": 2,
    "dense_mlp": 2,
    "lm_head_sample": 1,
}
CASES = [
    pytest.param(operator, change, id=f"{operator}: {case}")
    for operator, cases in (
        ("norm_qkv_rope", QKV),
        ("flint_moe", MOE),
        ("norm_router_shared", ROUTER),
        ("dense_mlp", DENSE),
        ("lm_head_sample", HEAD),
    )
    for case, change in cases.items()
]


@pytest.mark.parametrize(("operator", "change"), CASES)
def test_stays_unfused_and_right(
    folders: dict[bool, Path], operator: str, change: Callable[[StepGraph], object]
) -> None:
    weights, states, inputs = rank_weights(folders[False], ONE), rank_states(ONE), inputs_of(3, 3)
    graph = small_graph(VERIFY3, ONE)
    if operator == "norm_router_shared":
        graph = fuse_flint_moe(graph)
    change(graph)
    assert_one_stays_unfused(graph, operator, NORMALLY[operator], weights, states, inputs)
