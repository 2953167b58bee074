"""Where a target hands features to its drafter, before and after the passes, on 1 and 2 ranks."""

import copy
import dataclasses
from typing import get_args

import pytest
import torch
from graph_run import assert_same_bits, copies, run_graph, step_inputs
from small_model import STATE, VERIFY3, small_config
from test_draft_step import BASE

from inkrt.builder.passes import PASSES
from inkrt.builder.rewrite import arguments, calls, is_call, module_path
from inkrt.builder.trace import StepGraph, trace
from inkrt.engines.dspark.config import DSparkConfig, TapPoint
from inkrt.engines.inkling2.model import Inkling2
from inkrt.engines.interface import Sharding

TAPS = (0, 2)
POINTS = get_args(TapPoint)


def drafter_of(tap_point: TapPoint) -> DSparkConfig:
    """A drafter of the small model."""
    hidden = small_config().hidden_size
    return dataclasses.replace(
        BASE, hidden_size=hidden, target_hidden_size=hidden, taps=TAPS, tap_point=tap_point
    )


def make_module(tap_point: TapPoint, tp_size: int) -> Inkling2:
    sharding = Sharding(tp_size, "experts")
    drafter = drafter_of(tap_point)
    return Inkling2(small_config(), sharding, torch.float32, STATE, False, drafter)


def traced(tap_point: TapPoint, tp_size: int) -> StepGraph:
    return trace(make_module(tap_point, tp_size), VERIFY3, STATE, tp_size, torch.float32)


@pytest.mark.parametrize("tap_point", POINTS)
def test_features_are_taken_at_the_point(tap_point: TapPoint):
    graph = traced(tap_point, 1)
    (concat,) = calls(graph.module.graph, "concat")
    convs = {module_path(node): node for node in calls(graph.module.graph, "short_conv")}
    for layer, part in zip(TAPS, arguments(concat)["parts"], strict=True):
        conv = convs[f"layers.{layer}.mlp_conv"]
        (output,) = conv.users
        assert is_call(part, "residual_add")
        assert arguments(part)["residual"] is arguments(output)["residual"]
        if tap_point == "layer_output":
            assert part is output
        else:
            assert arguments(part)["update"] is arguments(conv)["x"]


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("tap_point", POINTS)
def test_passes_change_no_bits(tap_point: TapPoint, tp_size: int):
    graph = traced(tap_point, tp_size)
    generator = torch.Generator().manual_seed(7)
    module = make_module(tap_point, tp_size)

    def draw(shape: torch.Size, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    # Ranks share the experts' and attention's sizes and have the same drafter.
    own = [
        {name: draw(x.shape, x.shape[-1] ** -0.5) for name, x in module.named_parameters()}
        for _ in range(tp_size)
    ]
    whole = ("drafter.", "embed", "router", "queries", "norms.", "attn_conv.", "mlp_conv.")
    weights = [
        {name: own[0 if any(x in name for x in whole) else rank][name] for name in own[rank]}
        for rank in range(tp_size)
    ]
    states = [{name: draw(x.shape, 1.0) for name, x in module.named_buffers()}] * tp_size
    fused = copy.deepcopy(graph)
    for run_pass in PASSES[:1]:  # collectives: without them ranks are apart
        graph = run_pass(graph)
    for run_pass in PASSES:
        fused = run_pass(fused)
    assert len(fused.module.graph.nodes) < len(graph.module.graph.nodes)

    inputs = step_inputs(3, 3)
    plain_states, fused_states = copies(states), copies(states)
    expected = run_graph(graph, weights, plain_states, inputs)
    got = run_graph(fused, weights, fused_states, inputs)
    for a, b in zip(got[0], expected[0], strict=True):
        assert_same_bits(a, b, "output")
    for rank in range(tp_size):
        for name, value in fused_states[rank].items():
            assert_same_bits(value, plain_states[rank][name], name)
            if name.startswith("drafter."):
                assert_same_bits(value, fused_states[0][name], name)
                assert not torch.equal(value, states[rank][name]), name
