"""What /v1/responses refuses, by the names that its clients know; what it ignores, and says so."""

from typing import Any

import pytest
from served import MESSAGES, Scripted, client_of, post
from test_requests import error_of

PATH = "/v1/responses"
UNSUPPORTED = "unsupported_parameter"
TOOL = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
IMAGE = {"type": "input_image", "image_url": "https://a", "detail": "auto"}


def said(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a"}, {"role": "user", "content": list(parts)}]


REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"store": True}, "store", UNSUPPORTED),
    ({"previous_response_id": "resp_1"}, "previous_response_id", UNSUPPORTED),
    ({"background": True}, "background", UNSUPPORTED),
    ({"conversation": "conv_1"}, "conversation", UNSUPPORTED),
    ({"prompt": {"id": "p"}}, "prompt", UNSUPPORTED),
    ({"truncation": "auto"}, "truncation", UNSUPPORTED),
    ({"max_tokens": 3}, "max_tokens", UNSUPPORTED),
    ({"response_format": {"type": "json_object"}}, "response_format", UNSUPPORTED),
    ({"text": {"verbosity": "low"}}, "text.verbosity", UNSUPPORTED),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation",
     UNSUPPORTED),
    ({"include": ["message.output_text.logprobs"]}, "include", UNSUPPORTED),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", UNSUPPORTED),
    ({"tools": [TOOL, {**TOOL, "strict": True}]}, "tools[1].strict", UNSUPPORTED),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice.type", UNSUPPORTED),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]", UNSUPPORTED),
    ({"input": said({"type": "input_image", "file_id": "f"})}, "input[1].content[0].file_id",
     UNSUPPORTED),
    ({"tools": [{"type": "function"}]}, "tools", None),
    ({"tool_choice": "required"}, "tool_choice", None),
    ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice", None),
    ({"tool_choice": "required", "tools": [TOOL], "text": {"format": {"type": "json_object"}}},
     "text.format", None),
    ({"input": 3}, "input", None),
    ({"input": ["a"]}, "input[0]", None),
    ({"stop": ["a", 3]}, "stop[1]", None),
    ({"input": []}, "input", None),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", None),
    ({"input": [{"type": []}]}, "input[0].type", None),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", None),
    ({"input": [{"role": "user", "content": "a", "z": 1}]}, "input[0]", None),
    ({"input": [{"role": "user", "content": 3}]}, "input", None),
    ({"input": said({"type": "input_file"})}, "input[1].content[0].type", None),
    ({"input": said("a")}, "input[1].content[0]", None),
    ({"input": said({"type": "input_text", "text": "a"}, IMAGE)}, "input[1].content[1].image_url",
     None),
    ({"input": said({**IMAGE, "detail": "high"})}, "input[1].content[0].detail", None),
    ({"input": [{"type": "reasoning", "content": ["a"]}]}, "input[0].content", None),
    ({"input": [*MESSAGES, {**CALL, "arguments": "{"}]}, "input", None),
    ({"input": "hello " * 1100}, "input", "context_length_exceeded"),
    ({"max_output_tokens": 0}, "max_output_tokens", None),
    ({"temperature": -1}, "temperature", None),
    ({"metadata": {"a": 1}}, "metadata.a", None),
    ({"reasoning": {"effort": "hard"}}, "reasoning.effort", None),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", None),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", None),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "no type"}}}}, "text.format",
     None),
]  # fmt: skip


@pytest.mark.anyio
async def test_what_is_refused_by_its_own_name(scripted: Scripted) -> None:
    llm, executor = scripted()
    async with client_of(llm) as client:
        for change, param, code in REFUSED:
            answer = await client.post(PATH, json={"input": "hello", **change})
            error = error_of(answer)
            assert (answer.status_code, error["param"], error["code"]) == (400, param, code), change
            if param != "response_format":
                for chats in ("messages[", "max_completion_tokens", "response_format"):
                    assert chats not in error["message"]
        unknown = await client.post(PATH, json={"input": "hello", "model": "m2"})
        assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")
    assert executor.calls == []


