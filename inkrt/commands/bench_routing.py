"""Which experts a step reads: `ink-bench` counts their bytes, not those of independent choices.

What a mixture of experts reads hangs on what its tokens have in common, and so does its time. So
its router is evaluated here once more, on the activations that the step has on the GPU right before
the launch. Sums in another order than the kernel's may decide a near tie differently.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from statistics import mean
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inkrt.runtime.executor import StepInput
from inkrt.runtime.plan import DTYPE_BYTES, Const, Launch, Plan, Ref, weight_specs

# Tensor arguments of a launch, by name.
_Values = Mapping[str, NDArray[Any]]


class StepReader(Protocol):
    """Reads what launches find, see `runtime.executor.cuda_timing.Timer`."""

    def read(
        self, step: str, step_input: StepInput, until: int, tensors: Sequence[int]
    ) -> list[NDArray[np.uint8]]:
        """Bytes of tensors after the step's first launches."""
        ...


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts that a launch reads on a rank.

    Attributes:
        distinct: how many tokens of the step chose.
        independent: how many they would choose independently of each other, on average.
        expert_bytes: of one.
    """

    distinct: int
    independent: float
    expert_bytes: int

    def bytes_of(self, launch: Launch) -> int:
        """Least bytes of the launch, whose own count is of independent choices."""
        of_independent = ceil(self.independent * self.expert_bytes)
        return launch.bytes - of_independent + self.distinct * self.expert_bytes


def _scores_of_moe(values: _Values) -> NDArray[np.float32]:
    logits = values["x"] @ values["router_weight"].T
    scores: NDArray[np.float32] = 1 / (1 + np.exp(-logits)) + values["router_bias"]
    return scores


# By operator: arguments, and what its tokens choose the largest of by them, float32 [T, E].
_SCORES: Mapping[str, tuple[Sequence[str], Callable[[_Values], NDArray[np.float32]]]] = {
    "moe": (("x", "router_weight", "router_bias"), _scores_of_moe),
    "moe_conv_mix": (("x", "router_weight", "router_bias"), _scores_of_moe),
    "flint_moe": (("logits",), lambda values: values["logits"]),
}


def has_routing(op: str) -> bool:
    """Whether an operator's tokens choose experts."""
    return op in _SCORES


def step_routing(reader: StepReader, plan: Plan, step_input: StepInput) -> dict[int, Routing]:
    """The routing of every mixture of experts of a step, by the launch's index.

    Operators that run several layers have none: they serve one token, which reads `top_k` experts.
    """
    return {
        index: routing
        for index, launch in enumerate(plan.launches)
        if (routing := launch_routing(reader, plan, launch, step_input, index)) is not None
    }


def launch_routing(
    reader: StepReader, plan: Plan, launch: Launch, step_input: StepInput, until: int
) -> Routing | None:
    """The routing of a launch behind the step's first `until`; None if it has no experts."""
    if launch.op not in _SCORES:
        return None
    top_k = launch.args["top_k"]
    assert isinstance(top_k, Const)
    assert isinstance(top_k.value, int), f"{launch.op}: top_k is {top_k.value}"

    names, scores_of = _SCORES[launch.op]
    if isinstance(launch.args["rank"], Ref):
        names = [*names, "rank"]
    indices = [_tensor(launch, name) for name in names]
    found = reader.read(plan.name, step_input, until, indices)
    values = {}
    for name, index, data in zip(names, indices, found, strict=True):
        spec = plan.tensors[index]
        values[name] = _values(data, spec.dtype).reshape(spec.shape)
    scores = scores_of(values)
    # Ties go to the lowest id, as in the operators.
    ids = np.argsort(-scores, axis=-1, kind="stable")[:, : top_k.value]
    num_own = plan.tensors[_tensor(launch, "gate_up")].shape[0]
    first = int(values["rank"][0]) * num_own if "rank" in values else 0
    distinct = np.unique(ids)
    num_tokens, num_experts = scores.shape
    independent = num_own * (1 - (1 - top_k.value / num_experts) ** num_tokens)
    specs = weight_specs({plan.name: plan})  # as kernels read them
    storages = [plan.tensors[_tensor(launch, name)].storage for name in ("gate_up", "down")]
    num_bytes = sum(prod(specs[x].shape) * DTYPE_BYTES[specs[x].dtype] for x in storages)
    return Routing(
        int(((distinct >= first) & (distinct < first + num_own)).sum()),
        independent,
        num_bytes // num_own,
    )


def summary(routing: Mapping[int, Routing]) -> dict[str, Any]:
    """Distinct experts of all launches of a step, for people and JSON."""
    distinct = [of_launch.distinct for of_launch in routing.values()]
    return {
        "mean": mean(distinct),
        "independent": mean(of_launch.independent for of_launch in routing.values()),
        "distinct": distinct,
    }


def _tensor(launch: Launch, name: str) -> int:
    argument = launch.args[name]
    assert isinstance(argument, Ref), f"{launch.op}: {name} is no tensor"
    return argument.tensor


def _values(data: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """Numbers of bytes; numpy has no bf16, so these become float32."""
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view({"float32": np.float32, "int32": np.int32}[dtype])
