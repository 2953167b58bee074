"""A server over an engine without a model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Scripted, ScriptedExecutor  # first: it knows where the next two are

from answers import write_tokenizer  # isort: skip
from fake import ROLLBACK, FakeExecutor, write_engine  # isort: skip

from inkrt.engines import nano
from inkrt.runtime import engine as engine_module
from inkrt.runtime.answer.inkling import MARKERS, OTHERS
from inkrt.runtime.async_llm import AsyncLLM
from inkrt.runtime.engine_file import EngineConfig, StateLayout

NUM_PAGES = 256
NANO = Path(nano.__file__).parent / "checkpoint"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three slots, 1024 positions, the markers and the template of the Inkling family."""
    folder = tmp_path_factory.mktemp("served") / "a-model"
    template = (NANO / "chat_template.jinja").read_text(encoding="utf-8")
    folder.mkdir()
    write_tokenizer(folder / "tokenizer.json", (*MARKERS, *OTHERS))
    kept = (folder / "tokenizer.json").read_bytes()
    state = StateLayout(3, 4, 3 * NUM_PAGES, ROLLBACK, ())
    fields = {"max_seq_len": 4 * NUM_PAGES, "state": state}
    write_engine(folder, tokenizer=False, template=template, **fields)
    assert (folder / "tokenizer.json").read_bytes() == kept
    return folder


@pytest.fixture
def scripted(engine_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    """Opens the engine; further arguments are those of AsyncLLM."""
    made: list[ScriptedExecutor] = []
    opened: list[AsyncLLM] = []

    def open_fake(folder: Path, config: EngineConfig, rank_slice: object) -> FakeExecutor:
        made.append(ScriptedExecutor(config))
        return made[-1]

    def open_llm(**options: Any) -> tuple[AsyncLLM, ScriptedExecutor]:
        opened.append(AsyncLLM(engine_folder, **options))
        return opened[-1], made[-1]

    monkeypatch.setattr(engine_module, "open_executor", open_fake)
    yield open_llm
    for llm in opened:
        llm.close_now()
