"""Tracing: the module of one rank, or of a tower, becomes the graph of one step.

The graph is the `torch.fx` graph that `torch.export` gives from meta tensors: view operations and
`ink::` operators in program order. Parameters and state buffers are placeholders; the graph is the
same for every rank, which differ only in the weights that are packed for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from inkrt.engines.interface import StateOptions, StepInputs
from inkrt.engines.tower import Tower
from inkrt.plugins.plain import to_plain
from inkrt.runtime.engine_file import DRAFT_STEP, StepSpec

STEP_INPUTS: dict[str, torch.dtype] = {
    "tokens": torch.int32,
    "position": torch.int32,
    "num_tokens": torch.int32,
    "slot": torch.int32,
    "rank": torch.int32,
    "page_table": torch.int32,
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
}
# Of the draft step: whether its draws share the noise of the target's, and whether logits are read.
FURTHER_INPUTS = {"is_coupled": torch.int32, "wants_logits": torch.int32}
# Of a prefill step of a model with towers, besides `features` [T, D] in the compute dtype.
IS_FEATURE = "is_feature"
DRAFT_INPUTS = {**STEP_INPUTS, **FURTHER_INPUTS}
torch.export.register_dataclass(StepInputs)


@dataclass(slots=True)
class StepGraph:
    """The graph of one step.

    Attributes:
        step: what was traced.
        module: the graph; passes rewrite it in place.
        weights: placeholder name to parameter name.
        state: placeholder name to state buffer name.
        row_parallel: parameters that ranks share along the dimension summed over.
        tp_size: ranks that run it together.
        dtype: compute dtype of the model.
        inputs: placeholders that the executor fills.
        outputs: names of what the graph returns, in order; the last may be missing.
    """

    step: StepSpec
    module: GraphModule
    weights: dict[str, str]
    state: dict[str, str]
    row_parallel: frozenset[str]
    tp_size: int
    dtype: torch.dtype
    inputs: frozenset[str] = frozenset(DRAFT_INPUTS)
    outputs: tuple[str, ...] = ("tokens", "logits", "confidences")


def trace(
    module: nn.Module,
    step: StepSpec,
    state: StateOptions,
    tp_size: int,
    dtype: torch.dtype,
    features: int | None = None,
) -> StepGraph:
    """Trace `module` for `step`; its forward takes `StepInputs`, for drafts FURTHER_INPUTS too.

    Args:
        module: of one rank.
        step: which.
        state: sizes of its inputs.
        tp_size: ranks that run it together.
        dtype: compute dtype.
        features: width of feature rows that the step takes in place of embeddings; None for none.
    """
    sizes = {"tokens": step.num_tokens, "page_table": state.pages_per_session}
    inputs = {name: _on_meta(sizes.get(name, 1), dtype=kind) for name, kind in STEP_INPUTS.items()}
    names = FURTHER_INPUTS if step.name == DRAFT_STEP else {}
    further = {name: _on_meta(1, dtype=kind) for name, kind in names.items()}
    if features is not None:
        further["features"] = _on_meta(step.num_tokens, features, dtype=dtype)
        further[IS_FEATURE] = _on_meta(step.num_tokens, dtype=torch.int32)
    exported = _export(module, (StepInputs(**inputs), *further.values()))
    for node in exported.graph.find_nodes(op="placeholder"):
        if (name := node.name.removeprefix("step_")) in inputs:
            node.name = node.target = name
    exported.graph_module.recompile()
    row_parallel = module.row_parallel_weights()  # type: ignore[operator]
    shared = _names_of_shared(module)
    return _graph(exported, step, row_parallel, tp_size, dtype, {**inputs, **further}, shared)


def trace_tower(
    module: nn.Module,
    tower: Tower,
    step: StepSpec,
    tp_size: int,
    dtype: torch.dtype,
    *,
    is_plain: bool = False,
) -> StepGraph:
    """Trace a step of a tower, whose `forward` takes what `Tower` says.

    Args:
        module: has the tower's module as the attribute of the name of its kind, so that its
            parameters are named like that, and gives what that gives.
        tower: its description.
        step: which.
        tp_size: ranks; all run the same.
        dtype: compute dtype.
        is_plain: whether in standard operators; see `plugins.plain`.
    """
    inputs = {
        name: _on_meta(*shape, dtype=kind)
        for name, (shape, kind) in tower.inputs(step.num_tokens, dtype).items()
    }
    exported = _export(module, tuple(inputs.values()))
    if is_plain:
        exported = to_plain(exported)
    placeholders = [spec.arg.name for spec in exported.graph_signature.input_specs]
    own = placeholders[len(placeholders) - len(inputs) :]
    for node in exported.graph.find_nodes(op="placeholder"):
        if node.name in own:
            node.name = node.target = list(inputs)[own.index(node.name)]
    exported.graph_module.recompile()
    graph = _graph(exported, step, frozenset(), tp_size, dtype, inputs, {})
    graph.outputs = ("features",)
    return graph


def _on_meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _export(module: nn.Module, args: tuple[object, ...]) -> torch.export.ExportedProgram:
    # Else torch writes and compiles the graph's Python at every step of export, and at `recompile`.
    # Passes read nodes alone; whoever does run or print the graph gets its code then.
    with _use_lazy_graph_module(True):
        return torch.export.export(module, args, strict=False)


def _graph(
    exported: torch.export.ExportedProgram,
    step: StepSpec,
    row_parallel: frozenset[str],
    tp_size: int,
    dtype: torch.dtype,
    inputs: Mapping[str, torch.Tensor],
    shared: Mapping[str, str],
) -> StepGraph:
    weights, buffers = {}, {}
    placeholders = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
    for spec in exported.graph_signature.input_specs:
        if spec.kind == InputKind.PARAMETER:
            target, node = spec.target or "", placeholders[spec.arg.name]
            if target in shared and not node.users:
                # Of one parameter under several names a single placeholder is read.
                exported.graph.erase_node(node)
            else:
                weights[spec.arg.name] = shared.get(target, target)
        elif spec.kind == InputKind.BUFFER:
            buffers[spec.arg.name] = spec.target or ""
    exported.graph_module.recompile()
    return StepGraph(
        step,
        exported.graph_module,
        weights,
        buffers,
        row_parallel,
        tp_size,
        dtype,
        frozenset(inputs),
    )


def _names_of_shared(module: nn.Module) -> dict[str, str]:
    """Every name of the parameters that have several, with the one that packed weights have."""
    first = {parameter: name for name, parameter in module.named_parameters()}
    every = [(name, first[p]) for name, p in module.named_parameters(remove_duplicate=False)]
    shared = {owner for name, owner in every if name != owner}
    return {name: owner for name, owner in every if owner in shared}
