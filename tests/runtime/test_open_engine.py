"""Opening and checking engine folders, with and without torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake import FakeExecutor, make_config, make_plan, write_engine
from msgspec.structs import replace

from inkrt.errors import EngineFormatError, EngineMismatchError, RequestError
from inkrt.runtime.code_check import code_problems, require_code
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import (
    DraftSpec,
    EngineCode,
    StateSpec,
    encode_config,
    read_config,
    read_plans,
)
from inkrt.runtime.executor import Sampling, open_executor
from inkrt.runtime.plan import Plan, TensorSpec
from inkrt.runtime.rebuild import rebuild_with

NO_TORCH = "import sys; sys.modules['torch'] = None\n"


def python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_open(tmp_path: Path, fake_executors: list[FakeExecutor]) -> None:
    config = write_engine(tmp_path)
    with Engine.open(str(tmp_path), verify=True) as engine:
        assert engine.config == config
        assert engine.tokenizer is engine.tokenizer
        assert engine.chat_template is engine.chat_template is not None
        with engine.session() as session:
            session.prefill([1, 2, 3], Sampling())
            assert session.length == 3
    engine.close()
    assert fake_executors[0].is_closed
    with pytest.raises(RequestError) as caught:
        engine.session()
    assert str(caught.value) == "the engine is closed; open it again"


def test_an_open_session_of_a_closed_engine(
    tmp_path: Path, fake_executors: list[FakeExecutor]
) -> None:
    write_engine(tmp_path)
    engine = Engine.open(tmp_path)
    session = engine.session()
    engine.close()
    for call in (lambda: session.step([1], Sampling()), session.fork):
        with pytest.raises(RequestError, match="the engine is closed"):
            call()
    session.close()


def test_parts_that_are_missing_are_none(
    tmp_path: Path, fake_executors: list[FakeExecutor]
) -> None:
    write_engine(tmp_path, tokenizer=False, template=None)
    with Engine.open(tmp_path) as engine:
        assert engine.tokenizer is None
        assert engine.chat_template is None


def test_files_are_checked_before_the_executor_is_made(
    tmp_path: Path, fake_executors: list[FakeExecutor]
) -> None:
    write_engine(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineFormatError, match=r"tokenizer\.json has 2 bytes"):
        Engine.open(tmp_path)
    assert fake_executors == []


def test_check(tmp_path: Path) -> None:
    write_engine(tmp_path, tp_size=2)
    assert Engine.check(tmp_path) == []
    plan = tmp_path / "rank1.engine"
    good = plan.read_bytes()
    plan.write_bytes(b"\xff" * len(good))
    assert Engine.check(tmp_path, verify=True) == ["rank1.engine has a wrong sha256 (damaged)"]
    assert Engine.check(tmp_path) == ["rank1.engine has a wrong sha256 (damaged)"]
    with pytest.raises(EngineFormatError, match=r"rank1\.engine is damaged \("):
        read_plans(tmp_path, 1)
    plan.unlink()
    assert Engine.check(tmp_path) == ["rank1.engine is missing"]
    (tmp_path / "config.json").unlink()
    (problem,) = Engine.check(str(tmp_path))
    assert problem.startswith(f"{tmp_path} is not an engine: cannot read config.json")


def test_check_compares_the_steps(tmp_path: Path) -> None:
    write_engine(tmp_path / "a")
    write_engine(tmp_path / "b", steps=make_config().steps[:3])
    config, plans = tmp_path / "a" / "config.json", tmp_path / "b" / "rank0.engine"
    other = read_config(tmp_path / "b").files["rank0.engine"]
    mixed = read_config(tmp_path / "a")
    mixed.files["rank0.engine"] = other
    (tmp_path / "a" / "rank0.engine").write_bytes(plans.read_bytes())
    config.write_bytes(encode_config(mixed))
    assert Engine.check(tmp_path / "a") == [
        "rank0.engine has other steps than config.json says (damaged)"
    ]


DRAFT = DraftSpec("dspark", 5, "rnn", has_confidence=True)
CONTEXT = StateSpec("drafter.k_cache", "paged", (72, 4, 2), "float32")


def with_state(plan: Plan, name: str) -> Plan:
    spec = TensorSpec(name, "float32", CONTEXT.shape, (8, 2, 1), "state", name, 0)
    return replace(plan, tensors=(*plan.tensors, spec))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"draft": replace(DRAFT, method="mtp", head=None)}, None),  # the plans cannot tell
        ({"draft": replace(DRAFT, has_confidence=False)},
         ": step draft has output confidences, config.json says otherwise"),
        ({"draft": replace(DRAFT, block_size=4)}, " has other steps than config.json says"),
        ({"draft": None}, " has other steps than config.json says"),
        ({"model": replace(make_config().model, vocab_size=401)},
         ": step decode gives logits float32 [1, 400], float32 [1, 401] by config.json"),
        ({"state": replace(make_config().state, buffers=())},
         ": step decode has state drafter.k_cache, config.json has none"),
    ],
)  # fmt: skip
def test_the_plans_are_those_that_the_configuration_speaks_of(
    changes: dict[str, Any], problem: str | None
) -> None:
    state = replace(make_config().state, buffers=(CONTEXT,))
    sound = make_config(draft=DRAFT, state=state)
    plans = {
        step.name: with_state(make_plan(step, sound), CONTEXT.name) for step in sound.all_steps
    }
    config = make_config(**{"draft": DRAFT, "state": state, **changes})
    found = code_problems(config, 1, EngineCode(plans))
    assert found[:1] == ([] if problem is None else [f"rank1.engine{problem} (damaged)"])
    if problem is not None:
        with pytest.raises(EngineFormatError, match=r"engine E is damaged: rank1"):
            require_code(Path("E"), config, 1, EngineCode(plans))


def test_a_plan_without_confidences_or_context_is_found() -> None:
    config = make_config(draft=DRAFT, state=replace(make_config().state, buffers=(CONTEXT,)))
    plans = {
        step.name: with_state(make_plan(step, config), CONTEXT.name) for step in config.all_steps
    }
    plans["verify3"] = make_plan(config.steps[2], config)
    silent = replace(plans["draft"], outputs={"tokens": 0, "logits": 1})
    for changes, problem in (
        ({}, "verify3 lacks drafter.k_cache, which step draft reads"),
        ({"draft": silent}, "draft lacks output confidences, config.json says otherwise"),
    ):
        found = code_problems(config, 0, EngineCode({**plans, **changes}))
        assert found[0] == f"rank0.engine: step {problem} (damaged)"


def test_other_targets_are_refused(tmp_path: Path) -> None:
    write_engine(tmp_path, target="gfx942")
    assert Engine.check(tmp_path) == []
    with pytest.raises(EngineMismatchError) as caught:
        Engine.open(tmp_path)
    assert str(caught.value) == (
        f"engine {tmp_path} was built for gfx942, this version of inkrt runs cpu and sm_* engines; "
        "rebuild it with: ink-build CHECKPOINT -o ENGINE --target cpu --max-seq-len 96 "
        "--max-batch-size 3"
    )


def test_a_cpu_engine_without_torch(tmp_path: Path) -> None:
    write_engine(tmp_path)
    code = NO_TORCH + (
        "from inkrt.errors import EngineMismatchError\n"
        "from inkrt.runtime.engine import Engine\n"
        f"folder = {str(tmp_path)!r}\n"
        "assert Engine.check(folder, verify=True) == []\n"
        "try:\n"
        "    Engine.open(folder)\n"
        "except EngineMismatchError as error:\n"
        "    print(error)\n"
    )
    assert python(code) == (
        f"engine {tmp_path} was built for cpu, which needs torch: pip install 'inkrt[cpu]'\n"
    )


def test_errors_of_the_cpu_executor_itself_are_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "inkrt.runtime.executor.cpu", None)
    with pytest.raises(ModuleNotFoundError):
        open_executor(tmp_path, make_config())


def test_public_names_import_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from inkrt import LLM, Engine, SamplingParams\n"
        "heavy = ('torch', 'transformers', 'jinja2', 'triton', 'cuda', 'rich', 'typer')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    assert python(code) == "[]\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("ink-build A -o B --max-seq-len 8 --x 1", "ink-build A -o B --max-seq-len 9 --x 1"),
        ("ink-build A --max-seq-len=8", "ink-build A --max-seq-len 9"),
        ("ink-build A", "ink-build A --max-seq-len 9"),
    ],
)
def test_rebuild_with(command: str, expected: str) -> None:
    assert rebuild_with(command, "--max-seq-len", 9) == expected


def test_weights_stay_where_an_executor_cannot_replace_them(
    tmp_path: Path, fake_executors: list[FakeExecutor]
) -> None:
    write_engine(tmp_path)
    with Engine.open(tmp_path) as engine:
        with pytest.raises(EngineMismatchError, match="replaces weights on the cpu only"):
            engine.refit(tmp_path)
        assert len(fake_executors) == 1
    with pytest.raises(RequestError, match="the engine is closed"):
        engine.refit(tmp_path)
