"""What the server refuses, in one form; what it says of itself; keys and limits."""

import itertools
from typing import Any

import pytest
from served import HEADERS, KEY, MESSAGES, SETTINGS, Scripted, client_of, post
from starlette.testclient import TestClient

from inkrt.server.app import create_app
from inkrt.server.settings import ServerSettings

TOO_LONG = "context_length_exceeded"
CHAT = "/v1/chat/completions"


def error_of(answer: Any) -> dict[str, Any]:
    body = answer.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    if "cannot be used" not in error["message"]:  # of grammars, which may have any text
        shown = error["message"].replace("/v1/models", "").replace("data:image/...", "")
        assert "/" not in shown
    assert answer.headers["x-request-id"]
    return error


TOOLS = [{"type": "function", "function": {"name": "f"}}]
SCHEMA_OF_NOTHING = {"type": "json_schema", "json_schema": {"name": "a"}}
REFUSED: list[tuple[dict[str, Any], int, str | None, str | None]] = [
    ({"model": "m2"}, 404, "model", "model_not_found"),
    ({"messages": []}, 400, "messages", None),
    ({"messages": [{"role": "x", "content": "a"}]}, 400, "messages", None),
    ({"messages": [{"role": "user"}]}, 400, "messages", None),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "messages", None),
    ({"messages": [{"role": "user", "content": "a", "z": 1}]}, 400, "messages[0]", None),
    ({"messages": [{"role": "user", "content": "hello " * 1100}]}, 400, "prompt", TOO_LONG),
    ({"messages": 3}, 400, "messages", None),
    ({"temperature": "1"}, 400, "temperature", None),
    ({"temperature": -1}, 400, "temperature", None),
    ({"top_p": 0}, 400, "top_p", None),
    ({"seed": 2**63}, 400, "seed", None),
    ({"n": 0}, 400, "n", None),
    ({"n": 33}, 400, "n", None),
    ({"max_tokens": 0}, 400, "max_tokens", None),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens", None),
    ({"stop": ["", "a"]}, 400, "stop", None),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", None),
    ({"top_logprobs": 2}, 400, "top_logprobs", None),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias", None),
    ({"logit_bias": {"5000": 1}}, 400, "logit_bias", None),
    ({"tools": [{"type": "function"}]}, 400, "tools", None),
    ({"tool_choice": "required"}, 400, "tool_choice", None),
    ({"tools": TOOLS, "tool_choice": {"function": {"name": "g"}}}, 400, "tool_choice", None),
    ({"tool_choice": "auto"}, 400, "tool_choice", None),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type", None),
    ({"response_format": SCHEMA_OF_NOTHING}, 400, "response_format.json_schema.schema", None),
    ({"structured_outputs": {}}, 400, "structured_outputs", None),
    ({"structured_outputs": {"regex": "("}}, 400, "structured_outputs", None),
    ({"structured_outputs": {"json": {"type": "no type"}}}, 400, "structured_outputs", None),
    ({"structured_outputs": {"grammar": "start: x"}}, 400, "structured_outputs", None),
    ({"structured_outputs": {"choice": []}}, 400, "structured_outputs", None),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, 400, "ignore_eos", None),
    ({"reasoning_effort": "hard"}, 400, "reasoning_effort", None),
    ({"chat_template_kwargs": {"messages": []}}, 400, "messages", None),
    ({"priority": 1}, 400, "priority", "unsupported_parameter"),
    ({"store": True}, 400, "store", "unsupported_parameter"),
    ({"audio": {}}, 400, "audio", "unsupported_parameter"),
    ({"service_tier": "flex"}, 400, "service_tier", "unsupported_parameter"),
]  # fmt: skip


