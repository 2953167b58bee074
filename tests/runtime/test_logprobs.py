"""Log-probabilities against float64, with and without speculation."""

from pathlib import Path

import numpy as np
import pytest
from fake import FakeExecutor, expected_logits, write_engine

from inkrt import LLM, SamplingParams, SpeculativeConfig
from inkrt.errors import RequestError


@pytest.mark.parametrize("method", ["none", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_they_are_the_models_own(
    tmp_path: Path, fake_executors: list[FakeExecutor], method: str, temperature: float
) -> None:
    write_engine(tmp_path)
    params = SamplingParams(
        temperature=temperature, seed=3, max_tokens=20, ignore_eos=True, logprobs=3, top_k=50,
        presence_penalty=0.5, stop="never to be seen",
    )  # fmt: skip
    prompt = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
    with LLM(tmp_path, speculative=SpeculativeConfig(method=method)) as llm:  # type: ignore[arg-type]
        (output,) = llm.generate([prompt], params)[0].outputs
        (plain,) = llm.generate([prompt], SamplingParams(seed=3, max_tokens=5))[0].outputs
    assert plain.logprobs == ()
    timeline = list(prompt)
    assert len(output.logprobs) == len(output.token_ids) == 20
    for token, found in zip(output.token_ids, output.logprobs, strict=True):
        row = expected_logits(timeline).astype(np.float64)
        expected = row - np.log(np.exp(row).sum())
        assert found.token == token
        assert found.logprob == pytest.approx(expected[token], abs=1e-12)
        order = np.argsort(-expected, kind="stable")[:3]
        assert [place for place, _ in found.top] == order.tolist()
        assert [value for _, value in found.top] == pytest.approx(expected[order].tolist())
        timeline.append(token)


@pytest.mark.parametrize("value", [-1, 21, True, 1.5])
def test_invalid_numbers(value: object) -> None:
    with pytest.raises(RequestError, match="logprobs is") as caught:
        SamplingParams(logprobs=value)  # type: ignore[arg-type]
    assert caught.value.param == "logprobs"
