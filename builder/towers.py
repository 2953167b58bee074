"""The towers of an engine: which are built in, their steps, and how their weights are found."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
import torch
from torch import Tensor, nn

from inkrt.builder.checkpoint import CheckpointSource
from inkrt.builder.lower import operator_nodes
from inkrt.builder.options import BuildOptions
from inkrt.builder.rewrite import arguments
from inkrt.builder.tactics import call_args, find_tactics
from inkrt.builder.trace import IS_FEATURE, StepGraph, trace, trace_tower
from inkrt.engines.interface import Definition, ModelConfig, StateOptions, WeightSource
from inkrt.engines.tower import Tower
from inkrt.errors import BuildError, ConfigError
from inkrt.runtime.engine_file import StepSpec
from inkrt.runtime.tower_spec import Processor, TowerInputSpec, TowerSpec, TowerStepSpec

Progress = Callable[[str], None]


class TowerStep(nn.Module):
    """A step of a tower, whose parameters are named as the engine has them: `vision.*`."""

    def __init__(self, tower: Tower, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind = tower.kind
        self.add_module(tower.kind, tower.build_module(dtype))

    def forward(self, *inputs: Tensor) -> object:
        """See `Tower.build_module`."""
        return self.get_submodule(self.kind)(*inputs)


def choose_towers(
    checkpoint: CheckpointSource,
    definition: Definition,
    model: ModelConfig,
    options: BuildOptions,
    progress: Progress,
) -> tuple[Tower, ...]:
    """The towers to build in: all that configuration and checkpoint have, unless none are wanted.

    Raises:
        ConfigError: the target cannot have them.
    """
    found = definition.towers(checkpoint.config, model)
    if options.towers == "none":
        return ()
    chosen = []
    for tower in found:
        if options.weights == "real" and not any(map(tower.is_weight, checkpoint.names)):
            progress(f"tower {tower.kind}: left out, the checkpoint has none of its tensors")
        else:
            sizes = " and ".join(map(str, tower.sizes))
            token_id = tower.placeholder.token_id
            progress(f"tower {tower.kind}: placeholder {token_id}, steps of {sizes} rows")
            chosen.append(tower)
    return tuple(chosen)


def tower_steps(
    towers: Iterable[Tower], tp_size: int, dtype: torch.dtype, *, is_plain: bool = False
) -> list[tuple[TowerStep, StepGraph]]:
    """Every step of every tower: its module and its graph, see `trace_tower`."""
    steps = []
    for tower in towers:
        for size in tower.sizes:
            module = TowerStep(tower, dtype)
            step = StepSpec(f"{tower.kind}{size}", size, size)
            graph = trace_tower(module, tower, step, tp_size, dtype, is_plain=is_plain)
            steps.append((module, graph))
    return steps


def plain_steps(towers: Iterable[Tower], tp_size: int, dtype: torch.dtype) -> list[StepGraph]:
    """Graphs of every step of every tower in standard operators."""
    return [graph for _, graph in tower_steps(towers, tp_size, dtype, is_plain=True)]


def traced_steps(
    modules: Iterable[tuple[StepSpec, nn.Module]],
    towers: Iterable[tuple[TowerStep, StepGraph]],
    model: ModelConfig,
    state: StateOptions,
    options: BuildOptions,
    dtype: torch.dtype,
) -> Iterator[StepGraph]:
    """Graphs of all steps of an engine; with towers, prefill steps take feature rows.

    Args:
        modules: steps of the model and of the drafter.
        towers: as `tower_steps` gives them.
        model: configuration.
        state: sizes of inputs.
        options: of the build.
        dtype: compute dtype.

    Raises:
        ConfigError: the target cannot run what towers need.
    """
    graphs = [graph for _, graph in towers]
    for graph in graphs:
        _require_kernels(graph, options.target)
    for step, module in modules:
        is_prefill = 1 == step.num_rows < step.num_tokens
        width = model.hidden_size if graphs and is_prefill else None
        graph = trace(module, step, state, options.tp_size, dtype, width)
        if width is not None:
            _require_kernels(graph, options.target)
        yield graph
    yield from graphs


def _require_kernels(graph: StepGraph, target: str) -> None:
    """Check that a target has kernels for what towers bring into a graph, theirs or prefill's."""
    if target == "cpu":
        return
    is_tower = IS_FEATURE not in graph.inputs
    for node, plugin in operator_nodes(graph):
        if not is_tower and plugin.name != "place_features":
            continue
        detail = ""
        try:
            found = find_tactics(plugin.name, target, call_args(arguments(node)))
        except BuildError as error:
            found, detail = [], f" ({error})"
        if not found:
            raise ConfigError(
                f"step {graph.step.name}: {plugin.qualified_name}, which towers need, has no "
                f"kernel for {target} in this version{detail}; build for the cpu, or leave the "
                f"towers out with --towers none"
            )


def tower_sources(towers: Iterable[Tower], names: frozenset[str]) -> dict[str, WeightSource]:
    """The places of all parameters of the towers, the same on all ranks."""
    return {
        f"{tower.kind}.{name}": source
        for tower in towers
        for name, source in tower.weight_sources(names).items()
    }


def tower_specs(towers: Iterable[Tower], dtype: torch.dtype) -> tuple[TowerSpec, ...]:
    """The towers, as the engine's configuration has them."""
    return tuple(
        TowerSpec(
            kind=tower.kind,
            token_id=tower.placeholder.token_id,
            marker_id=tower.placeholder.marker_id,
            steps=tuple(
                TowerStepSpec(
                    size,
                    {
                        name: TowerInputSpec(str(kind).removeprefix("torch."), shape)
                        for name, (shape, kind) in tower.inputs(size, dtype).items()
                    },
                )
                for size in tower.sizes
            ),
            is_rowwise=tower.is_rowwise,
            processor=_processor(tower.processor),
        )
        for tower in towers
    )


def _processor(settings: Mapping[str, object]) -> Processor:
    processor: Processor = msgspec.convert(dict(settings), type=Processor)
    return processor
