"""The trained nano model behind the server: drafts by DSpark, reasoning, grammars, next turns."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from inkrt import LLM, AsyncLLM, SamplingParams, SpeculativeConfig
from inkrt.server.app import create_app

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "Which number is the largest: 417, 86, 903, 255?"}]
SCHEMA = {
    "type": "object",
    "properties": {"largest": {"enum": [417, 86, 903, 255]}, "is_sure": {"type": "boolean"}},
    "required": ["largest", "is_sure"],
    "additionalProperties": False,
}


def serve(folder: Path, *bodies: dict[str, Any], prefix_cache: bool = False) -> list[Any]:
    async def work() -> list[Any]:
        async with AsyncLLM(folder, prefix_cache=prefix_cache) as llm:
            transport = httpx2.ASGITransport(app=create_app(llm))
            async with httpx2.AsyncClient(transport=transport, base_url="http://a") as client:
                client.timeout = 600
                answers = [await client.post("/v1/chat/completions", json=body) for body in bodies]
            return [answer.json() for answer in answers]

    return asyncio.run(work())


def test_answers_are_those_of_plain_decoding(nano_engine: Path) -> None:
    with LLM(nano_engine, speculative=SpeculativeConfig(method="none")) as llm:
        plain = [
            llm.chat(QUESTION, SamplingParams(temperature=1.0, seed=seed, max_tokens=80))
            for seed in (3, 4, 5)
        ]
    body = {"messages": QUESTION, "seed": 3, "n": 3, "max_tokens": 80, "temperature": 1.0}
    whole, greedy = serve(
        nano_engine, {**body, "return_token_ids": True}, {"messages": QUESTION, "temperature": 0}
    )
    found = [tuple(choice["token_ids"]) for choice in whole["choices"]]
    assert found == [output.outputs[0].token_ids for output in plain]
    assert whole["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 20
    message = greedy["choices"][0]["message"]
    assert (message["content"], greedy["choices"][0]["finish_reason"]) == ("903", "stop")
    assert message["reasoning_content"].startswith("417 or 86: 417.")


def test_schemas_hold(nano_engine: Path) -> None:
    body = {
        "messages": QUESTION, "temperature": 1.0, "seed": 1, "n": 10, "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    }  # fmt: skip
    (answer,) = serve(nano_engine, body)
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 30
    for choice in answer["choices"]:
        if choice["finish_reason"] == "length":  # it has not come to an end of its reasoning
            continue
        found = json.loads(choice["message"]["content"])
        assert found.keys() == {"largest", "is_sure"}
        assert found["largest"] in (417, 86, 903, 255)
        assert isinstance(found["is_sure"], bool)
    ends = [choice["finish_reason"] for choice in answer["choices"]]
    assert ends.count("stop") >= 8


def test_a_next_turn_reads_what_is_new(nano_engine: Path) -> None:
    first = {"messages": QUESTION, "temperature": 0, "max_tokens": 90}
    (answer,) = serve(nano_engine, first)
    message = answer["choices"][0]["message"]
    turns = [*QUESTION, message, {"role": "user", "content": "And the smallest?"}]
    second = {**first, "messages": turns, "return_token_ids": True, "max_tokens": 30}
    (alone,) = serve(nano_engine, second)
    _, cached = serve(nano_engine, first, second, prefix_cache=True)
    usage = cached["usage"]
    num_first = answer["usage"]["total_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= num_first - 12
    assert cached["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
