"""Lowering: views stand where torch sees them; what cannot run is refused by name."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from graph_run import step_inputs
from plan_run import run_plan
from small_model import STATE, lower_graph
from torch import Tensor, nn

from inkrt.builder.trace import trace
from inkrt.engines.interface import StepInputs
from inkrt.errors import BuildError
from inkrt.plugins.registry import plugins
from inkrt.runtime.engine_file import StepSpec

plugins()
ink = torch.ops.ink

STEP = StepSpec("verify6", 6, 6)


# x [6, 24] is computed, w [4, 6, 8] a weight, s [2, 16, 24] state.
class Given(NamedTuple):
    """What views are taken of."""

    x: Tensor
    w: Tensor
    s: Tensor


View = Callable[[Given], Tensor]
VIEWS: dict[str, View] = {
    "rows": lambda t: t.x[2:5],
    "columns": lambda t: t.x[:, 5:17],
    "one row": lambda t: t.x[3].unsqueeze(0),
    "one column": lambda t: t.x[:, 3].unsqueeze(1),
    "every second row": lambda t: t.x[1::2],
    "transposed": lambda t: t.x.t(),
    "heads first": lambda t: t.x.view(6, 4, 6).transpose(0, 1),
    "view of a view of a view": lambda t: t.x[1:5].view(2, 2, 24).permute(2, 0, 1)[4:, 1],
    "broadcast": lambda t: t.x[:, None, 8:].expand(6, 3, 16),
    "squeezed": lambda t: t.x[2:3].squeeze(0)[4:].unsqueeze(0),
    "all of it": lambda t: t.x[:],
    "weight": lambda t: t.w,
    "one of a weight": lambda t: t.w[2],
    "weight with a step": lambda t: t.w[1:, 2:6:3].transpose(1, 2),
    "state": lambda t: t.s[1, 3:9],
    "state of both slots": lambda t: t.s[:, 7].permute(1, 0),
}


class Views(nn.Module):
    """Norms of a view of something."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self.view = view
        self.table = nn.Parameter(torch.empty(512, 24, device="meta"), requires_grad=False)
        self.weight = nn.Parameter(torch.empty(4, 6, 8, device="meta"), requires_grad=False)
        self.register_buffer("ring", torch.empty(2, 16, 24, device="meta"))

    def row_parallel_weights(self) -> frozenset[str]:
        return frozenset()

    def forward(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        return self.outputs(step.tokens)

    def outputs(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = ink.embedding(tokens, self.table)
        # What comes between would overwrite the bytes of x if its view did not keep it alive.
        between = ink.residual_add(None, ink.embedding(tokens, self.table), torch.float32)
        y = ink.rms_norm(self.view(Given(x, self.weight, self.ring)), None, 1e-6, torch.float32)
        return ink.residual_add(between, between, torch.float32)[2:], y


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("name", VIEWS)
def test_views_stand_where_torch_sees_them(name: str) -> None:
    weights = {"table": draw(512, 24), "weight": draw(4, 6, 8)}
    state, inputs = {"ring": draw(2, 16, 24)}, step_inputs(6, 6)
    plan = lower_graph(trace(Views(VIEWS[name]), STEP, STATE, 1, torch.float32))
    got = run_plan(plan, weights, state, inputs)
    x = weights["table"][inputs["tokens"].long()]
    viewed = VIEWS[name](Given(x, weights["weight"], state["ring"]))
    expected = plugins()["rms_norm"].reference(viewed, None, 1e-6, torch.float32)
    assert torch.equal(got[1], expected)
    assert torch.equal(got[0], 2 * x[2:])
    # Views cost nothing: two embeddings, two additions and the norm.
    assert [launch.op for launch in plan.launches] == [
        "embedding", "embedding", "residual_add", "rms_norm", "residual_add",
    ]  # fmt: skip


def test_views_of_outputs_and_of_one_of_several_outputs() -> None:
    class Routed(Views):
        def outputs(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
            x = ink.embedding(tokens, self.table)
            weights, ids = ink.router(x, self.weight, self.bias, 3, 1.0)
            return ids[:, 1:], weights[2:, 1]

    module = Routed(VIEWS["rows"])
    module.weight = nn.Parameter(torch.empty(5, 24, device="meta"), requires_grad=False)
    module.bias = nn.Parameter(torch.empty(5, device="meta"), requires_grad=False)
    weights = {"table": draw(512, 24), "weight": draw(5, 24), "bias": draw(5)}
    inputs = step_inputs(6, 6)
    plan = lower_graph(trace(module, STEP, STATE, 1, torch.float32))
    ids, shares = run_plan(plan, weights, {"ring": draw(2, 16, 24)}, inputs)
    x = weights["table"][inputs["tokens"].long()]
    expected = plugins()["router"].reference(x, weights["weight"], weights["bias"], 3, 1.0)
    assert torch.equal(ids, expected[1][:, 1:])
    assert torch.equal(shares, expected[0][2:, 1])


def test_inputs_come_by_name() -> None:
    plan = lower_graph(trace(Views(VIEWS["rows"]), STEP, STATE, 1, torch.float32))
    for name, index in plan.inputs.items():
        spec = plan.tensors[index]
        assert (spec.space, spec.storage, spec.name, spec.offset) == ("input", name, name, 0)
    assert set(plan.inputs) == {*step_inputs(6, 6), "rank"}
    assert plan.tensors[plan.inputs["page_table"]].shape == (4,)
    assert len({spec.name for spec in plan.tensors}) == len(plan.tensors)


def refusal(view: View, **attributes: Any) -> str:
    """What lowering says of a module with this view in a layer of its own."""

    class Layer(nn.Module):
        def forward(self, given: Given) -> Tensor:
            return view(given)

    module = Views(VIEWS["rows"])
    module.view = Layer()
    for name, value in attributes.items():
        setattr(module, name, value)
    with pytest.raises(BuildError) as caught:
        lower_graph(trace(module, STEP, STATE, 1, torch.float32))
    return str(caught.value)


@pytest.mark.parametrize(
    ("view", "node", "op"),
    [
        (lambda t: torch.relu(t.x), "relu", "aten.relu.default"),
        (lambda t: t.x[1:] + 1, "add", "aten.add.Tensor"),
        (lambda t: t.x @ t.w[0], "matmul", "aten.matmul.default"),
        (lambda t: t.x.t().contiguous(), "contiguous", "aten.contiguous.default"),
        (lambda t: t.x.double().float(), "to", "aten.to.dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_eager_operators_are_refused(view: View, node: str, op: str) -> None:
    if op == "aten.matmul.default":
        weight = nn.Parameter(torch.empty(4, 24, 8, device="meta"), requires_grad=False)
        message = refusal(view, weight=weight)
    else:
        message = refusal(view)
    assert message == (
        f"view, node {node}: {op} is neither a view nor an operator of ours; there is no fallback "
        "to eager torch, express it with an ink:: operator"
    )


def test_tensors_that_a_module_makes_are_refused() -> None:
    constant = torch.ones(24, device="meta")
    message = refusal(lambda t: t.x * constant)
    assert message == (
        "c_view_lifted_tensor_0 is neither a weight, a state buffer nor an input of a step; a "
        "tensor that the module makes itself must become a parameter"
    )


def test_unknown_dtypes_are_refused() -> None:
    weight = nn.Parameter(torch.empty(4, 6, 8, dtype=torch.float16, device="meta"))
    weight.requires_grad_(requires_grad=False)
    assert refusal(VIEWS["rows"], weight=weight) == (
        "model, node p_weight: dtype float16 cannot stand in a plan"
    )
