"""What figures of `ink-bench` are made of: inputs of a step, bytes of its launches, their price.

A launch's price is what the step takes longer for it: the time of the step cut behind it less that
of the step cut before it. Kernels overlap, so this is not how long the launch runs alone, but the
prices of all launches add up to the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from statistics import median
from typing import Any, Protocol

from inkrt.commands.bench_routing import Routing
from inkrt.runtime.engine_file import EngineConfig, StepSpec
from inkrt.runtime.executor import Sampling, StepInput
from inkrt.runtime.plan import DTYPE_BYTES, Launch, Plan, Ref, Refs

# Read-only bandwidth of one H200, measured.
BANDWIDTH_TB_S = 4.55
WARM_UP_RUNS = 5


class StepTimer(Protocol):
    """Times steps, see `runtime.executor.cuda_timing.Timer`."""

    def step(
        self, step: str, step_input: StepInput, num_runs: int, *, until: int | None = None
    ) -> list[float]:
        """GPU time in us of every run."""
        ...


@dataclass(frozen=True, slots=True)
class LaunchPrice:
    """What a launch costs in its step.

    Attributes:
        launch: of the plan.
        us: price.
        bytes: least bytes it moves, with the keys and values of its context.
    """

    launch: Launch
    us: float
    bytes: int


def step_input_of(config: EngineConfig, step: StepSpec, context: int) -> StepInput:
    """Tokens behind `context` others of one session; drafts share the noise of its draws."""
    pages = list(range(-(-config.max_seq_len // config.state.page_tokens)))
    tokens = [(17 + 31 * row) % config.model.vocab_size for row in range(step.num_tokens)]
    return StepInput(tokens, context, 0, pages, Sampling(), is_coupled=True)


def floor_us(num_bytes: float) -> float:
    """Least time for bytes from memory, in us."""
    return num_bytes / BANDWIDTH_TB_S / 1e6


def launch_bytes(
    config: EngineConfig, plan: Plan, context: int, routing: Mapping[int, Routing] | None = None
) -> list[int]:
    """Least bytes that each launch moves.

    Launches that have a routing read the experts of that; others count those of independent tokens.
    A paged buffer's older positions are counted where the buffer is used last: operators that only
    write a cache come before those that read it.
    """
    per_token = {
        buffer.name: prod(buffer.shape[2:]) * DTYPE_BYTES[buffer.dtype]
        for buffer in config.state.buffers
        if buffer.kind == "paged"
    }
    reader: dict[str, int] = {}
    for index, launch in enumerate(plan.launches):
        for tensor in _tensors(launch):
            spec = plan.tensors[tensor]
            if spec.space == "state" and spec.storage in per_token:
                reader[spec.storage] = index
    result = [launch.bytes for launch in plan.launches]
    for index, of_launch in (routing or {}).items():
        result[index] = of_launch.bytes_of(plan.launches[index])
    for name, index in reader.items():
        result[index] += context * per_token[name]
    return result


def _tensors(launch: Launch) -> list[int]:
    tensors: list[int] = []
    for argument in launch.args.values():
        if isinstance(argument, Ref):
            tensors.append(argument.tensor)
        elif isinstance(argument, Refs):
            tensors.extend(argument.tensors)
    return tensors


def price_launches(
    timer: StepTimer, plan: Plan, step_input: StepInput, num_runs: int, whole_us: float,
    num_bytes: Sequence[int],
) -> list[LaunchPrice]:  # fmt: skip
    """The price of every launch; the first one's has the start of the step in it.

    Args:
        timer: of the engine.
        plan: of the step.
        step_input: of the step.
        num_runs: replays of every cut.
        whole_us: time of the whole step, which the prices add up to.
        num_bytes: of every launch.
    """
    ends = [0.0]
    for until in range(1, len(plan.launches)):
        ends.append(median(timer.step(plan.name, step_input, num_runs, until=until)))
    ends.append(whole_us)
    prices = [after - before for before, after in pairwise(ends)]
    return [LaunchPrice(*row) for row in zip(plan.launches, prices, num_bytes, strict=True)]


def price_rows(prices: Sequence[LaunchPrice]) -> list[dict[str, Any]]:
    """Launches of one operator and tactic together, the dearest first, each with its modules."""
    kinds: dict[tuple[str, str], list[LaunchPrice]] = {}
    for price in prices:
        kinds.setdefault((price.launch.op, price.launch.tactic), []).append(price)
    rows = []
    for (op, tactic), members in kinds.items():
        modules: dict[str, float] = {}
        for member in members:
            module = member.launch.module
            modules[module] = modules.get(module, 0.0) + member.us
        rows.append(
            {
                "op": op,
                "tactic": tactic,
                "count": len(members),
                "us": sum(member.us for member in members),
                "floor_us": floor_us(sum(member.bytes for member in members)),
                "us_of_modules": modules,
            }
        )
    return sorted(rows, key=lambda row: -row["us"])
