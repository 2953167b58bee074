"""An engine without a model, whose tokens a test can choose, and clients of its server."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parents[1] / "runtime"))

from answers import encode
from fake import FakeExecutor

from inkrt.runtime.async_llm import AsyncLLM
from inkrt.runtime.engine_file import EngineConfig
from inkrt.runtime.executor import StepInput, StepOutput
from inkrt.server.app import create_app
from inkrt.server.settings import ServerSettings

KEY = "a-key-to-test-with"
MESSAGES = [{"role": "user", "content": "hello"}]
SETTINGS = ServerSettings(served_names=("m", "other"), api_keys=("first", KEY))
HEADERS = {"authorization": f"Bearer {KEY}"}


class ScriptedExecutor(FakeExecutor):
    """Says what it is told to, at positions behind a prompt; elsewhere a hash of the timeline.

    Attributes:
        script: tokens by position.
        step_s: that a step takes.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.script: dict[int, int] = {}
        self.step_s = 0.0

    def _run(self, step: str, step_input: StepInput) -> StepOutput:
        time.sleep(self.step_s)
        return super()._run(step, step_input)

    def _read(self, step_input: StepInput, position: int) -> NDArray[np.float32]:
        row = super()._read(step_input, position)
        if (token := self.script.get(position + 1)) is not None:
            row[token] = 100.0
        return row


Scripted = Callable[..., tuple[AsyncLLM, ScriptedExecutor]]


def client_of(llm: AsyncLLM, settings: ServerSettings = SETTINGS) -> httpx2.AsyncClient:
    """A client in this process, with the right key."""
    transport = httpx2.ASGITransport(app=create_app(llm, settings))
    return httpx2.AsyncClient(transport=transport, base_url="http://server", headers=HEADERS)


async def post(llm: AsyncLLM, path: str, body: Any, settings: ServerSettings = SETTINGS) -> Any:
    """The answer to one request."""
    async with client_of(llm, settings) as client:
        return await client.post(path, json=body)


def say(llm: AsyncLLM, executor: ScriptedExecutor, prompt: Any, answer: str) -> list[int]:
    """Let the answer to a prompt be this text with markers; returns its token ids."""
    tokenizer = llm.llm.engine.tokenizer
    assert tokenizer is not None
    ids = encode(tokenizer, answer)
    start = len(llm.llm.prompt_tokens(prompt))
    executor.script = {start + place: token for place, token in enumerate(ids)}
    return ids