@pytest.mark.anyio
async def test_what_is_refused(scripted: Scripted) -> None:
    llm, executor = scripted()
    async with client_of(llm) as client:
        for change, status, param, code in REFUSED:
            answer = await client.post(CHAT, json={"messages": MESSAGES, **change})
            error = error_of(answer)
            assert (answer.status_code, error["param"], error["code"]) == (status, param, code), (
                change
            )
            assert error["type"] == "invalid_request_error"
    assert executor.calls == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.org/a.png", "this server opens no other addresses"),
        ("file:///etc/passwd", "this server opens no other addresses"),
        ("data:image/png;base64,%%", "must be base64"),
        ("data:image/png;base64,aGVsbG8=", "image"),
    ],
)
@pytest.mark.anyio
async def test_images_come_within_the_request(scripted: Scripted, url: str, message: str) -> None:
    llm, _ = scripted()
    part = {"type": "image_url", "image_url": {"url": url}}
    answer = await post(llm, CHAT, {"messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 400
    assert message in error_of(answer)["message"]


@pytest.mark.anyio
async def test_damaged_bodies(scripted: Scripted) -> None:
    llm, _ = scripted()
    bodies = [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b'"a"', b'{"messages":' + b"[" * 100_000,
        b'{"messages":[],"seed":' + b"9" * 5000 + b"}",
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"\\ud800","content":""}]}',
        b'{"messages":[{"\\ud800":"user","content":""}]}',
        b'{"messages":[{"role":"user","content":"a"}],"logit_bias":{"\\ud800":1}}',
        b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}',
        b'{"messages":[{"role":"user","content":"a"}],"temperature":1e999}',
        b'{"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":'
        b'{"name":"f","parameters":{"\\ud800":1}}}]}',
        b'{"model":"\\ud800","messages":[]}',
    ]  # fmt: skip
    async with client_of(llm) as client:
        for body in bodies:
            headers = {"content-type": "application/json"}
            answer = await client.post(CHAT, content=body, headers=headers)
            assert answer.status_code in (400, 404), body[:99]
            error_of(answer)


@pytest.mark.anyio
async def test_unknown_fields_are_ignored_and_listed(scripted: Scripted) -> None:
    llm, _ = scripted()
    body = {
        "messages": MESSAGES, "max_tokens": 1, "user": "u", "metadata": {"a": "b"},
        "service_tier": "auto", "store": None, "new\nfield": 1, "☃": 2,
    }  # fmt: skip
    for stream in (False, True):
        answer = await post(llm, CHAT, {**body, "stream": stream})
        assert answer.status_code == 200
        assert answer.headers["x-ink-ignored-fields"] == r"new\nfield, \\u2603"


@pytest.mark.anyio
async def test_keys(scripted: Scripted) -> None:
    llm, _ = scripted()
    async with client_of(llm) as client:
        del client.headers["authorization"]
        paths = ("/v1/models", "/server_info", "/openapi.json", "/nothing")
        wrong = (
            "",
            KEY,
            f"Bearer {KEY}x",
            "Bearer",
            f"Basic {KEY}",
            "Bearer \xff",
            f"Bearer a{KEY}",
        )
        for path, header in itertools.product(paths, wrong):
            answer = await client.get(path, headers={"authorization": header.encode("latin-1")})
            assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
        for header in (f"Bearer {KEY}", f"bearer  {KEY}", "Bearer first"):
            answer = await client.get("/v1/models", headers={"authorization": header})
            assert answer.status_code == 200
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert (await client.get(path)).status_code == 200
            assert (await client.head(path)).status_code == 200


@pytest.mark.anyio
async def test_what_the_server_says_of_itself(scripted: Scripted) -> None:
    llm, _ = scripted()
    async with client_of(llm) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [item["id"] for item in listed] == ["m", "other"]
        assert (await client.get("/v1/models/other")).json() == listed[1]
        assert (await client.get("/v1/models/a/b")).status_code == 404
        info = await client.get("/server_info")
        assert info.json()["answer_format"] == "inkling"
        assert info.json()["engine"]["max_model_len"] == 1024
        for secret in (KEY, str(llm.llm.engine.folder), llm.llm.engine.folder.name):
            assert secret not in info.text
        unknown = await client.get("/v2")
        assert (unknown.status_code, error_of(unknown)["code"]) == (404, "route_not_found")
        wrong = await client.get(CHAT)
        assert (wrong.status_code, error_of(wrong)["type"]) == (405, "invalid_request_error")
    async with client_of(llm, ServerSettings()) as client:
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "a-model"


@pytest.mark.anyio
async def test_texts_and_token_ids(scripted: Scripted) -> None:
    llm, _ = scripted()
    text = "hello <|end_message|> ☃"
    ids = (await post(llm, "/tokenize", {"prompt": text})).json()
    assert ids["tokens"] == llm.llm.prompt_tokens(text)
    assert (ids["count"], ids["max_model_len"]) == (len(ids["tokens"]), 1024)
    back = (await post(llm, "/detokenize", {"tokens": ids["tokens"]})).json()
    assert back == {"prompt": text}
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}),
        ("/detokenize", {"tokens": [9999]}),
        ("/detokenize", {"tokens": [-1]}),
    ):
        assert (await post(llm, path, body)).status_code == 400


