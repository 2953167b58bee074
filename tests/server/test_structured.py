"""Structured outputs: whatever the model would say, the answer is what was asked for."""

import json
import re
from typing import Any

import pytest
from served import MESSAGES, Scripted, post, say
from test_inkling_answers import END, END_SAMPLING, TEXT, THINKING

from inkrt import SpeculativeConfig

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "sizes": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "deep": {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"],
                 "additionalProperties": False},
    },
    "required": ["kind", "sizes", "deep"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "g", "strict": True, "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "h"}},
]


def check(found: Any) -> None:
    """An oracle of the schema that is not the library's."""
    assert list(found) == ["kind", "sizes", "deep"]
    assert found["kind"] in ("a", "b")
    assert 1 <= len(found["sizes"]) <= 3
    assert all(type(size) is bool for size in found["sizes"])
    assert found["deep"] == {"x": None}


@pytest.mark.parametrize("method", ["none", "ngram"])
@pytest.mark.anyio
async def test_schemas_hold_at_any_temperature(scripted: Scripted, method: Any) -> None:
    """Behind a block of reasoning; the same answers whoever drafts."""
    llm, executor = scripted(speculative=SpeculativeConfig(method=method), max_waiting=32)
    say(llm, executor, llm.llm.chat_prompt(MESSAGES), f"{THINKING}hello{END}")
    executor.script |= {max(executor.script) + 2: 0}  # nothing that the grammar allows
    body = {
        "messages": MESSAGES, "n": 12, "seed": 1, "temperature": 3.0, "max_tokens": 300,
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        "return_token_ids": True, "stop_token_ids": [llm.llm.engine.tokenizer.special_ids[END_SAMPLING]],  # type: ignore[union-attr] # noqa: E501
    }  # fmt: skip
    answer = (await post(llm, CHAT, body)).json()
    kinds = set()
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["reasoning_content"] == "hello"
        check(json.loads(choice["message"]["content"]))
        kinds.add(choice["message"]["content"])
    assert len(kinds) > 4
    ids = [choice["token_ids"] for choice in answer["choices"]]
    plain, _ = scripted(speculative=SpeculativeConfig(method="none"), max_waiting=32)
    say(plain, _, plain.llm.chat_prompt(MESSAGES), f"{THINKING}hello{END}")
    again = (await post(plain, CHAT, body)).json()
    assert [choice["token_ids"] for choice in again["choices"]] == ids


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
@pytest.mark.anyio
async def test_a_call_that_must_be(scripted: Scripted, choice: Any) -> None:
    llm, executor = scripted(max_waiting=32)
    say(llm, executor, llm.llm.chat_prompt(MESSAGES, tools=TOOLS), f"{TEXT}hello{END}")
    body = {
        "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "temperature": 1.0, "n": 4,
        "seed": 2, "max_tokens": 300, "logit_bias": {},
    }  # fmt: skip
    if choice == "required":
        body["tools"] = TOOLS[:1]
        say(llm, executor, llm.llm.chat_prompt(MESSAGES, tools=TOOLS[:1]), f"{TEXT}hello{END}")
    tokenizer = llm.llm.engine.tokenizer
    assert tokenizer is not None
    body["logit_bias"] = {str(tokenizer.special_ids[THINKING]): -100}
    body["stop_token_ids"] = [tokenizer.special_ids[END_SAMPLING]]
    answers = (await post(llm, CHAT, body)).json()
    for answer in answers["choices"]:
        (call,) = answer["message"]["tool_calls"]
        assert (call["function"]["name"], answer["finish_reason"]) == ("g", "tool_calls")
        assert answer["message"]["content"] is None
        check(json.loads(call["function"]["arguments"]))


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[a-c]{2}(x|yz)"}, "[a-c]{2}(x|yz)"),
        ({"choice": ["a (b) [c]?", "d.e*f", "☃ g-h"]}, r"a \(b\) \[c\]\?|d\.e\*f|☃ g-h"),
        ({"grammar": 'start: "p" item{2}\nitem: /[0-9]/ "q"'}, "p([0-9]q){2}"),
        ({"json": {"type": "integer", "minimum": 10, "maximum": 12}}, "1[0-2]"),
    ],
)
@pytest.mark.anyio
async def test_texts_of_a_grammar(scripted: Scripted, asked: Any, pattern: str) -> None:
    llm, _ = scripted()
    body = {
        "prompt": "hello", "temperature": 2.0, "n": 3, "seed": 5, "max_tokens": 60,
        "structured_outputs": asked,
    }  # fmt: skip
    for choice in (await post(llm, "/v1/completions", body)).json()["choices"]:
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["text"])
