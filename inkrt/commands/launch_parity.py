"""Parity of a GPU engine with the CPU, launch by launch.

Two engines of the same checkpoint and options, one for each target, run the same step. The GPU
engine is built with `keep_intermediates`, so what every launch wrote is still there afterwards; the
CPU executor is observed. Where inputs already differ, outputs do too, so the first launch that is
far off is the one to look at.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from inkrt.runtime.executor import Sampling, StepInput
from inkrt.runtime.executor.cpu import CpuExecutor
from inkrt.runtime.executor.cuda import CudaExecutor
from inkrt.runtime.plan import Launch, Plan, TensorParam

if TYPE_CHECKING:
    from torch import Tensor

    from inkrt.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class LaunchDistance:
    """Distance of one output of a launch.

    Attributes:
        launch: index in the plan.
        output: index among the launch's outputs.
        relative_error: ||gpu - cpu|| / ||cpu|| of the rows that are valid.
    """

    launch: int
    op: str
    module: str
    output: int
    relative_error: float


def compare_launches(
    cpu: "Engine", gpu: "Engine", tokens: list[int], *, before: list[int] | None = None
) -> list[LaunchDistance]:
    """Run `tokens` as one step on both engines.

    Args:
        cpu: engine for the CPU, built with `keep_intermediates` too, and with the same steps.
        gpu: engine for a GPU, built with `keep_intermediates`.
        tokens: no more than the widest step takes.
        before: tokens in front, in steps of their own; None for none.
    """
    assert isinstance(cpu.executor, CpuExecutor)
    assert isinstance(gpu.executor, CudaExecutor)
    assert cpu.config.steps == gpu.config.steps, "launches of other steps are not comparable"
    steps = sorted(gpu.config.steps, key=lambda step: step.num_tokens)
    step = next(step.name for step in steps if step.num_tokens >= len(tokens))
    expected: list[list[Tensor]] = []

    def observe(_input: StepInput, _launch: Launch, outputs: "list[Tensor]") -> None:
        expected.append([output.clone() for output in outputs])

    with cpu.session() as session:
        if before:
            session.prefill(before, Sampling())
        cpu.executor.observer = observe
        session.prefill(tokens, Sampling())
    cpu.executor.observer = None
    with gpu.session() as session:
        if before:
            session.prefill(before, Sampling())
        session.prefill(tokens, Sampling())
    plan = gpu.executor.plan(step)
    distances = []
    for index, launch in enumerate(plan.launches):
        for number in _written(launch):
            want = expected[index][number]
            got = _read(gpu.executor, plan, launch.outputs[number], want)
            if len(want) == plan.num_tokens:
                got, want = got[: len(tokens)], want[: len(tokens)]
            error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
            distances.append(LaunchDistance(index, launch.op, launch.module, number, float(error)))
    return distances


def _written(launch: Launch) -> list[int]:
    """Outputs that some kernel of the launch has the address of."""
    params = {
        param.tensor
        for kernel in launch.kernels
        for param in kernel.params
        if isinstance(param, TensorParam)
    }
    return [number for number, tensor in enumerate(launch.outputs) if tensor in params]


def _read(executor: CudaExecutor, plan: Plan, tensor: int, like: "Tensor") -> "Tensor":
    data = executor.read(plan.name, tensor)
    flat = torch.from_numpy(np.ascontiguousarray(data)).view(like.dtype)
    return flat.reshape(plan.tensors[tensor].shape)
