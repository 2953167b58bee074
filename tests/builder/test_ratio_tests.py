"""What judges drafts behind a step: where its kernels read, and what nothing may overwrite."""

from dataclasses import replace as changed
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_build import fake_compiler
from msgspec.structs import replace
from small_model import OPTIONS

from inkrt.builder.build import _engine_code
from inkrt.builder.compile import Compiler
from inkrt.builder.lower import Target
from inkrt.builder.ratio_tests import apart_from_steps, ratio_tests
from inkrt.runtime.code_check import code_problems
from inkrt.runtime.engine_file import (
    DRAFT_STEP,
    DraftSpec,
    EngineCode,
    StepSpec,
    encode_code,
    read_code,
)
from inkrt.runtime.plan import ROUND_STATE_STORAGE, Plan, Space, TensorParam, TensorSpec, dangling

VOCAB = 5003
INPUTS = {
    "tokens": "int32", "position": "int32", "num_tokens": "int32", "temperature": "float32",
    "top_k": "int32", "top_p": "float32", "min_p": "float32", "seed": "int64",
}  # fmt: skip


def make_plan(name: str, tokens: int, rows: int, arena_bytes: int, logits_at: int) -> Plan:
    def tensor(name: str, dtype: str, shape: tuple[int, ...], space: Space, at: int) -> TensorSpec:
        strides = (VOCAB, 1)[-len(shape) :]
        return TensorSpec(name, dtype, shape, strides, space, name if space == "input" else "", at)

    specs = [tensor(name, dtype, (tokens,), "input", 0) for name, dtype in INPUTS.items()]
    specs += [
        tensor("tokens_out", "int32", (rows,), "arena", 16),
        tensor("logits_out", "float32", (rows, VOCAB), "arena", logits_at),
        tensor("kept", "uint8", (64,), "scratch", 0),
    ]
    inputs = {name: index for index, name in enumerate(INPUTS)}
    outputs = {"tokens": len(INPUTS), "logits": len(INPUTS) + 1}
    return Plan(name, tokens, rows, tuple(specs), (), arena_bytes, inputs, outputs, 64)


PLANS = {
    plan.name: plan
    for plan in (
        make_plan("decode", 1, 1, 70_000, 256),
        make_plan("verify2", 2, 2, 100_001, 512),
        make_plan("verify8", 8, 8, 200_003, 1024),
        make_plan("prefill64", 64, 1, 90_000, 768),
        make_plan(DRAFT_STEP, 1, 7, 150_000, 2048),
    )
}


def test_nothing_is_written_where_the_drafts_logits_stand() -> None:
    apart = apart_from_steps(PLANS)
    draft = apart.pop(DRAFT_STEP)
    assert apart == {name: plan for name, plan in PLANS.items() if name != DRAFT_STEP}
    before = PLANS[DRAFT_STEP]
    for ours, theirs in zip(draft.tensors, before.tensors, strict=True):
        moved = 200_192 if theirs.space == "arena" else 0  # the widest arena, aligned
        assert ours == replace(theirs, offset=theirs.offset + moved)
    assert draft.arena_bytes == 200_192 + 150_000
    without = {"decode": PLANS["decode"]}
    assert apart_from_steps(without) == without


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> EngineCode:
    fake_compiler(monkeypatch)
    options = changed(OPTIONS, target="sm_90a")
    target = Target(options.target, compiler=Compiler(options.target))
    return _engine_code(PLANS, target, [], options)


def test_kernels_read_the_step_and_the_drafter(code: EngineCode) -> None:
    assert list(code.ratio_tests) == ["verify2", "verify8"]
    assert {"advance", "round"} < set(code.cubins)
    for name, plan in code.ratio_tests.items():
        assert dangling(plan, code.cubins) is None
        assert plan.name == f"ratio_{name}"
        (launch,) = plan.launches
        first, second = (
            [
                plan.tensors[param.tensor]
                for param in kernel.params
                if isinstance(param, TensorParam)
            ]
            for kernel in launch.kernels
        )
        assert [kernel.entry for kernel in launch.kernels] == ["ratio_rows", "ratio_test"]
        for kernel, specs in zip(launch.kernels, (first, second), strict=True):
            assert len(specs) == len(kernel.params)
            of_target, of_draft = specs[:2]
            assert of_target == code.plans[name].tensors[code.plans[name].outputs["logits"]]
            draft = code.plans[DRAFT_STEP]
            assert of_draft == draft.tensors[draft.outputs["logits"]]
            assert of_draft.offset == 200_192 + 2048
            state = [spec for spec in specs if spec.storage == ROUND_STATE_STORAGE]
            assert len(state) == 1
            inputs = [spec.storage for spec in specs if spec.space == "input"]
            assert inputs[-1] == ("min_p" if kernel.entry == "ratio_rows" else "position")
        drafts = second[2]
        assert (drafts.space, drafts.storage, drafts.offset) == ("input", "tokens", 4)
        # Scratch of one plan does not overlap, but for what both kernels share.
        scratch = {
            spec.name: spec
            for spec in (*first, *second)
            if spec.space == "scratch" and spec.storage != ROUND_STATE_STORAGE
        }
        ends = sorted((spec.offset, spec.offset + spec.shape[0]) for spec in scratch.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert ends[-1][1] == plan.scratch_bytes
        zeroed = {(fill.offset, fill.size) for fill in plan.fills if fill.value == 0}
        for spec in scratch.values():
            kind = spec.name.split(".")[0]
            assert ((spec.offset, spec.shape[0]) in zeroed) == (kind not in ("rows", "lists"))


def test_they_are_in_the_engine_file(code: EngineCode, tmp_path: Any) -> None:
    (tmp_path / "rank0.engine").write_bytes(encode_code(code))
    found = read_code(tmp_path, 0)
    assert found == code
    assert set(code.all_plans) == {*PLANS, "ratio_verify2", "ratio_verify8"}


def test_damaged_tests_are_told(code: EngineCode) -> None:
    steps = tuple(
        StepSpec(plan.name, plan.num_tokens, plan.num_rows)
        for plan in PLANS.values()
        if plan.name != DRAFT_STEP
    )
    model = SimpleNamespace(vocab_size=VOCAB)
    draft = DraftSpec("dspark", 7, "rnn", False)
    config: Any = SimpleNamespace(
        all_steps=(*steps, draft.step),
        model=model,
        draft=draft,
        state=SimpleNamespace(buffers=()),
        towers=(),
    )
    assert code_problems(config, 0, code) == []
    lost = replace(code, cubins={})
    assert any("ratio_test: no code" in problem for problem in code_problems(config, 0, lost))
    other = replace(code, ratio_tests={"verify3": code.ratio_tests["verify2"]})
    assert any("steps that are not there" in one for one in code_problems(config, 0, other))


def test_the_cpu_and_engines_without_a_drafter_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_compiler(monkeypatch)
    without = {name: plan for name, plan in PLANS.items() if name != DRAFT_STEP}
    assert ratio_tests(without, Compiler("sm_90a")) == {}
    on_cpu = _engine_code(PLANS, Target("cpu"), [], OPTIONS)
    assert on_cpu == EngineCode(PLANS)
    options = changed(OPTIONS, target="sm_90a")
    code = _engine_code(without, Target("sm_90a", compiler=Compiler("sm_90a")), [], options)
    assert set(code.cubins) == {"advance"}