MESSAGES_OF: list[tuple[list[dict[str, Any]], str]] = [
    ([{"role": "user", "content": 3}], "input[0].content is of type int"),
    ([*MESSAGES, CALL, {**CALL, "arguments": "{"}], "input[2].arguments is '{'"),
    ([*MESSAGES, CALL, {**CALL, "name": ""}], "input[2].name is ''"),
    ([*MESSAGES, {**CALL, "call_id": 3}], "input[1].call_id is of type int"),
    ([*MESSAGES, {**CALL, "call_id": "<|end_message|>"}], "input[1] contains a special token"),
    ([{"type": "function_call_output", "call_id": 3, "output": ""}],
     "input[0].call_id is of type int"),
    ([{"type": "function_call_output", "call_id": "c"}], "input[0].output is None"),
]  # fmt: skip


@pytest.mark.anyio
async def test_what_cannot_be_sent_back(scripted: Scripted) -> None:
    """Python reads JSON that it cannot write in UTF-8."""
    llm, _ = scripted()
    tool = '{"type": "function", "name": "f", "parameters": {"minimum": NaN}}'
    cases = {
        "metadata": r'{"a": "\ud800"}', "tools": f"[{tool}]", "reasoning": '{"effort": Infinity}',
        "text": r'{"format": {"type": "text", "\udfff": 1}}',
    }  # fmt: skip
    async with client_of(llm) as client:
        for name, value in cases.items():
            body = f'{{"input": "hello", "max_output_tokens": 1, "{name}": {value}}}'.encode()
            answer = await client.post(
                PATH, content=body, headers={"content-type": "application/json"}
            )
            assert (answer.status_code, error_of(answer)["param"]) == (400, name)


@pytest.mark.anyio
async def test_messages_name_the_item(scripted: Scripted) -> None:
    llm, _ = scripted()
    for items, message in MESSAGES_OF:
        error = error_of(await post(llm, PATH, {"input": items}))
        assert error["message"].startswith(message), error
        assert error["param"] == "input"


@pytest.mark.anyio
async def test_the_store_is_refused_with_what_to_do_instead(scripted: Scripted) -> None:
    llm, _ = scripted()
    told = {
        error_of(await post(llm, PATH, {"input": "a", name: value}))["message"].split(": ", 1)[1]
        for name, value in (("store", True), ("previous_response_id", "a"), ("background", True))
    }
    assert told == {
        "this server keeps no answers; send store=false and the whole conversation as input"
    }
    neutral = {"store": None, "previous_response_id": None, "background": False, "n": 1}
    answer = await post(llm, PATH, {"input": "a", "max_output_tokens": 1, **neutral})
    assert (answer.status_code, "x-ink-ignored-fields" in answer.headers) == (200, False)


@pytest.mark.anyio
async def test_what_is_ignored_is_listed(scripted: Scripted) -> None:
    llm, _ = scripted()
    secret = {"type": "reasoning", "id": "rs", "summary": [{"text": "s"}], "encrypted_content": "x"}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]}
    body = {
        "input": [secret, {"role": "assistant", "content": "a"}, thought, *MESSAGES, thought],
        "tools": [{**TOOL, "strict": False, "defer_loading": True}], "tool_choice": "auto",
        "reasoning": {"effort": "low", "summary": "auto"}, "max_output_tokens": 1,
        "include": ["reasoning.encrypted_content"], "new": 1, "user": "u",
    }  # fmt: skip
    for stream in (False, True):
        answer = await post(llm, PATH, {**body, "stream": stream})
        assert answer.status_code == 200, answer.text
        assert sorted(answer.headers["x-ink-ignored-fields"].split(", ")) == [
            "include.reasoning.encrypted_content", "input[0].encrypted_content",
            "input[0].summary", "input[2]", "input[4]", "new", "reasoning.summary",
            "tools[0].defer_loading",
        ]  # fmt: skip
