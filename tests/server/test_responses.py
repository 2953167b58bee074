"""Responses over HTTP: items and their events, of the same chats that the chat route answers."""

import json
from typing import Any

import pytest
from served import MESSAGES, Scripted, post, say
from test_inkling_answers import ARGUMENTS, CALLED, END, END_SAMPLING, SAID, TEXT, THOUGHT, TOOLS
from test_requests import error_of

from inkrt import SpeculativeConfig
from inkrt.server.settings import ServerSettings

PATH = "/v1/responses"
OWN_TOOLS = [{"type": "function", "name": "get_weather"}]
SAYS, THINKS = "hello 👩‍👩‍👧 world", "the quick brown fox"
TEXT_EVENTS = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
THOUGHT_EVENTS = [name.replace("output_text", "reasoning_text") for name in TEXT_EVENTS]
CALL_EVENTS = ["function_call_arguments.delta", "function_call_arguments.done"]
# What the model says, and of each item the kind, what it holds, and its events.
ANSWERS: dict[str, tuple[str, list[tuple[str, str, list[str]]]]] = {
    "text": (SAID, [("message", SAYS, TEXT_EVENTS)]),
    "reasoning, text": (
        THOUGHT + SAID,
        [("reasoning", THINKS, THOUGHT_EVENTS), ("message", SAYS, TEXT_EVENTS)],
    ),
    "all, and text behind calls": (
        THOUGHT + SAID + CALLED + CALLED + SAID,
        [
            ("reasoning", THINKS, THOUGHT_EVENTS),
            ("message", SAYS, TEXT_EVENTS),
            ("function_call", ARGUMENTS, CALL_EVENTS),
            ("function_call", ARGUMENTS, CALL_EVENTS),
            ("message", SAYS, TEXT_EVENTS),
        ],
    ),
    "nothing": ("", []),
}


def events_of(text: str) -> list[dict[str, Any]]:
    """Events, whose names and numbers are as they must be."""
    blocks = [block for block in text.split("\n\n") if block != ": ping"]
    assert blocks.pop() == ""
    events = []
    for number, block in enumerate(blocks):
        head, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert head == f"event: {events[-1]['type']}"
        assert events[-1]["sequence_number"] == number
    return events


