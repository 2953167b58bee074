"""ink-serve: what it refuses before it loads anything; lines of its log."""

import json
import logging
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from inkrt.commands.serve import make_app
from inkrt.server.log import JsonFormatter


def serve(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as caught:
        make_app()(args=[*arguments], prog_name="ink-serve")
    return caught.value.code, capsys.readouterr().err


def test_usage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys, none = tmp_path / "keys", tmp_path / "none"
    keys.write_text("\n \n")
    cases = [
        (["--api-key", ""], 2, "--api-key: a key must be printable ASCII and not empty"),
        (["--api-key-file", str(keys)], 2, f"--api-key-file: {keys} has no key; write one a line"),
        (["--api-key-file", str(none)], 2, "--api-key-file: cannot read it"),
        (["--host", "192.0.2.1"], 2, "--host 192.0.2.1 --port 8000: cannot listen there"),
        (["--spec", "none", "--width", "fixed"], 2, "--width: of no use with --spec none"),
        (["--chat-template", str(none)], 1, f"--chat-template is {none}, which cannot be read"),
        (["--config", str(none)], 2, f"--config: cannot read {none}"),
        (["--otlp-traces-endpoint", "here"], 2, "--otlp-traces-endpoint is 'here', it must be"),
        (["--port", "0"], 1, "config.json"),
    ]
    for arguments, code, message in cases:
        found = serve(capsys, str(tmp_path / "no-engine"), *arguments)
        assert (found[0], message in found[1]) == (code, True), found
        assert found[1].count("\n") == 1


def test_help_is_quick_and_names_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_app()(args=["--help"], prog_name="ink-serve")
    shown = capsys.readouterr().out
    assert "INK_SERVE_API_KEY" in shown
    assert "127.0.0.1" in shown


def test_json_lines() -> None:
    try:
        raise ZeroDivisionError("a\nb")
    except ZeroDivisionError:
        trace = sys.exc_info()
    record = logging.LogRecord("a.b", logging.INFO, "", 0, "request %s", ("x",), None)
    record.fields = {"request_id": "r", "status": 200}
    line = JsonFormatter().format(record)
    assert json.loads(line) | {"time": 0} == {
        "time": 0, "level": "info", "logger": "a.b", "message": "request", "request_id": "r",
        "status": 200,
    }  # fmt: skip
    failed = logging.LogRecord("a", logging.ERROR, "", 0, "oh %s", ("no",), trace)
    made = json.loads(JsonFormatter().format(failed))
    assert (made["message"], "ZeroDivisionError: a\nb" in made["trace"]) == ("oh no", True)
    assert "\n" not in JsonFormatter().format(failed)
