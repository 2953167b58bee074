"""The CPU executor: runs plans through the plugins' references, all ranks in one process.

It is the oracle that other executors are compared with, so it takes the plan literally: every rank
has its own arena, and tensors live at the offsets that the builder planned. Ranks run in lockstep,
launch by launch; a collective reads the payloads of all ranks in rank order.

This is the one module of the runtime that imports torch.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from inkrt.errors import EngineFormatError, EngineMismatchError
from inkrt.plugins.registry import Plugin, plugins
from inkrt.runtime.code_check import require_code
from inkrt.runtime.engine_file import EngineCode, EngineConfig, read_code, weight_files
from inkrt.runtime.executor import FEATURE_INPUTS, StepInput, StepOutput
from inkrt.runtime.plan import (
    Argument,
    Const,
    DType,
    Launch,
    Numbers,
    Plan,
    Ref,
    TensorSpec,
    weight_specs,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Called after each launch with the step's input, the launch and its outputs on rank 0.
Observer = Callable[[StepInput, Launch, list[Tensor]], None]


class CpuExecutor:
    """An engine on the CPU; see `runtime.executor.Executor`.

    Attributes:
        observer: sees every launch's outputs, for parity reports; None for nobody.

    Raises:
        EngineMismatchError: from the constructor, if the engine calls operators of other versions.
        EngineFormatError: from the constructor, if plans or weights are damaged.
    """

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        _check_plugins(folder, config)
        ranks = range(config.tp_size)
        # Every rank has its own copy of the plans in the format; on the CPU one serves all.
        code = read_code(folder, 0)
        require_code(folder, config, 0, code)
        self._plans = code.plans
        arena_bytes = max(plan.arena_bytes for plan in self._plans.values())
        self.observer: Observer | None = None
        self._config = config
        self._ranks = [
            _Rank(_load_weights(folder, config, rank, code), _Memory(config, arena_bytes))
            for rank in ranks
        ]
        self._bound = self._bind(self._ranks)

    def _bind(self, ranks: "list[_Rank]") -> "dict[str, _BoundPlan]":
        # Towers are the same on all ranks, so that one runs them for all.
        own = {step.name for step in self._config.tower_steps}
        return {
            name: _BoundPlan(plan, [r.bind(plan) for r in ranks[: 1 if name in own else None]])
            for name, plan in self._plans.items()
        }

    @property
    def can_refit(self) -> bool:
        """Weights are objects of this process."""
        return True

    def refit(self, folder: Path, config: EngineConfig) -> None:
        """Load all weights, then put them in place of the old ones, which are there until then."""
        code = read_code(folder, 0)
        require_code(folder, config, 0, code)
        ranks = [
            _Rank(_load_weights(folder, config, number, code), rank.memory)
            for number, rank in enumerate(self._ranks)
        ]
        self._bound, self._ranks = self._bind(ranks), ranks

    def run(self, step: str, step_input: StepInput, *, wants_logits: bool = True) -> StepOutput:
        """Run one step on all ranks."""
        bound = self._bound[step]
        plan = bound.plan
        count = len(step_input.tokens)
        assert 1 <= count <= plan.num_tokens, f"{count} tokens in step {step}"
        for rank, tensors in enumerate(bound.tensors):
            values = _input_values(step_input, rank, wants_logits=wants_logits)
            for name, index in plan.inputs.items():
                # Unused rows and pages keep harmless zeros.
                tensors[index].zero_()
                if name not in FEATURE_INPUTS:
                    value = values[name]
                    tensors[index][: len(value)] = torch.tensor(value, dtype=tensors[index].dtype)
            if step_input.features is not None:
                places = torch.from_numpy(step_input.features.places)
                features = tensors[plan.inputs["features"]]
                features[places] = torch.from_numpy(step_input.features.rows).to(features.dtype)
                tensors[plan.inputs["is_feature"]][places] = 1
        for launch in plan.launches:
            bound.run_launch(launch)
            if self.observer is not None:
                outputs_of_launch = [bound.tensors[0][index] for index in launch.outputs]
                self.observer(step_input, launch, outputs_of_launch)
        rows = count if plan.num_rows == plan.num_tokens else plan.num_rows
        outputs = {name: bound.tensors[0][index][:rows] for name, index in plan.outputs.items()}
        tokens: np.ndarray[Any, np.dtype[np.int32]] = outputs["tokens"].numpy().copy()
        wanted = outputs["logits"][: None if wants_logits else 0]
        logits: np.ndarray[Any, np.dtype[np.float32]] = wanted.numpy().copy()
        confidences = outputs["confidences"].numpy().copy() if "confidences" in outputs else None
        return StepOutput(tokens, logits, confidences)

    def encode(
        self, step: str, inputs: "Mapping[str, NDArray[np.generic]]", num_rows: int
    ) -> "NDArray[np.float32]":
        """Run a step of a tower on one rank."""
        bound = self._bound[step]
        plan, (tensors,) = bound.plan, bound.tensors
        assert 1 <= num_rows <= plan.num_tokens, f"{num_rows} rows in step {step}"
        for name, index in plan.inputs.items():
            value = torch.from_numpy(inputs[name])
            tensors[index].zero_()
            tensors[index][: len(value)] = value.to(tensors[index].dtype)
        for launch in plan.launches:
            bound.run_launch(launch)
        features = tensors[plan.outputs["features"]][:num_rows]
        rows: NDArray[np.float32] = features.float().numpy().copy()
        return rows

    @property
    def rounds(self) -> None:
        """The host runs all rounds."""

    def decode(self, step_input: StepInput, num_ahead: int) -> int:  # noqa: ARG002
        """Run the decode step on one token; none runs ahead."""
        return int(self.run("decode", step_input, wants_logits=False).tokens[0])

    def copy_slot(self, source: int, target: int) -> None:
        """Copy all ring buffers of a slot."""
        self._copy("ring", source, target)

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page of every paged buffer."""
        self._copy("paged", source, target)

    def state(self, name: str, rank: int = 0) -> Tensor:
        """A state buffer of a rank, for tests and parity reports; not a copy."""
        return self._ranks[rank].memory.state[name]

    def close(self) -> None:
        """Release all memory."""
        self._bound.clear()
        self._ranks.clear()

    def _copy(self, kind: str, source: int, target: int) -> None:
        for rank in self._ranks:
            for spec in self._config.state.buffers:
                if spec.kind == kind:
                    buffer = rank.memory.state[spec.name]
                    buffer[target] = buffer[source]


