from pathlib import Path

import pytest
from fake import FakeExecutor

from inkrt.runtime import engine as engine_module
from inkrt.runtime.engine_file import EngineConfig


@pytest.fixture
def fake_executors(monkeypatch: pytest.MonkeyPatch) -> list[FakeExecutor]:
    """Makes Engine.open use a FakeExecutor; collects those that were made."""
    made: list[FakeExecutor] = []

    def open_fake(folder: Path, config: EngineConfig, rank_slice: object) -> FakeExecutor:
        assert rank_slice is None
        made.append(FakeExecutor(config))
        return made[-1]

    monkeypatch.setattr(engine_module, "open_executor", open_fake)
    return made
