"""--config and --show-config: which value holds, what a file may hold, what is not shown."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer

from inkrt.commands import console

DEFAULTS = {"port": 8000, "rate": None, "cache": True, "name": None, "key": None, "level": "low"}
Values = dict[str, object]


@pytest.fixture
def got(monkeypatch: pytest.MonkeyPatch) -> list[Values]:
    for name in ("PORT", "NAME", "CONFIG"):
        monkeypatch.delenv(f"INK_TEST_{name}", raising=False)
    return []


def run(got: list[Values], capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """Run a command that has options of all types; returns what it printed."""

    def command(
        engine: Annotated[Path, typer.Argument()],
        *,
        port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
        rate: Annotated[float | None, typer.Option()] = None,
        cache: Annotated[bool, typer.Option()] = True,
        name: Annotated[list[str] | None, typer.Option()] = None,
        key: Annotated[str | None, typer.Option()] = None,
        level: Annotated[Literal["low", "high"], typer.Option()] = "low",
    ) -> None:
        got.append(
            {
                "engine": engine, "port": port, "rate": rate, "cache": cache,
                "name": name or None, "key": key, "level": level,
            }
        )  # fmt: skip

    app = console.make_app("ink-test", "Test.", variables=True)
    console.add_command(app, command, secrets=("key",))
    with pytest.raises(SystemExit) as caught:
        app(args=[*arguments], prog_name="ink-test")
    printed = capsys.readouterr()
    assert (caught.value.code in (0, None)) == (printed.err == ""), printed.err
    return printed.out, printed.err


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "a.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_which_value_holds(
    got: list[Values],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write(
        tmp_path,
        'engine = "sub/e"\nport = 1\nrate = 2\ncache = false\nname = ["a", "b c"]\nlevel = "high"',
    )
    run(got, capsys, "--config", path)
    of_file: Values = {
        "engine": tmp_path / "sub" / "e", "port": 1, "rate": 2.0, "cache": False,
        "name": ["a", "b c"], "key": None, "level": "high",
    }  # fmt: skip
    assert got.pop() == of_file
    monkeypatch.setenv("INK_TEST_PORT", "2")
    monkeypatch.setenv("INK_TEST_NAME", "c d")
    monkeypatch.setenv("INK_TEST_CONFIG", path)
    run(got, capsys, "--rate", "3")
    assert got.pop() == {**of_file, "port": 2, "name": ["c", "d"], "rate": 3.0}
    run(got, capsys, "x", "--port", "3", "--cache", "--name", "e", "--level", "low")
    assert got.pop() == {
        **of_file, "engine": Path("x"), "port": 3, "cache": True, "name": ["e"], "level": "low",
    }  # fmt: skip
    monkeypatch.delenv("INK_TEST_PORT")
    run(got, capsys, "x", "--config", write(tmp_path, ""), "--name", "e")
    assert got.pop() == {**DEFAULTS, "engine": Path("x"), "name": ["e"]}


def test_what_is_refused(
    got: list[Values], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "a.toml"
    cases = [
        ("prot = 1", f"{path} has the key 'prot', which is no option; the nearest is 'port'"),
        ("[serve]\nport = 1", f"{path} has the key 'serve', which is no option; the nearest is "),
        ("config = 'b'", "has the key 'config', which is no option"),
        ("show-config = true", "has the key 'show-config', which is no option"),
        ("port = '1'", f"{path}: port: Expected `int`, got `str`"),
        ("port = true", f"{path}: port: Expected `int`, got `bool`"),
        ("port = 1.5", f"{path}: port: Expected `int`, got `float`"),
        ("cache = 0", f"{path}: cache: Expected `bool`, got `int`"),
        ("name = 'a'", f"{path}: name: Expected `array`, got `str`"),
        ("name = [1]", f"{path}: name: Expected `str`, got `int`"),
        ("level = 'mid'", f"{path}: level: Invalid enum value 'mid'"),
        ("engine = 1", f"{path}: engine: Expected `str`, got `int`"),
        ("port", f"{path} is not valid TOML: "),
        ("port = 1\nport = 2", f"{path} is not valid TOML: "),
    ]
    for text, message in cases:
        write(tmp_path, text)
        _, error = run(got, capsys, "x", "--config", str(path))
        assert error.startswith("error: --config: "), text
        assert message in error
        assert error.count("\n") == 1
    _, error = run(got, capsys, "x", "--config", write(tmp_path, "port = 70000"))
    assert "Invalid value for '--port'" in error
    assert got == []


def test_two_spellings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, got: list[Values]
) -> None:
    def command(*, a_b: Annotated[int, typer.Option()] = 1) -> None:
        got.append({"a_b": a_b})

    app = console.make_app("ink-test", "Test.")
    console.add_command(app, command, secrets=())
    for text in ("a-b = 2", "a_b = 2"):
        with pytest.raises(SystemExit):
            app(args=["--config", write(tmp_path, text)])
        assert got.pop() == {"a_b": 2}
    with pytest.raises(SystemExit):
        app(args=["--config", write(tmp_path, "a-b = 2\na_b = 2")])
    assert "has 'a_b' in both spellings; leave one out" in capsys.readouterr().err


def test_what_is_shown_is_a_file_that_means_the_same(
    got: list[Values], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ['/e "q" \\ ü', "--port", "5", "--name", "#", "--name", "b", "--no-cache"]
    shown, _ = run(got, capsys, *given, "--key", "a-secret", "--show-config")
    assert got == []
    assert "a-secret" not in shown
    lines = dict(line.rsplit("  # ", 1) for line in shown.splitlines())
    assert lines["port = 5"] == "command line"
    assert lines['level = "low"'] == "default"
    assert lines["# key is set and not shown"] == "command line"
    assert lines["# rate is not set"] == "default"
    run(got, capsys, *given)
    again, _ = run(got, capsys, "--config", write(tmp_path, shown), "--show-config")
    sources = [line.rsplit("  # ", 1)[1] for line in again.splitlines() if line[0] != "#"]
    assert sources == ["--config"] * 5
    run(got, capsys, "--config", write(tmp_path, shown))
    assert got[0] == got[1]
