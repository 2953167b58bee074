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

from inkrt.runtime.engine_file import DRAFT_STEP
from inkrt.runtime.executor import Sampling, StepInput
from inkrt.runtime.executor.cpu import CpuExecutor
from inkrt.runtime.executor.cuda import CudaExecutor
from inkrt.runtime.plan import Launch, Plan, TensorParam

if TYPE_CHECKING:
    from torch import Tensor

    from inkrt.runtime.engine import Engine
    from inkrt.runtime.session import Session


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
    cpu: "Engine",
    gpu: "Engine",
    tokens: list[int],
    *,
    before: list[int] | None = None,
    drafts: bool = False,
) -> list[LaunchDistance]:
    """Run `tokens` as one step on both engines, or the draft step on the only one.

    Args:
        cpu: engine for the CPU, built with `keep_intermediates` too, and with the same steps.
        gpu: engine for a GPU, built with `keep_intermediates`.
        tokens: no more than the widest step takes.
        before: tokens in front, in steps of their own; None for none.
        drafts: whether to run the draft step, greedy, with a token as its anchor.
    """
    assert isinstance(cpu.executor, CpuExecutor)
    assert isinstance(gpu.executor, CudaExecutor)
    assert cpu.config.steps == gpu.config.steps, "launches of other steps are not comparable"
    steps = sorted(gpu.config.steps, key=lambda step: step.num_tokens)
    step = next(step.name for step in steps if step.num_tokens >= len(tokens))
    if drafts:
        assert len(tokens) == 1, "an anchor is one token"
        step = DRAFT_STEP
    expected: list[list[Tensor]] = []

    def observe(_input: StepInput, _launch: Launch, outputs: "list[Tensor]") -> None:
        expected.append([output.clone() for output in outputs])

    with cpu.session() as session:
        if before:
            session.prefill(before, Sampling())
        cpu.executor.observer = observe
        _run(session, tokens, drafts=drafts)
    cpu.executor.observer = None
    with gpu.session() as session:
        if before:
            session.prefill(before, Sampling())
        _run(session, tokens, drafts=drafts)
    plan = gpu.executor.plan(step)
    distances = []
    for index, launch in enumerate(plan.launches):
        for number in _written(launch):
            want = expected[index][number]
            got = _read(gpu.executor, plan, launch.outputs[number], want)
            if plan.num_tokens in want.shape[:2]:  # [T, ...], or [m, T, ...] of a stack
                rows = slice(len(tokens))
                where = (rows,) if len(want) == plan.num_tokens else (slice(None), rows)
                got, want = got[where], want[where]
            error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
            distances.append(LaunchDistance(index, launch.op, launch.module, number, float(error)))
    return distances


def _run(session: "Session", tokens: list[int], *, drafts: bool) -> None:
    if drafts:
        session.draft(tokens[0], Sampling(), coupled=True, wants_logits=False)
    else:
        session.prefill(tokens, Sampling())


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
