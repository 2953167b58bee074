"""Rows of launches one token at a time and several at once: equal, or told launch by launch.

The GPU is made up: a launch writes what it is told for the tokens of the step.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[2] / "perf"))

from fake import make_config
from slice_hash import compare, differences, token_axes

from inkrt.runtime.executor import StepInput
from inkrt.runtime.plan import Launch, Plan, TensorSpec

WIDTH, COLUMNS = 3, 5
# By launch: the shape of its output, T standing for tokens.
OUTPUTS = {"embed": ("T", COLUMNS), "mix": (2, "T", COLUMNS), "head": ("T", 4)}


def make_plan(name: str, num_tokens: int) -> Plan:
    tensors, launches = [], []
    for number, (op, shape) in enumerate(OUTPUTS.items()):
        sizes = tuple(num_tokens if size == "T" else int(size) for size in shape)
        tensors.append(TensorSpec(op, "float32", sizes, (), "arena", "", 0))
        launches.append(Launch(op, "t", {}, (number,), f"layers.{number}", 0))
    outputs = {"logits": len(OUTPUTS) - 1}
    return Plan(name, num_tokens, num_tokens, tuple(tensors), tuple(launches), 0, {}, outputs)


class Gpu:
    """What a launch writes for a token is a function of its op, the token and its position.

    Attributes:
        wrong: op, token's place and step where one byte is another.
        wrong_graph: step whose whole graph gives other logits than its launches.
    """

    def __init__(self) -> None:
        self.plans = {"decode": make_plan("decode", 1), "verify3": make_plan("verify3", WIDTH)}
        self.memory: dict[tuple[str, int], np.ndarray[Any, Any]] = {}
        self.wrong: tuple[str, int, str] | None = None
        self.wrong_graph = ""
        self.stream, self.ranks = object(), [self]

    def plan(self, step: str) -> Plan:
        return self.plans[step]

    def send_inputs(self, step_input: StepInput) -> None:
        self.given = step_input
        self.memory.clear()  # nothing of another step is read

    def capture(self, plan: Plan) -> Any:
        return SimpleNamespace(launch=lambda _: [self.write(plan, x) for x in plan.launches])

    def launch(self, step: str) -> None:
        self.capture(self.plans[step]).launch(self.stream)
        if step == self.wrong_graph:
            self.memory[step, len(OUTPUTS) - 1][0, 0] += 1

    def require_sound(self) -> None:
        pass

    def write(self, plan: Plan, launch: Launch) -> None:
        (index,) = launch.outputs
        shape = plan.tensors[index].shape
        values = np.zeros(shape, np.float32)
        for place, token in enumerate(self.given.tokens):
            seed = [len(launch.op), token, self.given.position + place]
            row = np.random.default_rng(seed).normal(size=(*shape[:-2], shape[-1]))
            if (launch.op, place, plan.name) == self.wrong:
                row[..., -1] += 1e-3
            values[..., place, :] = row
        self.memory[plan.name, index] = values

    def read(self, step: str, tensor: int) -> Any:
        return self.memory[step, tensor].view(np.uint8).reshape(-1)


def run(gpu: Gpu) -> tuple[list[str], list[str]]:
    steps = tuple(s for s in make_config().steps if s.name in gpu.plans)
    return compare(gpu, make_config(steps=steps), 20, WIDTH)  # type: ignore[arg-type]


def test_equal_rows_have_one_digest() -> None:
    (first, one, many), found = run(Gpu())
    assert found == []
    assert first.startswith("3 launches, 4 different logits in the last row, 0 NaN")
    assert one.split()[1] == many.split()[1]
    assert many.endswith("equal")


@pytest.mark.parametrize("op", OUTPUTS)
@pytest.mark.parametrize("place", range(WIDTH))
def test_a_row_that_depends_on_the_width_is_named(op: str, place: int) -> None:
    gpu = Gpu()
    gpu.wrong = op, place, "verify3"
    (_, one, many), found = run(gpu)
    number = list(OUTPUTS).index(op)
    assert found[0].startswith(f"UNEQUAL: launch {number}, {op} (t) of layers.{number}, output 0, ")
    assert f", token {place}: " in found[0]
    assert one.split()[1] != many.split()[1]


@pytest.mark.parametrize("step", ["decode", "verify3"])
def test_a_graph_that_differs_from_its_launches_is_told(step: str) -> None:
    gpu = Gpu()
    gpu.wrong_graph = step
    _, found = run(gpu)
    name = "T=1" if step == "decode" else step
    assert found == [f"UNEQUAL: logits of the graph of {name} and of its launches one by one"]


def test_axes_are_found_and_other_shapes_refused() -> None:
    gpu = Gpu()
    assert token_axes(gpu.plan("decode"), gpu.plan("verify3")) == [[0], [1], [0]]
    other = replace(gpu.plan("verify3"), launches=gpu.plan("verify3").launches[::-1])
    with pytest.raises(AssertionError, match="stands where"):
        token_axes(gpu.plan("decode"), other)
    assert differences([], [], []) == []
