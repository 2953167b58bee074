"""ink-serve from the command line to a server that answers: options from a file, a template."""

from pathlib import Path
from typing import Any

import pytest
from served import MESSAGES
from starlette.testclient import TestClient

from inkrt.commands.serve import make_app
from inkrt.server import run as run_module


@pytest.mark.usefixtures("scripted")  # which gives an engine without a model
def test_a_file_and_a_template(
    engine_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def answer(app: Any, listener: Any, shutdown_timeout_s: float) -> None:
        seen["timeout"] = shutdown_timeout_s
        client = TestClient(app, headers={"authorization": "Bearer a-key"})
        seen["models"] = [item["id"] for item in client.get("/v1/models").json()["data"]]
        for name, body in (("chat", {"messages": MESSAGES}), ("text", {"prompt": "hello over "})):
            seen[name] = client.post("/tokenize", json=body).json()["tokens"]

    monkeypatch.setattr(run_module, "serve", answer)
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }} over ")
    path = tmp_path / "serve.toml"
    path.write_text(
        'port = 0\nserved-model-name = ["from-a-file"]\napi_key = ["a-key"]\n'
        'shutdown-timeout = 7\nchat-template = "own.jinja"\nspec = "none"\n'
    )
    with pytest.raises(SystemExit) as caught:
        make_app()(args=[str(engine_folder), "--config", str(path)], prog_name="ink-serve")
    assert caught.value.code in (0, None)
    assert (seen["models"], seen["timeout"]) == (["from-a-file"], 7.0)
    assert seen["chat"] == seen["text"]
