"""The ratio test behind each step that verifies drafts, for rounds that a GPU runs by itself.

Its kernels belong to no operator, so they are lowered here: for each such step a plan that reads
the step's logits, the drafter's, and the state of the round.
"""

from dataclasses import dataclass, field

from msgspec.structs import replace

from inkrt.builder.compile import Compiler
from inkrt.builder.lower_kernels import KernelLowering, PackedWeights
from inkrt.builder.memory import ALIGNMENT
from inkrt.plugins.round.launches import ratio_test
from inkrt.plugins.tactic import Tactic
from inkrt.runtime.engine_file import DRAFT_STEP
from inkrt.runtime.plan import (
    ROUND_STATE_STORAGE,
    Fill,
    Launch,
    Plan,
    Ref,
    Space,
    TensorSpec,
)

# Step inputs that the kernels read beside the tokens.
_INPUTS = ("temperature", "top_k", "top_p", "min_p", "seed", "position")


def apart_from_steps(plans: dict[str, Plan]) -> dict[str, Plan]:
    """The same plans, but no other step writes where the draft step does.

    What it leaves, the ratio test reads behind the step that verifies.
    """
    if DRAFT_STEP not in plans:
        return plans
    most = max(plan.arena_bytes for name, plan in plans.items() if name != DRAFT_STEP)
    base = -(-most // ALIGNMENT) * ALIGNMENT
    draft = plans[DRAFT_STEP]
    tensors = tuple(
        replace(spec, offset=spec.offset + base) if spec.space == "arena" else spec
        for spec in draft.tensors
    )
    moved = replace(draft, tensors=tensors, arena_bytes=draft.arena_bytes + base)
    return plans | {DRAFT_STEP: moved}


def ratio_tests(plans: dict[str, Plan], compiler: Compiler) -> dict[str, Plan]:
    """The test of every step that verifies drafts, by its name; none without a drafter.

    Args:
        plans: of the engine, as `apart_from_steps` gives them.
        compiler: collects the cubins.

    Raises:
        BuildError: sizes that the kernels do not take.
    """
    if DRAFT_STEP not in plans:
        return {}
    draft = plans[DRAFT_STEP]
    found = {
        name: _find(plan, draft)
        for name, plan in plans.items()
        if plan.num_rows == plan.num_tokens > 1 and name != DRAFT_STEP
    }
    compiler.compile_all([kernel for tactic in found.values() for kernel in tactic.kernels])
    return {name: _lower(plans[name], draft, tactic, compiler) for name, tactic in found.items()}


def _find(plan: Plan, draft: Plan) -> Tactic:
    vocab = _logits(plan).shape[1]
    assert _logits(draft).shape[1] == vocab, (plan.name, vocab)
    kernels = ratio_test(vocab, plan.num_rows, draft.num_rows)
    return Tactic("ratio", kernels, bytes=4 * vocab * (plan.num_rows + draft.num_rows), flops=0)


def _logits(plan: Plan) -> TensorSpec:
    spec = plan.tensors[plan.outputs["logits"]]
    assert spec.strides == (spec.shape[1], 1), spec
    return spec


def _lower(plan: Plan, draft: Plan, tactic: Tactic, compiler: Compiler) -> Plan:
    memory = _Memory()
    for name in _INPUTS:
        memory.inputs[name] = memory.add(plan.tensors[plan.inputs[name]])
    tokens = plan.tensors[plan.inputs["tokens"]]
    arguments = {
        "p_logits": _logits(plan),
        "q_logits": _logits(draft),
        "drafts": replace(tokens, offset=tokens.offset + 4),  # behind the anchor
        "state": TensorSpec("state", "uint8", (1,), (1,), "scratch", ROUND_STATE_STORAGE, 0),
    }
    args = {name: Ref(memory.add(spec)) for name, spec in arguments.items()}
    lowered = KernelLowering(memory, compiler, PackedWeights()).lower(tactic, dict(args), ())
    launch = Launch("ratio_test", tactic.name, dict(args), (), "", tactic.bytes, lowered)
    return Plan(
        name=f"ratio_{plan.name}",
        num_tokens=plan.num_tokens,
        num_rows=plan.num_rows,
        tensors=tuple(memory.specs),
        launches=(launch,),
        arena_bytes=0,
        inputs=memory.inputs,
        outputs={},
        scratch_bytes=memory.scratch_bytes,
        fills=tuple(memory.fills),
    )


@dataclass(slots=True)
class _Memory:
    """See `lower_kernels.Memory`; all that is asked for is scratch of this plan."""

    specs: list[TensorSpec] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    fills: list[Fill] = field(default_factory=list)
    scratch_bytes: int = 0

    def add(self, spec: TensorSpec) -> int:
        """Another tensor; gives its index."""
        self.specs.append(spec)
        return len(self.specs) - 1

    def add_temporary(self, name: str, num_bytes: int) -> int:
        """See `Memory`."""
        offset = -(-self.scratch_bytes // ALIGNMENT) * ALIGNMENT
        self.scratch_bytes = offset + num_bytes
        space: Space = "scratch"
        unique = f"{name}.{len(self.specs)}"
        return self.add(TensorSpec(unique, "uint8", (num_bytes,), (1,), space, "", offset))

    def add_scratch(self, name: str, num_bytes: int, fill: int) -> int:
        """See `Memory`."""
        index = self.add_temporary(name, num_bytes)
        self.fills.append(Fill(self.specs[index].offset, num_bytes, fill))
        return index

    def add_packed(self, name: str, storage: str, num_bytes: int) -> int:
        """See `Memory`; the test reads no weights."""
        raise AssertionError((name, storage, num_bytes))
