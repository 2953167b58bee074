"""Runs a plan on real tensors as the CPU executor does, without an engine around it."""

from torch import Tensor

from inkrt.runtime.engine_file import StateLayout, StateSpec
from inkrt.runtime.executor.cpu import _BoundPlan, _Memory, _Rank
from inkrt.runtime.plan import Plan


def run_plan(
    plan: Plan, weights: dict[str, Tensor], state: dict[str, Tensor], inputs: dict[str, Tensor]
) -> list[Tensor]:
    """Outputs of a plan without collectives, as the CPU executor gives them; writes `state`."""
    specs = tuple(
        StateSpec(name, "ring", tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in state.items()
    )
    layout = StateLayout(2, 64, 4, 13, specs)
    memory = _Memory(_StateOnly(layout), plan.arena_bytes)  # type: ignore[arg-type]
    rank = _Rank(weights, memory)
    for name, value in state.items():
        memory.state[name].copy_(value)
    tensors = rank.bind(plan)
    bound = _BoundPlan(plan, [tensors])
    for name, value in inputs.items():
        tensors[plan.inputs[name]].copy_(value)
    for launch in plan.launches:
        bound.run_launch(launch)
    for name, value in state.items():
        value.copy_(memory.state[name])
    return [tensors[index] for index in plan.outputs.values()]


class _StateOnly:
    def __init__(self, state: StateLayout) -> None:
        self.state = state