def text_of(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        assert item["name"] == "get_weather"
        return str(item["arguments"])
    (part,) = item["content"]
    assert part["type"] == {"message": "output_text", "reasoning": "reasoning_text"}[item["type"]]
    return str(part["text"])


def without_ids(value: Any) -> Any:
    """The value without what differs from answer to answer."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    own = ("id", "call_id", "created_at", "completed_at", "usage")
    return {key: without_ids(item) for key, item in value.items() if key not in own}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("speculative", ["none", "ngram"])
@pytest.mark.anyio
async def test_items_and_their_events(scripted: Scripted, name: str, speculative: Any) -> None:
    answer, expected = ANSWERS[name]
    llm, executor = scripted(speculative=SpeculativeConfig(method=speculative))
    prompt = llm.llm.chat_prompt(MESSAGES, tools=TOOLS)
    ids = say(llm, executor, prompt, answer + END_SAMPLING)
    body = {
        "model": "other", "input": "hello", "tools": OWN_TOOLS, "temperature": 0,
        "stop_token_ids": [ids[-1]], "metadata": {"a": "b"}, "store": False,
    }  # fmt: skip
    whole = (await post(llm, PATH, body)).json()
    assert [(item["type"], text_of(item)) for item in whole["output"]] == [
        (kind, text) for kind, text, _ in expected
    ]
    assert {item["status"] for item in whole["output"]} <= {"completed"}
    assert (whole["status"], whole["error"], whole["incomplete_details"]) == (
        "completed", None, None,
    )  # fmt: skip
    assert (whole["model"], whole["metadata"], whole["store"]) == ("other", {"a": "b"}, False)
    usage = whole["usage"]
    num_prompt = len(prompt["prompt_token_ids"])
    assert (usage["input_tokens"], usage["output_tokens"]) == (num_prompt, len(ids))
    assert usage["total_tokens"] == num_prompt + len(ids)
    assert (usage["output_tokens_details"]["reasoning_tokens"] > 0) == (
        "reasoning" in str(expected)
    )

    events = events_of((await post(llm, PATH, {**body, "stream": True})).text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    runs = [kind for i, kind in enumerate(kinds) if kind != "".join(kinds[i - 1 : i])]
    of_items = [
        kind
        for _, _, inner in expected
        for kind in ("output_item.added", *inner, "output_item.done")
    ]
    assert runs == ["created", "in_progress", *of_items, "completed"]
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    check_texts(events)


def check_texts(events: list[dict[str, Any]]) -> None:
    """Deltas add up to what is told at the end of each item, under its ids, and in the response."""
    final = events[-1]["response"]
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    for number, item in enumerate(final["output"]):
        own = [event for event in events if event.get("output_index") == number]
        added, done = own[0]["item"], own[-1]["item"]
        assert (added["status"], added["id"]) == ("in_progress", item["id"])
        assert done == item
        assert {event["item_id"] for event in own[1:-1]} == {item["id"]}
        deltas = [event["delta"] for event in own if event["type"].endswith(".delta")]
        assert all(deltas)
        assert "".join(deltas) == text_of(item)
        (told,) = (
            event.get("text", event.get("arguments"))
            for event in own
            if event["type"].endswith(("text.done", "arguments.done"))
        )
        assert told == text_of(item)
        if item["type"] == "function_call":
            assert (added["arguments"], added["call_id"]) == ("", item["call_id"])
        else:
            assert added["content"] == []
            parts = [event["part"] for event in own if "part" in event]
            assert [parts[0]["text"], *parts[1:]] == ["", *item["content"]]


@pytest.mark.parametrize("length", [1, 6, 16])
@pytest.mark.anyio
async def test_a_limit_of_length(scripted: Scripted, length: int) -> None:
    llm, executor = scripted()
    say(llm, executor, llm.llm.chat_prompt(MESSAGES), THOUGHT + SAID)
    body = {"input": "hello", "temperature": 0, "max_output_tokens": length}
    whole = (await post(llm, PATH, body)).json()
    assert (whole["status"], whole["completed_at"]) == ("incomplete", None)
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["usage"]["output_tokens"] == whole["max_output_tokens"] == length
    states = [item["status"] for item in whole["output"]]
    assert states == ["completed"] * (len(states) - 1) + ["incomplete"] * bool(states)
    assert (len(states) > 0) == (length > 1)
    events = events_of((await post(llm, PATH, {**body, "stream": True})).text)
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    check_texts(events)


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
THINKING = {"type": "reasoning", "summary": [], "content": [
    {"type": "reasoning_text", "text": "so"},
]}  # fmt: skip
SPOKEN = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [
    {"type": "output_text", "text": "let me see", "annotations": [], "logprobs": []},
]}  # fmt: skip


def chat_call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


@pytest.mark.anyio
async def test_items_are_the_messages_of_a_chat(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = scripted()
    ask, real = {"role": "user", "content": "hello"}, llm.llm.chat_prompt
    system = {"role": "system", "content": "be brief"}
    result = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    seen: list[Any] = []
    cases: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        ({"input": "hello", "instructions": "be brief"}, [system, ask]),
        (
            {"input": [{**ask, "content": [{"type": "input_text", "text": "hello"}]}]},
            [{**ask, "content": [{"type": "text", "text": "hello"}]}],
        ),
        (  # one answer of the model, with two calls
            {"input": [ask, THINKING, SPOKEN, CALL, {**CALL, "call_id": "c2"}, OUTPUT, ask]},
            [
                ask,
                {
                    "role": "assistant", "reasoning_content": "so",
                    "content": [{"type": "text", "text": "let me see"}],
                    "tool_calls": [chat_call("c1"), chat_call("c2")],
                },
                result,
                ask,
            ],
        ),
        (  # two answers: the second has thoughts of its own
            {"input": [ask, CALL, THINKING, {**CALL, "call_id": "c2"}, OUTPUT]},
            [
                ask,
                {"role": "assistant", "content": None, "tool_calls": [chat_call("c1")]},
                {
                    "role": "assistant", "content": None, "reasoning_content": "so",
                    "tool_calls": [chat_call("c2")],
                },
                result,
            ],
        ),
    ]  # fmt: skip

    def record(messages: Any, **options: Any) -> Any:
        seen.append((messages, options["variables"]))
        return real(messages, **options)

    monkeypatch.setattr(llm.llm, "chat_prompt", record)
    for body, messages in cases:
        more = {"max_output_tokens": 1, "reasoning": {"effort": "low"}}
        answer = await post(llm, PATH, {**body, **more})
        assert answer.status_code == 200, answer.text
        assert seen.pop() == (messages, {"reasoning_effort": "low"})


@pytest.mark.anyio
async def test_the_output_is_input_of_the_next_turn(scripted: Scripted) -> None:
    llm, executor = scripted()
    prompt = llm.llm.chat_prompt(MESSAGES, tools=TOOLS)
    ids = say(llm, executor, prompt, THOUGHT + SAID + CALLED + END_SAMPLING)
    body = {"tools": OWN_TOOLS, "temperature": 0, "stop_token_ids": [ids[-1]]}
    first = (await post(llm, PATH, {**body, "input": MESSAGES})).json()
    call_id = first["output"][-1]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "sunny"}
    history = [*MESSAGES, *first["output"], result]
    function = {"name": "get_weather", "arguments": ARGUMENTS}
    messages = [
        *MESSAGES,
        {
            "role": "assistant", "reasoning_content": THINKS, "content": SAYS,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": "sunny"},
    ]  # fmt: skip
    next_prompt = llm.llm.chat_prompt(messages, tools=TOOLS)
    say(llm, executor, next_prompt, f"{TEXT}there{END}{END_SAMPLING}")
    answer = await post(llm, PATH, {**body, "input": history})
    assert "x-ink-ignored-fields" not in answer.headers
    assert answer.json()["usage"]["input_tokens"] == len(next_prompt["prompt_token_ids"])
    assert [text_of(item) for item in answer.json()["output"]] == ["there"]


@pytest.mark.anyio
async def test_what_the_text_is_made_of(scripted: Scripted) -> None:
    llm, executor = scripted()
    say(llm, executor, llm.llm.chat_prompt(MESSAGES), f"{TEXT}hello{END}")
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    given = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    end = llm.llm.engine.tokenizer.special_ids[END_SAMPLING]  # type: ignore[union-attr]
    body = {"input": "hello", "text": {"format": given}, "stop_token_ids": [end]}
    made = (await post(llm, PATH, {**body, "seed": 1, "max_output_tokens": 200})).json()
    assert made["text"] == {"format": given}
    assert [text_of(item) for item in made["output"] if item["type"] == "message"] == ['{"a":"x"}']


@pytest.mark.anyio
async def test_an_error_behind_the_first_event(scripted: Scripted) -> None:
    llm, executor = scripted()
    executor.step_s = 0.02
    body = {"input": "hello", "ignore_eos": True, "stream": True}
    settings = ServerSettings(request_timeout_s=0.1, ping_s=0.01)
    events = events_of((await post(llm, PATH, body, settings)).text)
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert "longer than this server allows" in failed["error"]["message"]
    whole = await post(llm, PATH, {**body, "stream": False}, settings)
    assert (whole.status_code, error_of(whole)["code"]) == (504, "timeout")


@pytest.mark.anyio
async def test_events_are_those_of_the_official_client(scripted: Scripted) -> None:
    pytest.importorskip("openai")
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    llm, executor = scripted()
    prompt = llm.llm.chat_prompt(MESSAGES, tools=TOOLS)
    ids = say(llm, executor, prompt, THOUGHT + SAID + CALLED + END_SAMPLING)
    body = {
        "input": MESSAGES, "tools": OWN_TOOLS, "temperature": 0, "stop_token_ids": [ids[-1]],
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "high"},
    }  # fmt: skip
    Response.model_validate((await post(llm, PATH, body)).json())
    events = events_of((await post(llm, PATH, {**body, "stream": True})).text)
    adapter = TypeAdapter[Any](ResponseStreamEvent)
    for event in events:
        assert adapter.validate_python(event).type == event["type"]
