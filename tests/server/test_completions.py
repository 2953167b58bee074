"""Completions over HTTP: several prompts, legacy log-probabilities, text as the engine gives it."""

import json
from typing import Any

import numpy as np
import pytest
from served import Scripted, post

from fake import expected_logits  # isort: skip

from inkrt import SamplingParams


@pytest.mark.parametrize("prompt", [["hello", "the lazy dog"], [[5, 6, 7], [8]], "hello", [5, 6]])
@pytest.mark.anyio
async def test_texts_are_those_of_llm_generate(scripted: Scripted, prompt: Any) -> None:
    llm, _ = scripted()
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    expected = [
        llm.llm.generate([one], SamplingParams(temperature=0.8, seed=seed, stop="b", max_tokens=16))
        for one in prompts
        for seed in (3, 4)
    ]
    outputs = [output.outputs[0] for (output,) in expected]
    body = {"prompt": prompt, "temperature": 0.8, "seed": 3, "n": 2, "stop": "b"}
    whole = (await post(llm, "/v1/completions", body)).json()
    found = [
        (c["index"], c["text"], c["finish_reason"], c["stop_reason"]) for c in whole["choices"]
    ]
    assert found == [
        (i, output.text, output.finish_reason, output.stop_reason)
        for i, output in enumerate(outputs)
    ]
    num_tokens = sum(len(output.token_ids) for output in outputs)
    assert whole["usage"]["completion_tokens"] == num_tokens
    texts, ends = [""] * len(outputs), [None] * len(outputs)
    streamed = await post(llm, "/v1/completions", {**body, "stream": True})
    *blocks, done, empty = streamed.text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    for block in blocks:
        (choice,) = json.loads(block.removeprefix("data: "))["choices"]
        assert ends[choice["index"]] is None
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"]
    assert texts == [output.text for output in outputs]
    assert ends == [output.finish_reason for output in outputs]


@pytest.mark.anyio
async def test_log_probabilities(scripted: Scripted) -> None:
    llm, _ = scripted()
    body = {
        "prompt": [5, 6, 7],
        "temperature": 0,
        "max_tokens": 6,
        "logprobs": 2,
        "ignore_eos": True,
    }
    choice = (await post(llm, "/v1/completions", {**body, "return_token_ids": True})).json()[
        "choices"
    ][0]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    timeline = [5, 6, 7]
    shown = choice["logprobs"]
    for i, token in enumerate(choice["token_ids"]):
        row = expected_logits(timeline).astype(np.float64)
        row -= np.log(np.exp(row).sum())
        assert shown["token_logprobs"][i] == pytest.approx(row[token])
        assert max(shown["top_logprobs"][i].values()) == pytest.approx(row.max())
        timeline.append(token)
    assert shown["text_offset"] == [len("".join(shown["tokens"][:i])) for i in range(6)]
