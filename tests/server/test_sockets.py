"""Over a real socket: clients that leave, signals, the official client."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from typing import Any

import httpx2
import pytest
from served import HEADERS, KEY, MESSAGES, SETTINGS, Scripted, say

from inkrt.errors import DeviceError, UsageError
from inkrt.runtime.async_llm import AsyncLLM
from inkrt.server.app import create_app
from inkrt.server.run import open_socket, serve

CHAT = "/v1/chat/completions"
LONG = {"messages": MESSAGES, "ignore_eos": True}


def request_of(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\ncontent-type: application/json\r\nauthorization: Bearer {KEY}\r\n"
    )
    return f"{head}host: a\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


class Serving:
    """`serve` in the main thread, as a command runs it, while `client` runs in another."""

    def __init__(self, llm: AsyncLLM, shutdown_timeout_s: float = 5.0) -> None:
        self.app = create_app(llm, SETTINGS)
        self.listener = open_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.shutdown_timeout_s = shutdown_timeout_s
        self.failure: BaseException | None = None

    def run(self, client: Any) -> None:
        def in_thread() -> None:
            try:
                with httpx2.Client(base_url=self.url, headers=HEADERS, timeout=20) as http:
                    client(http)
            except BaseException as error:
                self.failure = error
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=in_thread)
        thread.start()
        try:
            serve(self.app, self.listener, self.shutdown_timeout_s)
        finally:
            thread.join()
            self.listener.close()
        if self.failure is not None:
            raise self.failure


def wait_until(is_so: Any, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_engine(scripted: Scripted, stream: bool) -> None:
    llm, executor = scripted()
    executor.step_s = 0.005

    def client(_: httpx2.Client) -> None:
        with socket.create_connection(serving.listener.getsockname()) as connection:
            connection.sendall(request_of({**LONG, "stream": stream}))
            wait_until(lambda: llm.stats().num_running == 1)
            if stream:
                assert connection.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: llm.stats().num_running == 0)
        assert llm.llm.engine.states.num_free_slots == 3
        num_calls = len(executor.calls)
        assert num_calls < 200  # of the 900 that the whole answer takes
        time.sleep(0.03)
        assert len(executor.calls) == num_calls

    serving = Serving(llm)
    serving.run(client)


def test_a_signal_lets_what_runs_finish(scripted: Scripted) -> None:
    llm, executor = scripted()
    executor.step_s = 0.01
    answers: list[Any] = []

    def client(http: httpx2.Client) -> None:
        body = {**LONG, "max_tokens": 40, "return_token_ids": True}
        threads = [
            threading.Thread(
                target=lambda: answers.append(
                    httpx2.post(serving.url + CHAT, json=body, headers=HEADERS, timeout=20).json()
                )
            )
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: llm.stats().num_running == 3 and llm.stats().num_waiting == 2)
        assert http.get("/ready").status_code == 200
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: serving.app.state.service.is_draining)
        assert (http.get("/ready").status_code, http.get("/health").status_code) == (503, 200)
        refused = http.post(CHAT, json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"]
        for thread in threads:
            thread.join()

    serving = Serving(llm)
    with contextlib.suppress(httpx2.TransportError):  # of the last signal, if the server is gone
        serving.run(client)
    assert [len(answer["choices"][0]["token_ids"]) for answer in answers] == [40] * 5


def test_what_does_not_finish_in_time_gets_an_error(scripted: Scripted) -> None:
    llm, executor = scripted()
    executor.step_s = 0.02
    seen: list[str] = []

    def client(http: httpx2.Client) -> None:
        with http.stream("POST", CHAT, json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(os.getpid(), signal.SIGTERM)
            seen.extend(line for line in lines if line)

    began = time.monotonic()
    Serving(llm, shutdown_timeout_s=0.2).run(client)
    assert time.monotonic() - began < 3
    assert json.loads(seen[-1].removeprefix("data: "))["error"]["code"] == "cancelled"
    assert "[DONE]" not in "".join(seen)


def test_a_failed_engine_ends_the_server(scripted: Scripted) -> None:
    llm, executor = scripted()
    seen: list[int] = []

    def fail(*_: object, **__: object) -> Any:
        raise DeviceError("the device is gone")

    def client(http: httpx2.Client) -> None:
        executor._run = fail  # type: ignore[method-assign]
        seen.append(http.post(CHAT, json=LONG).status_code)

    with pytest.raises(DeviceError, match="the engine has failed"):
        Serving(llm).run(client)
    assert seen == [503]


def test_an_address_that_is_taken() -> None:
    with open_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(UsageError, match=f"--host 127.0.0.1 --port {port}: cannot listen"):
            open_socket("127.0.0.1", port)


@pytest.mark.slow
def test_the_official_client(scripted: Scripted) -> None:
    openai = pytest.importorskip("openai")
    from test_inkling_answers import ARGUMENTS, CALLED, END_SAMPLING, THOUGHT, TOOLS

    llm, executor = scripted()
    prompt = llm.llm.chat_prompt(MESSAGES, tools=TOOLS)
    ids = say(llm, executor, prompt, THOUGHT + CALLED + END_SAMPLING)
    common = {
        "model": "m", "messages": MESSAGES, "tools": TOOLS, "temperature": 0,
        "extra_body": {"stop_token_ids": [ids[-1]]},
    }  # fmt: skip

    def client(_: httpx2.Client) -> None:
        own = openai.OpenAI(base_url=f"{serving.url}/v1", api_key=KEY, max_retries=0)
        message = own.chat.completions.create(**common).choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
        streamed = own.chat.completions.create(**common, stream=True)
        pieces = [
            piece.function.arguments
            for event in streamed
            for piece in event.choices[0].delta.tool_calls or ()
        ]
        assert "".join(pieces) == ARGUMENTS
        assert [model.id for model in own.models.list()] == ["m", "other"]
        with pytest.raises(openai.NotFoundError):
            own.chat.completions.create(model="x", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as caught:
            own.chat.completions.create(model="m", messages=MESSAGES, temperature=-1)
        assert caught.value.param == "temperature"
        asked = {
            "model": "m", "input": MESSAGES, "temperature": 0, "store": False,
            "tools": [{"type": "function", "name": "get_weather"}],
            "extra_body": {"stop_token_ids": [ids[-1]]},
        }  # fmt: skip
        response = own.responses.create(**asked)
        assert [item.type for item in response.output] == ["reasoning", "function_call"]
        assert response.output[1].arguments == ARGUMENTS
        with own.responses.stream(**asked) as events:
            assert events.get_final_response().output[1].arguments == ARGUMENTS
        with pytest.raises(openai.BadRequestError) as refused:
            own.responses.create(**{**asked, "store": True})
        assert refused.value.param == "store"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{serving.url}/v1", api_key="x").models.list()

    serving = Serving(llm)
    serving.run(client)
