"""Tracing: the module of one rank becomes the graph of one step.

The graph is the `torch.fx` graph that `torch.export` gives from meta tensors: view operations and
`ink::` operators in program order. Parameters and state buffers are placeholders; the graph is the
same for every rank, which differ only in the weights that are packed for them.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule

from inkrt.engines.interface import StateOptions, StepInputs
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
    """

    step: StepSpec
    module: GraphModule
    weights: dict[str, str]
    state: dict[str, str]
    row_parallel: frozenset[str]
    tp_size: int
    dtype: torch.dtype


def trace(
    module: nn.Module, step: StepSpec, state: StateOptions, tp_size: int, dtype: torch.dtype
) -> StepGraph:
    """Trace `module` for `step`; its forward takes `StepInputs`, for drafts FURTHER_INPUTS too."""
    sizes = {"tokens": step.num_tokens, "page_table": state.pages_per_session}
    inputs = {
        name: torch.empty(sizes.get(name, 1), dtype=kind, device="meta")
        for name, kind in STEP_INPUTS.items()
    }
    names = FURTHER_INPUTS if step.name == DRAFT_STEP else {}
    further = tuple(torch.empty(1, dtype=kind, device="meta") for kind in names.values())
    exported = torch.export.export(module, (StepInputs(**inputs), *further), strict=False)
    for node in exported.graph.find_nodes(op="placeholder"):
        if (name := node.name.removeprefix("step_")) in inputs:
            node.name = node.target = name
    exported.graph_module.recompile()
    weights, buffers = {}, {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind == InputKind.PARAMETER:
            weights[spec.arg.name] = spec.target or ""
        elif spec.kind == InputKind.BUFFER:
            buffers[spec.arg.name] = spec.target or ""
    return StepGraph(
        step,
        exported.graph_module,
        weights,
        buffers,
        module.row_parallel_weights(),  # type: ignore[operator]
        tp_size,
        dtype,
    )
