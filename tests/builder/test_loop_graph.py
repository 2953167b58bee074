"""Graphs of looped models: shared weights, state of every visit, and fusions in all of them.

The model has four layers of the tiny one, of which the second and the third run twice: one slides,
one sees all; every layer starts a residual block.
"""

import copy
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from graph_run import assert_same_bits, copies, run_graph, step_inputs
from small_model import STATE, VERIFY3

from inkrt.builder.lower import lower
from inkrt.builder.pack import packed_tensors
from inkrt.builder.passes import PASSES
from inkrt.builder.rewrite import calls, module_path
from inkrt.builder.trace import StepGraph, trace
from inkrt.engines.inkling2_loop.config import parse_config
from inkrt.engines.inkling2_loop.model import Inkling2Loop
from inkrt.engines.interface import Sharding
from inkrt.engines.tiny import inkling2_loop

FIRST_VISITS = {0: 0, 1: 1, 2: 2, 3: 5}  # of each layer; 3 and 4 are second ones
NUM_VISITS = 6


def make_module(tp_size: int) -> Inkling2Loop:
    values: dict[str, Any] = inkling2_loop.config("float32")
    values["text_config"] |= {
        "num_hidden_layers": 4,
        "n_layers_per_attn_res_block": 1,
        "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid_sliding"],
        "loop_config": {"core_start": 1, "core_end": 3, "num_passes": 2, "gate_rank": 5},
    }
    sharding = Sharding(tp_size, "experts")
    return Inkling2Loop(parse_config(values), sharding, torch.float32, STATE, False)


@cache
def traced(tp_size: int) -> StepGraph:
    return trace(make_module(tp_size), VERIFY3, STATE, tp_size, torch.float32)


def fused(tp_size: int) -> StepGraph:
    graph = copy.deepcopy(traced(tp_size))
    for run_pass in PASSES:
        graph = run_pass(graph)
    return graph


def test_visits_share_weights_and_no_state() -> None:
    graph, module = traced(1), make_module(1)
    names = list(graph.weights.values())
    assert len(names) == len(set(names)) == len(packed_tensors(module))
    of_layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    gates = {name for name in names if name.startswith(("layers.3.", "layers.4."))}
    assert of_layers - {"3", "4"} == {str(visit) for visit in FIRST_VISITS.values()}
    assert {name.split(".", 2)[2] for name in gates} == {
        "message_queries",
        *(
            f"{part}_input.{name}"
            for part in ("attn", "mlp")
            for name in ("down", "forget", "gain")
        ),
    }
    buffers = list(graph.state.values())
    assert len(buffers) == len(set(buffers)) == 6 * NUM_VISITS
    # Both visits' launches read the same tensor of the plan.
    plan = lower(graph)
    routers = [x.args["weight"] for x in plan.launches if x.op == "router"]
    stored = [plan.tensors[x.tensor].storage for x in routers]
    assert stored == [f"layers.{visit}.mlp.router" for visit in (0, 1, 2, 1, 2, 5)]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_fusions_fire_in_every_visit(tp_size: int) -> None:
    graph = fused(tp_size)
    once = ("linear_group", "qkv_post", "relative_attention", "moe")
    for name in once:
        paths = {module_path(node).split(".")[1] for node in calls(graph.module.graph, name)}
        assert paths == {str(visit) for visit in range(NUM_VISITS)}, name
    plan = lower(graph)
    counts = Counter(launch.op for launch in plan.launches)
    assert counts == {
        **dict.fromkeys(once, NUM_VISITS),
        "linear": NUM_VISITS,  # output projections
        # But at the end of the first pass, behind which nothing mixes what it sums up.
        "allreduce_conv_mix": 2 * NUM_VISITS - 1,
        **{name: 1 for name in ("all_reduce",) if tp_size > 1},
        "short_conv": 1,
        "residual_add": 1,
        "residual_mix": 1,  # where the second pass starts from the prelude again
        "gated_input": 4,
        "embedding": 1,
        "rms_norm": 2,  # of the embedding, and of the first layer's input
        "lm_head_sample": 1,
    }


@pytest.mark.parametrize("tp_size", [1, 2])
def test_passes_change_no_bits(tp_size: int) -> None:
    plain, generator = copy.deepcopy(traced(tp_size)), torch.Generator().manual_seed(7)
    module = make_module(tp_size)

    def draw(shape: torch.Size, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    # Ranks share the experts' and attention's sizes and have the rest in common.
    own = [
        {name: draw(x.shape, x.shape[-1] ** -0.5) for name, x in module.named_parameters()}
        for _ in range(tp_size)
    ]
    whole = (
        "embed", "router", "queries", "norms.", "attn_conv.", "mlp_conv.", "_input.",
    )  # fmt: skip
    weights = [
        {name: own[0 if any(x in name for x in whole) else rank][name] for name in own[rank]}
        for rank in range(tp_size)
    ]
    states = [{name: draw(x.shape, 1.0) for name, x in module.named_buffers()}] * tp_size
    for run_pass in PASSES[:1]:  # collectives: without them ranks are apart
        plain = run_pass(plain)
    inputs = step_inputs(3, 3)
    plain_states, fused_states = copies(states), copies(states)
    expected = run_graph(plain, weights, plain_states, inputs)
    got = run_graph(fused(tp_size), weights, fused_states, inputs)
    for a, b in zip(got[0], expected[0], strict=True):
        assert_same_bits(a, b, "output")
    for rank in range(tp_size):
        for name, value in fused_states[rank].items():
            assert_same_bits(value, plain_states[rank][name], name)
            assert not torch.equal(value, states[rank][name]), name
