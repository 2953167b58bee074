"""Opening and checking engine folders, with and without torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from fake import FakeExecutor, make_config, write_engine

from inkrt.errors import EngineFormatError, EngineMismatchError, RequestError
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import encode_config, read_config, read_plans
from inkrt.runtime.executor import Sampling, open_executor
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
