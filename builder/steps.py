"""The steps that an engine has plans for, and the state that they share."""

from collections.abc import Iterator

import torch
from torch import nn

from inkrt.builder.choose_drafter import AnyDrafter
from inkrt.builder.options import BuildOptions
from inkrt.engines.interface import (
    ROLLBACK_TOKENS,
    Definition,
    ModelConfig,
    Sharding,
    StateOptions,
)
from inkrt.runtime.engine_file import StateLayout, StateSpec, StepSpec


def engine_steps(options: BuildOptions) -> list[StepSpec]:
    """Those of the model.

    `decode` and `verify2`.. give logits for every row, `prefill<N>` those of the last.

    Args:
        options: with 0 replaced by what it stands for.
    """
    widths = range(2, options.max_verify_tokens + 1)
    verify = [StepSpec(f"verify{width}", width, width) for width in widths]
    chunk = options.prefill_chunk
    return [StepSpec("decode", 1, 1), *verify, StepSpec(f"prefill{chunk}", chunk, 1)]


def step_modules(
    definition: Definition,
    model: ModelConfig,
    options: BuildOptions,
    dtype: torch.dtype,
    state: StateOptions,
    drafter: AnyDrafter | None,
) -> Iterator[tuple[StepSpec, nn.Module]]:
    """Every step and the module to trace for it: those of the model, then that of the drafter."""
    base = (model, Sharding(options.tp_size, options.moe_split), dtype, state)
    drafting = drafter.drafting(definition) if drafter else None
    for step in engine_steps(options):
        last_row_only = step.num_rows < step.num_tokens
        if drafting and drafter:
            yield step, drafting.build_module(*base, last_row_only, drafter.config)
        else:
            yield step, definition.build_module(*base, last_row_only)
    if drafting and drafter:
        yield drafter.spec.step, drafting.build_draft_step(*base, drafter.config)


def state_layout(module: nn.Module, state: StateOptions) -> StateLayout:
    """The state buffers of a module of a step, as the engine's configuration has them."""
    buffers = dict(module.named_buffers())
    return StateLayout(
        num_slots=state.num_slots,
        page_tokens=state.page_tokens,
        num_pages=state.num_pages,
        rollback_tokens=ROLLBACK_TOKENS,
        buffers=tuple(
            StateSpec(
                buffer.name,
                buffer.kind,
                tuple(buffers[buffer.name].shape),
                str(buffers[buffer.name].dtype).removeprefix("torch."),
            )
            for buffer in module.state_buffers()  # type: ignore[operator]
        ),
    )
