"""LLM: outputs in order, cancellation, threads, what it refuses."""

import threading
from pathlib import Path
from typing import Any

import pytest
from fake import EOS, FakeExecutor, generate_plainly, write_engine

from inkrt import LLM, SamplingParams
from inkrt.errors import CapacityError, EngineFormatError, RequestError
from inkrt.runtime.executor import Sampling

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
ALL_FREE = (3, 72)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_engine(tmp_path)
    return tmp_path


@pytest.fixture
def llm(folder: Path, fake_executors: list[FakeExecutor]) -> LLM:
    return LLM(folder)


def free(llm: LLM) -> tuple[int, int]:
    return llm.engine.states.num_free_slots, llm.engine.states.num_free_pages


def test_more_prompts_than_slots_come_back_in_order(llm: LLM) -> None:
    prompts = [[i + 4, *range(10, 10 + 9 * i)] for i in range(8)]
    params = [
        SamplingParams(temperature=0.7, seed=i, max_tokens=20 - 2 * i, ignore_eos=True)
        for i in range(8)
    ]
    outputs = llm.generate(prompts, params)
    for i, output in enumerate(outputs):
        (completion,) = output.outputs
        sampling = Sampling(temperature=0.7, seed=i)
        assert list(completion.token_ids) == generate_plainly(prompts[i], sampling, 20 - 2 * i)
        assert output.prompt_token_ids == tuple(prompts[i])
        assert (completion.index, completion.finish_reason, output.finished) == (0, "length", True)
    assert len({output.request_id for output in outputs}) == 8
    assert free(llm) == ALL_FREE


def test_requests_take_turns(llm: LLM, fake_executors: list[FakeExecutor]) -> None:
    llm.generate([[5] * 2, [6] * 3, [7] * 4], GREEDY)
    assert [step for step, _ in fake_executors[0].calls[:6]] == [
        "verify2",
        "verify3",
        "verify4",
        "decode",
        "decode",
        "decode",
    ]


def test_forms_of_a_prompt(llm: LLM) -> None:
    assert llm.engine.tokenizer is not None
    ids = llm.engine.tokenizer.encode("hello <|user|> world")
    assert ids[0] > 3
    outputs = llm.generate(["hello <|user|> world", ids, {"prompt_token_ids": ids}], GREEDY)
    single = llm.generate("hello <|user|> world", GREEDY)
    texts = {output.outputs[0].text for output in [*outputs, *single]}
    assert len(texts) == 1
    assert all(output.prompt_token_ids == tuple(ids) for output in outputs)
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (
            ["ok", [1, 999]],
            "prompts[1]: token 1 of the prompt has id 999, ids of this model are 0..409; "
            "encode text with the engine's own tokenizer",
        ),
        ([""], "prompts[0]: the prompt has no tokens; give at least one"),
        (
            [1, 2],
            "prompts[0]: a prompt is of type int, it must be a string, a list of token ids or "
            '{"prompt_token_ids": [...]}',
        ),
        (
            [{"text": "x"}],
            "prompts[0]: a prompt object has the keys ['text'], it must have prompt or "
            "prompt_token_ids, and may have images and audio",
        ),
        (
            {"prompt_token_ids": "abc"},
            "prompts[0]: a prompt is of type str, it must be a string, a list of token ids or "
            '{"prompt_token_ids": [...]}',
        ),
        (
            [[1] * 96],
            "prompts[0]: the prompt has 96 tokens, this engine holds 96 with the output; shorten "
            "it to at most 95 or rebuild with: ink-build CHECKPOINT -o ENGINE --target cpu "
            "--max-seq-len 97 --max-batch-size 3",
        ),
    ],
)
def test_one_bad_prompt_is_named_and_nothing_runs(
    llm: LLM, fake_executors: list[FakeExecutor], prompts: Any, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, GREEDY)
    assert (str(caught.value), caught.value.param) == (message, "prompt")
    assert fake_executors[0].calls == []


