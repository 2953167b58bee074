"""Whether the plans of an engine are those that its configuration speaks of.

The configuration is a file that people can edit and that no hash covers, and what reads drafts goes
by it. Needs neither torch nor a GPU.
"""

from pathlib import Path

from inkrt.runtime.engine_file import (
    CONFIG_NAME,
    DRAFT_STEP,
    EngineCode,
    EngineConfig,
    plan_file,
    require_sound,
)
from inkrt.runtime.plan import Plan, dangling
from inkrt.runtime.tower_spec import TowerSpec, TowerStepSpec


def code_problems(config: EngineConfig, rank: int, code: EngineCode) -> list[str]:
    """Problems of the plans of a rank, one sentence each."""
    plans = code.plans
    found = {(plan.name, plan.num_tokens, plan.num_rows) for plan in plans.values()}
    if found != {(step.name, step.num_tokens, step.num_rows) for step in config.all_steps}:
        return [f"{plan_file(rank)} has other steps than {CONFIG_NAME} says (damaged)"]
    problems = [dangling(plan, code.cubins) for plan in code.all_plans.values()]
    if code.ratio_tests.keys() - plans.keys():
        problems.append("ratio tests of steps that are not there")
    if not any(problems):
        problems += [_output_problem(config, plan) for plan in plans.values()]
        problems += [_context_problem(config, plan, plans) for plan in plans.values()]
    return [f"{plan_file(rank)}: {problem} (damaged)" for problem in problems if problem]


def require_code(folder: Path, config: EngineConfig, rank: int, code: EngineCode) -> None:
    """Raise EngineFormatError if `code_problems` finds anything."""
    require_sound(folder, config, code_problems(config, rank, code))


def _output_problem(config: EngineConfig, plan: Plan) -> str | None:
    """What is wrong with the outputs of a step."""
    rows, vocab_size = plan.num_rows, config.model.vocab_size
    wanted = {"tokens": ("int32", (rows,)), "logits": ("float32", (rows, vocab_size))}
    if found := _tower_step(config, plan):
        wanted = {"features": (config.model.dtype, (rows, config.model.hidden_size))}
        if problem := _tower_input_problem(*found, plan):
            return problem
    elif config.towers and 1 == rows < plan.num_tokens and "is_feature" not in plan.inputs:
        return f"step {plan.name} takes no features, {CONFIG_NAME} has towers"
    if plan.name == DRAFT_STEP and config.draft is not None and config.draft.has_confidence:
        wanted["confidences"] = ("float32", (rows,))
    outputs = {name: plan.tensors[index] for name, index in plan.outputs.items()}
    if missing := sorted(wanted.keys() ^ outputs.keys()):
        has = "has" if missing[0] in outputs else "lacks"
        return f"step {plan.name} {has} output {missing[0]}, {CONFIG_NAME} says otherwise"
    for name, (dtype, shape) in wanted.items():
        tensor = outputs[name]
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            return (
                f"step {plan.name} gives {name} {tensor.dtype} {list(tensor.shape)}, "
                f"{dtype} {list(shape)} by {CONFIG_NAME}"
            )
    return None


def _tower_step(config: EngineConfig, plan: Plan) -> tuple[TowerSpec, TowerStepSpec] | None:
    """What the configuration says of a step of a tower; None of any other step."""
    steps = ((tower, step) for tower in config.towers for step in tower.steps)
    return next((found for found in steps if found[0].name_of(found[1]) == plan.name), None)


def _tower_input_problem(tower: TowerSpec, step: TowerStepSpec, plan: Plan) -> str | None:
    """What is wrong with the inputs of a step of a tower: all three must speak of the same."""
    found = {name: plan.tensors[index] for name, index in plan.inputs.items()}
    if {name: (x.dtype, x.shape) for name, x in found.items()} != {
        name: (x.dtype, x.shape) for name, x in step.inputs.items()
    }:
        return f"step {plan.name} takes other inputs than {CONFIG_NAME} says"
    if tower.processor.shapes(step.num_rows) != {name: x.shape for name, x in step.inputs.items()}:
        return f"step {plan.name} takes other inputs than the processor in {CONFIG_NAME} makes"
    return None


def _context_problem(config: EngineConfig, plan: Plan, plans: dict[str, Plan]) -> str | None:
    """What is wrong with the state of a step: every step writes what the draft step reads."""
    if unknown := _state_of(plan) - {buffer.name for buffer in config.state.buffers}:
        return f"step {plan.name} has state {min(unknown)}, {CONFIG_NAME} has none"
    if _tower_step(config, plan):
        return None
    if DRAFT_STEP in plans and (unwritten := _state_of(plans[DRAFT_STEP]) - _state_of(plan)):
        return f"step {plan.name} lacks {min(unwritten)}, which step {DRAFT_STEP} reads"
    return None


def _state_of(plan: Plan) -> set[str]:
    return {tensor.storage for tensor in plan.tensors if tensor.space == "state"}