@pytest.mark.anyio
async def test_long_bodies(scripted: Scripted) -> None:
    llm, _ = scripted()
    settings = ServerSettings(max_body_bytes=1000)

    async def pieces() -> Any:
        for _ in range(11):
            yield b" " * 100

    async with client_of(llm, settings) as client:
        for body in (b" " * 1001, pieces()):
            answer = await client.post(CHAT, content=body)
            assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")


@pytest.mark.anyio
async def test_a_full_queue_and_a_limit_of_time(scripted: Scripted) -> None:
    llm, executor = scripted(max_waiting=2)
    answer = await post(llm, CHAT, {"messages": MESSAGES, "n": 3, "max_tokens": 2})
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["code"]) == (
        429,
        "rate_limit_error",
        "queue_full",
    )
    assert int(answer.headers["retry-after"]) >= 1
    executor.step_s = 0.02
    settings = ServerSettings(request_timeout_s=0.1)
    body = {"messages": MESSAGES, "ignore_eos": True}
    late = await post(llm, CHAT, body, settings)
    assert (late.status_code, error_of(late)["code"]) == (504, "timeout")
    streamed = await post(llm, CHAT, {**body, "stream": True}, settings)
    assert '"code": "timeout"' in streamed.text
    assert "[DONE]" not in streamed.text


@pytest.mark.anyio
async def test_a_stream_says_that_it_is_alive(scripted: Scripted) -> None:
    llm, executor = scripted()
    executor.step_s = 0.05
    body = {"messages": MESSAGES, "max_tokens": 2, "stream": True}
    answer = await post(llm, CHAT, body, ServerSettings(ping_s=0.02))
    blocks = answer.text.split("\n\n")
    assert blocks.count(": ping") >= 2
    assert all(block.startswith(("data: ", ": ping")) for block in blocks[:-1])
    assert blocks[-2:] == ["data: [DONE]", ""]


@pytest.mark.anyio
async def test_the_api_describes_itself(scripted: Scripted) -> None:
    llm, _ = scripted()
    async with client_of(llm) as client:
        described = (await client.get("/openapi.json")).json()
    operation = described["paths"][CHAT]["post"]
    assert {"200", "400", "401", "429", "503"} <= operation["responses"].keys()
    fields = described["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "tools", "structured_outputs", "seed"} <= fields.keys()


def test_an_error_of_ours_tells_nothing(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = scripted()

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a secret /of/ours")

    monkeypatch.setattr(llm.llm, "prepare", fail)
    app = create_app(llm, SETTINGS)
    client = TestClient(app, headers=HEADERS, raise_server_exceptions=False)
    answer = client.post(CHAT, json={"messages": MESSAGES})
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["code"]) == (
        500,
        "server_error",
        "internal_error",
    )
    assert "secret" not in answer.text


METRICS = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_pages_total",
    "engine_info", "prompt_tokens", "generation_tokens", "request_success", "request_error",
    "prefix_cache_queries", "prefix_cache_hits", "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
}  # fmt: skip


@pytest.mark.anyio
async def test_metrics_are_those_that_are_promised(scripted: Scripted) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    llm, _ = scripted()
    async with client_of(llm) as client:
        body = {"messages": MESSAGES, "max_tokens": 7, "ignore_eos": True, "n": 2}
        usage = (await client.post(CHAT, json=body)).json()["usage"]
        await client.post(CHAT, json={})
        text = (await client.get("/metrics")).text
    families = {f.name: f for f in text_string_to_metric_families(text)}
    created = {name for name in families if name.endswith("_created")}
    assert {name.removeprefix("ink_") for name in families.keys() - created} == METRICS
    values = {
        (s.name, *sorted(v for k, v in s.labels.items() if k != "model_name")): s.value
        for family in families.values()
        for s in family.samples
    }
    assert values["ink_prompt_tokens_total",] == 2 * usage["prompt_tokens"]
    assert values["ink_generation_tokens_total",] == usage["completion_tokens"] == 14
    assert values["ink_request_success_total", "length"] == 2
    assert values["ink_request_error_total", "400"] == 1
    assert values["ink_inter_token_latency_seconds_count",] == 12
    parts = ("queue", "prefill", "decode")
    total = sum(values[f"ink_request_{part}_time_seconds_sum",] for part in parts)
    assert values["ink_e2e_request_latency_seconds_sum",] == pytest.approx(total, abs=1e-9)