def test_a_prompt_in_the_wrong_object(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate([[1], [2]], [GREEDY])
    assert str(caught.value) == "1 params for 2 prompts; give one for all or one per prompt"


def test_stream_gives_the_deltas_of_generate(llm: LLM) -> None:
    prompt = list(range(4, 80))
    deltas = list(llm.stream(prompt, GREEDY))
    (output,) = llm.generate([prompt], GREEDY)
    assert "".join(delta.text for delta in deltas) == output.outputs[0].text
    assert [delta.token_ids for delta in deltas] == [(t,) for t in output.outputs[0].token_ids]
    assert deltas[-1].finish_reason == "length"
    assert free(llm) == ALL_FREE


def test_closing_a_stream_cancels(llm: LLM, fake_executors: list[FakeExecutor]) -> None:
    never_started = llm.stream("hello", GREEDY)
    stream = llm.stream("hello", GREEDY)
    assert free(llm) == ALL_FREE
    next(stream)
    next(stream)
    assert free(llm)[0] == 2
    num_calls = len(fake_executors[0].calls)
    stream.close()
    never_started.close()
    assert free(llm) == ALL_FREE
    assert len(fake_executors[0].calls) == num_calls
    for delta in llm.stream("hello", GREEDY):
        assert delta.token_ids
        break  # dropping the generator closes it
    assert free(llm) == ALL_FREE


def test_stream_refuses_a_bad_prompt_at_once(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.stream([], GREEDY)
    assert str(caught.value) == "the prompt has no tokens; give at least one"


def test_streams_beside_generate(llm: LLM) -> None:
    streams = [llm.stream([i + 5], GREEDY) for i in range(2)]
    heads = [list(next(stream).token_ids) for stream in streams]
    outputs = llm.generate([[9], [10]], GREEDY)  # one slot is left: one after the other
    for i, stream in enumerate(streams):
        tokens = heads[i] + [token for delta in stream for token in delta.token_ids]
        assert tokens == generate_plainly([i + 5], Sampling(), 10)
    for i, output in enumerate(outputs):
        assert list(output.outputs[0].token_ids) == generate_plainly([9 + i], Sampling(), 10)


def test_all_slots_taken_is_a_capacity_error(llm: LLM) -> None:
    streams = [llm.stream([i + 5], GREEDY) for i in range(4)]
    for stream in streams[:3]:
        next(stream)
    with pytest.raises(CapacityError, match="all 3 session slots are in use"):
        next(streams[3])
    with pytest.raises(CapacityError, match="all 3 session slots are in use"):
        llm.generate([[5]], GREEDY)
    streams[0].close()
    assert len(llm.generate([[5]], GREEDY)) == 1


def test_a_failing_step_frees_everything(llm: LLM, fake_executors: list[FakeExecutor]) -> None:
    fake_executors[0].fail_after = 12
    with pytest.raises(OSError, match="the device failed"):
        llm.generate([[5], [6], [7]], GREEDY)
    assert free(llm) == ALL_FREE
    (output,) = llm.generate([[5]], GREEDY)
    assert list(output.outputs[0].token_ids) == generate_plainly([5], Sampling(), 10)


def test_threads(llm: LLM) -> None:
    results: dict[int, list[int]] = {}

    def work(number: int) -> None:
        for _ in range(5):
            (output,) = llm.generate([[number + 5]], GREEDY)
            results[number] = list(output.outputs[0].token_ids)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        assert results[number] == generate_plainly([number + 5], Sampling(), 10)
    assert free(llm) == ALL_FREE


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello <|end|>"}]
    output = llm.chat(messages, GREEDY)
    assert llm.engine.tokenizer is not None
    text = llm.engine.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert text == "<|user|>\nhello <|end|><|end|><|assistant|>\n"
    assert list(output.prompt_token_ids).count(3) == 1
    deltas = list(llm.chat_stream(messages, GREEDY))
    assert "".join(delta.text for delta in deltas) == output.outputs[0].text


def test_engines_without_template_or_tokenizer(
    tmp_path: Path, fake_executors: list[FakeExecutor]
) -> None:
    write_engine(tmp_path, tokenizer=False, template=None)
    with LLM(tmp_path) as llm:
        assert len(llm.generate([[5]], GREEDY)[0].outputs[0].token_ids) == 10
        with pytest.raises(RequestError) as caught:
            llm.generate(["hi"], GREEDY)
        assert str(caught.value) == (
            "prompts[0]: the engine has no tokenizer.json; give token ids or rebuild it from a "
            "checkpoint with a tokenizer"
        )
        with pytest.raises(RequestError) as caught:
            llm.chat([{"role": "user", "content": "hi"}])
        assert str(caught.value) == (
            "the engine has no chat template; use generate, or rebuild it from a checkpoint with "
            "chat_template.jinja and tokenizer.json"
        )
        assert caught.value.param == "messages"


def test_default_params(tmp_path: Path, fake_executors: list[FakeExecutor]) -> None:
    write_engine(tmp_path / "a", generation_config={"do_sample": False})
    write_engine(tmp_path / "b")
    write_engine(tmp_path / "c", generation_config={"top_p": 2})
    with LLM(tmp_path / "a") as llm:
        assert llm.default_params == SamplingParams(temperature=0.0)
        (output,) = llm.generate([[5, 6]])
        tokens = generate_plainly([5, 6], Sampling(), 94)
        end = tokens.index(EOS) + 1 if EOS in tokens else 94
        assert list(output.outputs[0].token_ids) == tokens[:end]
    with LLM(tmp_path / "b") as llm:
        assert llm.default_params == SamplingParams()
    with pytest.raises(EngineFormatError) as caught:
        LLM(tmp_path / "c")
    assert str(caught.value) == (
        f"cannot use {tmp_path}/c/generation_config.json: top_p is 2, it must be a number above 0 "
        "and at most 1 (1 is off); mend the file or rebuild the engine"
    )


def test_close(llm: LLM, fake_executors: list[FakeExecutor]) -> None:
    stream = llm.stream("hello", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    assert fake_executors[0].is_closed
    with pytest.raises(RequestError) as caught:
        next(stream)
    assert str(caught.value) == "the engine is closed; open it again"
    with pytest.raises(RequestError, match="the engine is closed"):
        llm.generate(["hello"], GREEDY)
    assert free(llm) == ALL_FREE
