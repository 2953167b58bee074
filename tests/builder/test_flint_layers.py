"""Runs of Flint's expert layers: what is fused for a target that has a kernel, and what is not."""

import copy
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import msgspec
import pytest
import torch
from graph_run import assert_same_run, copies, run_graph
from plan_run import run_plan
from small_flint import inputs_of, rank_states, rank_weights, small_config, small_graph, write_small
from small_model import DECODE, STATE, VERIFY3
from test_pass_patterns import insert_aten, read_before, tap
from torch import Tensor
from torch.fx import Node

from inkrt.builder.lower import lower
from inkrt.builder.passes import PASSES, passes_for
from inkrt.builder.rewrite import arguments, calls, insert_call, set_argument
from inkrt.builder.trace import StepGraph, trace
from inkrt.engines.flint.model import Flint
from inkrt.engines.interface import Sharding
from inkrt.plugins.registry import plugins
from inkrt.plugins.tactic import (
    CallArgs,
    Tactic,
    TensorArg,
    number_arg,
    number_list_arg,
    tensor_list_arg,
)
from inkrt.runtime.engine_file import StepSpec
from inkrt.runtime.plan import Plan

# The package exports the function of the same name.
PASS = import_module("inkrt.builder.passes.fuse_flint_layers")
ONE = Sharding(1, "experts")
TARGET = "a target with kernels"
STEPS = pytest.mark.parametrize(
    ("step", "num_tokens"), [(DECODE, 1), (VERIFY3, 3), (VERIFY3, 2)], ids=lambda x: str(x)[:20]
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """Of the NVFP4 checkpoint."""
    return rank_weights(write_small(tmp_path_factory.mktemp("x") / "x", format="gguf"), ONE)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[CallArgs]:
    """Gives TARGET a kernel for any run; what was asked for, in order."""
    calls_seen: list[CallArgs] = []

    def find_tactics(name: str, target: str, args: CallArgs) -> list[Tactic]:
        assert (name, target) == ("flint_layers", TARGET)
        calls_seen.append(args)
        return [Tactic("all", (), 0, 0)]

    monkeypatch.setattr(PASS, "find_tactics", find_tactics)
    return calls_seen


def after(graph: StepGraph, target: str) -> StepGraph:
    for run_pass in passes_for(target):
        graph = run_pass(graph)
        graph.module.graph.lint()
    return graph


def names(graph: StepGraph) -> list[str]:
    """Operators in order."""
    return [
        str(node.target).split(".")[1]
        for node in graph.module.graph.nodes
        if str(node.target).startswith("ink.")
    ]


def test_only_targets_with_kernels_have_the_pass() -> None:
    assert passes_for("cpu") == PASSES
    assert passes_for("sm_90a", keeps_intermediates=True) == PASSES
    passes = passes_for("sm_90a")
    assert (*passes[:-2], passes[-1]) == PASSES
    assert [run_pass.__name__ for run_pass in passes[-2:]] == [
        "fuse_flint_layers",
        "eliminate_dead_code",
    ]


@STEPS
def test_fused_layers_keep_every_bit(
    weights: list[dict[str, Tensor]], asked: list[CallArgs], step: StepSpec, num_tokens: int
) -> None:
    states, inputs = rank_states(ONE), inputs_of(step.num_tokens, num_tokens)
    plain = after(small_graph(step, ONE, is_nvfp4=True), "cpu")
    written = copies(states)
    expected = (run_graph(plain, weights, written, inputs), written)
    fused = after(small_graph(step, ONE, is_nvfp4=True), TARGET)
    assert len(asked) == 1
    dense = ["norm_qkv_rope", "sink_attention", "linear_nvfp4", "dense_mlp"]
    assert names(fused) == ["embedding", *dense, *dense, "flint_layers", *names(plain)[-2:]]
    assert_same_run(fused, expected, weights, states, inputs)


def test_call_of_the_small_model(asked: list[CallArgs]) -> None:
    """A sliding and a full layer; tactics see lists, with an entry per layer."""
    graph = after(small_graph(VERIFY3, ONE, is_nvfp4=True), TARGET)
    (node,) = calls(graph.module.graph, "flint_layers")
    (args,) = asked
    schema = node.target._schema  # type: ignore[union-attr]
    assert set(args) == set(arguments(node)) == {argument.name for argument in schema.arguments}
    config = small_config(is_nvfp4=True)
    assert args["windows"] == [config.sliding_window, 0]
    assert args["rope_thetas"] == [config.rope_theta, 0.0]
    assert number_list_arg(args, "windows") == [float(config.sliding_window), 0.0]
    assert number_arg(args, "top_k") == config.num_experts_per_tok
    assert args["page_table"] == TensorArg((4,), torch.int32)
    assert args["x"] == args["delta"] == TensorArg((3, config.hidden_size), torch.bfloat16)
    ring, pages = tensor_list_arg(args, "k_cache")
    assert ring.shape[2:] == pages.shape[2:]
    assert ring.shape[0] == STATE.num_slots
    storages = {
        name: [(graph.weights | graph.state)[item.name] for item in value]
        for name, value in arguments(node).items()
        if isinstance(value, list) and isinstance(value[0], Node)
    }
    assert storages["qkv_scales"] == [f"layers.{n}.attn.qkv.scales" for n in (2, 3)]
    assert storages["v_cache"] == [f"layers.{n}.attn.v_cache" for n in (2, 3)]
    assert storages["shared_down"] == [f"layers.{n}.mlp.shared.down.weight" for n in (2, 3)]
    assert len({tuple(value) for value in storages.values()}) == len(storages) == 26


def test_nothing_is_fused_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = names(after(small_graph(DECODE, ONE, is_nvfp4=True), "cpu"))
    assert names(after(small_graph(DECODE, ONE, is_nvfp4=True), "no target")) == plain
    monkeypatch.setattr("inkrt.builder.tactics.find_spec", lambda _: None)
    assert names(after(small_graph(DECODE, ONE, is_nvfp4=True), "sm_90a")) == plain


def traced(num_layers: int, dense: set[int], *, is_nvfp4: bool, tp_size: int = 1) -> StepGraph:
    """A decode step of a Flint whose last and every third layer are full."""
    config = replace(
        small_config(is_nvfp4=is_nvfp4),
        num_hidden_layers=num_layers,
        is_sliding=tuple(n % 3 < 2 and n < num_layers - 1 for n in range(num_layers)),
        is_dense=tuple(n in dense for n in range(num_layers)),
    )
    sharding = Sharding(tp_size, "experts")
    module = Flint(config, sharding, torch.bfloat16, STATE, False)
    return trace(module, DECODE, STATE, tp_size, torch.bfloat16)


@pytest.mark.parametrize(
    ("dense", "runs"),
    [
        ({0, 1}, [6]),
        ({0, 4}, [3, 3]),
        ({0, 3, 5}, [2, 2]),
        ({1, 3, 5, 7}, []),
        ({7}, [6]),
        ({0, 1, 3}, [4]),
    ],
    ids=str,
)
def test_dense_layers_break_runs(asked: list[CallArgs], dense: set[int], runs: list[int]) -> None:
    """The first layer has no output of a layer before, so it is in no run."""
    graph = after(traced(8, dense, is_nvfp4=True), TARGET)
    fused = calls(graph.module.graph, "flint_layers")
    assert [len(arguments(node)["windows"]) for node in fused] == runs
    assert [len(number_list_arg(args, "windows")) for args in asked] == runs
    assert len(calls(graph.module.graph, "flint_moe")) == 8 - len(dense) - sum(runs)


@pytest.mark.parametrize(("is_nvfp4", "tp_size"), [(False, 1), (True, 2)])
def test_other_weights_and_ranks_are_not_fused(
    asked: list[CallArgs], is_nvfp4: bool, tp_size: int
) -> None:
    graph = after(traced(5, {0}, is_nvfp4=is_nvfp4, tp_size=tp_size), TARGET)
    assert asked == []
    assert calls(graph.module.graph, "flint_layers") == []


def call(graph: StepGraph, name: str, index: int = 0) -> Node:
    return calls(graph.module.graph, name)[index]


def output(node: Node, index: int) -> Node:
    return next(user for user in node.users if user.args[1] == index)


def bf16_weight(graph: StepGraph) -> None:
    """The second layer's shared expert is not NVFP4; rows of the embedding serve for a weight."""
    node, table = call(graph, "norm_router_shared", 1), arguments(call(graph, "embedding"))["table"]
    num_rows = arguments(node)["shared_gate_up"].meta["val"].shape[0]
    rows = insert_aten(node, torch.ops.aten.slice.Tensor, table, 0, 0, num_rows)
    weight = {"": rows, "_scales": None, "_global_scale": None}
    changed = arguments(node) | {f"shared_gate_up{name}": value for name, value in weight.items()}
    other = insert_call(node, "norm_router_shared", changed, node)
    node.replace_all_uses_with(other)
    graph.module.graph.erase_node(node)


BROKEN: dict[str, Callable[[StepGraph], object]] = {
    "another eps": lambda g: set_argument(call(g, "norm_router_shared"), "eps", 1e-3),
    "another scale": lambda g: set_argument(call(g, "sink_attention", 2), "scale", 0.3),
    "another number of experts": lambda g: set_argument(call(g, "flint_moe"), "top_k", 2),
    "queries are seen": lambda g: tap(g, output(call(g, "norm_qkv_rope", 3), 1)),
    "logits are seen": lambda g: tap(g, output(call(g, "norm_router_shared"), 2)),
    "attention is seen": lambda g: tap(g, call(g, "sink_attention", 2)),
    "the first layer's output is seen": lambda g: tap(g, call(g, "flint_moe")),
    "the stream in between is seen": lambda g: tap(g, output(call(g, "norm_router_shared"), 0)),
    "the last stream is read before the experts": lambda g: read_before(
        g, output(call(g, "norm_router_shared", 1), 0), call(g, "flint_moe", 1)
    ),
    "a cache is seen": lambda g: tap(g, arguments(call(g, "sink_attention", 3))["k_cache"]),
    "a matrix is BF16": bf16_weight,
    "pages with a window": lambda g: set_argument(call(g, "sink_attention", 3), "window", 7),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN.keys())
def test_stays_unfused_and_right(
    weights: list[dict[str, Tensor]], asked: list[CallArgs], change: Callable[[StepGraph], object]
) -> None:
    graph, states, inputs = (
        after(small_graph(VERIFY3, ONE, is_nvfp4=True), "cpu"),
        rank_states(ONE),
        inputs_of(3, 3),
    )
    changed = copy.deepcopy(graph)
    change(changed)
    changed.module.graph.lint()
    written = copies(states)
    expected = (run_graph(changed, weights, written, inputs), written)
    PASS.fuse_flint_layers(changed, TARGET)
    assert asked == []
    assert_same_run(changed, expected, weights, states, inputs)
    PASS.fuse_flint_layers(graph, TARGET)  # but for the change it is fused
    assert len(asked) == 1


def test_outputs_of_a_run_may_be_seen(
    weights: list[dict[str, Tensor]], asked: list[CallArgs]
) -> None:
    graph, states, inputs = (
        after(small_graph(VERIFY3, ONE, is_nvfp4=True), "cpu"),
        rank_states(ONE),
        inputs_of(3, 3),
    )
    tap(graph, call(graph, "flint_moe", 1))
    tap(graph, output(call(graph, "norm_router_shared", 1), 0))
    written = copies(states)
    expected = (run_graph(graph, weights, written, inputs), written)
    PASS.fuse_flint_layers(graph, TARGET)
    assert len(asked) == 1
    assert_same_run(graph, expected, weights, states, inputs)


@STEPS
@pytest.mark.usefixtures("asked")
def test_plan_of_a_fused_step(
    weights: list[dict[str, Tensor]], step: StepSpec, num_tokens: int
) -> None:
    """Lists of tensors and of numbers survive lowering, the file and the executor's memory."""
    inputs = inputs_of(step.num_tokens, num_tokens)
    plain = after(small_graph(step, ONE, is_nvfp4=True), "cpu")
    states = rank_states(ONE)
    ((tokens, logits),) = run_graph(plain, weights, states, inputs)
    plan = lower(after(small_graph(step, ONE, is_nvfp4=True), TARGET))
    assert [launch.op for launch in plan.launches].count("flint_layers") == 1
    plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan)
    (state,) = rank_states(ONE)
    got = run_plan(plan, weights[0], state, inputs)
    assert torch.equal(got[0], tokens)
    assert torch.equal(got[1], logits)
    assert all(torch.equal(state[name], value) for name, value in states[0].items())
    assert plugins()["flint_layers"].mutates == ("k_cache", "v_cache")