class _Memory:
    """What steps of one rank write to."""

    def __init__(self, config: EngineConfig, arena_bytes: int) -> None:
        self.state = {
            spec.name: torch.zeros(spec.shape, dtype=_dtype(spec.dtype))
            for spec in config.state.buffers
        }
        # int64 elements: every view dtype divides the length.
        self.arena = torch.zeros(-(-arena_bytes // 8), dtype=torch.int64)


class _Rank:
    """The weights of one rank, and its memory."""

    def __init__(self, weights: dict[str, Tensor], memory: _Memory) -> None:
        self.weights = weights
        self.memory = memory

    def bind(self, plan: Plan) -> list[Tensor]:
        """A tensor for every `plan.tensors`; inputs get memory of their own per plan."""
        inputs = {
            spec.storage: torch.zeros(spec.shape, dtype=_dtype(spec.dtype))
            for spec in plan.tensors
            if spec.space == "input"
            and spec.storage in plan.inputs
            and spec.offset == 0
            and plan.tensors[plan.inputs[spec.storage]] is spec
        }
        return [self._view(spec, inputs) for spec in plan.tensors]

    def _view(self, spec: TensorSpec, inputs: dict[str, Tensor]) -> Tensor:
        dtype = _dtype(spec.dtype)
        if spec.space == "arena":
            base = self.memory.arena.view(dtype)
        elif spec.space == "weight":
            base = self.weights[spec.storage]
        elif spec.space == "state":
            base = self.memory.state[spec.storage]
        else:
            base = inputs[spec.storage]
        offset = base.storage_offset() + spec.offset // dtype.itemsize
        return base.as_strided(spec.shape, spec.strides, offset)


class _BoundPlan:
    """A plan with the tensors of every rank."""

    def __init__(self, plan: Plan, tensors: list[list[Tensor]]) -> None:
        self.plan = plan
        self.tensors = tensors
        self._arguments = {
            id(launch): [_arguments(launch, of_rank) for of_rank in tensors]
            for launch in plan.launches
        }

    def run_launch(self, launch: Launch) -> None:
        plugin = plugins()[launch.op]
        arguments = self._arguments[id(launch)]
        for tensors, result in zip(self.tensors, _evaluate(plugin, arguments), strict=True):
            values = () if result is None else (result,) if isinstance(result, Tensor) else result
            for index, value in zip(launch.outputs, values, strict=True):
                tensors[index].copy_(value)


def _evaluate(plugin: Plugin, arguments: list[dict[str, Any]]) -> list[Any]:
    """Results of one launch on every rank."""
    if plugin.collective is None:
        return [plugin.reference(**of_rank) for of_rank in arguments]
    payloads = [plugin.collective.payload(**of_rank) for of_rank in arguments]
    return [plugin.collective.combine(payloads, **of_rank) for of_rank in arguments]


def _arguments(launch: Launch, tensors: list[Tensor]) -> dict[str, Any]:
    def value(argument: Argument) -> Any:
        if isinstance(argument, Ref):
            return tensors[argument.tensor]
        if isinstance(argument, Const):
            return argument.value
        if isinstance(argument, Numbers):
            return list(argument.values)
        if isinstance(argument, DType):
            return _dtype(argument.name)
        return [tensors[index] for index in argument.tensors]

    return {name: value(argument) for name, argument in launch.args.items()}


def _input_values(
    step_input: StepInput, rank: int, *, wants_logits: bool
) -> dict[str, list[int] | list[float]]:
    sampling = step_input.sampling
    return {
        "tokens": list(step_input.tokens),
        "position": [step_input.position],
        "num_tokens": [len(step_input.tokens)],
        "slot": [step_input.slot],
        "rank": [rank],
        "page_table": list(step_input.pages),
        "temperature": [sampling.temperature],
        "top_k": [sampling.top_k],
        "top_p": [sampling.top_p],
        "min_p": [sampling.min_p],
        "seed": [sampling.seed],
        "is_coupled": [int(step_input.is_coupled)],
        "wants_logits": [int(wants_logits)],
    }


def _check_plugins(folder: Path, config: EngineConfig) -> None:
    for name, version in config.plugins.items():
        ours = plugins()[name].version if name in plugins() else None
        if ours != version:
            raise EngineMismatchError(
                f"engine {folder} calls operator {name} version {version}, this inkrt has "
                f"{'none' if ours is None else f'version {ours}'}; "
                f"rebuild it with: {config.rebuild_command}"
            )


def _load_weights(
    folder: Path, config: EngineConfig, rank: int, code: EngineCode
) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name in weight_files(config, rank):
        try:
            weights |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise EngineFormatError(
                f"{folder / name} is damaged ({error}); copy the engine again or rebuild it with: "
                f"{config.rebuild_command}"
            ) from None
    specs = weight_specs(code.plans)
    for name, kind in code.template_of.items():
        weights[name] = _repeat(code.templates[kind], specs[name])
    for name, spec in specs.items():
        got = weights.get(name)
        if got is None or tuple(got.shape) != spec.shape or got.dtype != _dtype(spec.dtype):
            found = "missing" if got is None else f"{got.dtype} {list(got.shape)}"
            raise EngineFormatError(
                f"engine {folder} is damaged: weight {name} of rank {rank} is {found}, its plans "
                f"read {spec.dtype} {list(spec.shape)}; rebuild it with: {config.rebuild_command}"
            )
    return weights


def _repeat(template: bytes, spec: TensorSpec) -> Tensor:
    """A dummy weight: the template over and over."""
    data = torch.frombuffer(bytearray(template), dtype=_dtype(spec.dtype))
    size = math.prod(spec.shape)
    return data.repeat(-(-size // data.numel()))[:size].reshape(spec.shape)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
