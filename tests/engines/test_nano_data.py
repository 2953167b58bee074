"""Tokenizer, chat rendering and tasks of the trained checkpoint's data; no network, no packages."""

import json
import operator
import pydoc_data.topics
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest

from inkrt.engines.nano import data, sources, tasks, tokenizer
from inkrt.engines.nano.chat import CHAT_TEMPLATE, Conversation, render
from inkrt.runtime.chat import ChatTemplate
from inkrt.runtime.jinja_environment import chat_environment
from inkrt.runtime.tokenizer import Tokenizer

TEXTS = [text for _, text in sorted(pydoc_data.topics.topics.items())]


@pytest.fixture(scope="module")
def encoder() -> tokenizer.TextEncoder:
    return tokenizer.TextEncoder(tokenizer.train(TEXTS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nano")
    tokenizer.write_files(tokenizer.train(TEXTS), folder)
    return folder


@pytest.fixture(scope="module")
def fill(encoder: tokenizer.TextEncoder) -> data.Filler:
    return data.make_filler(encoder.encode_many(TEXTS), encoder)


@pytest.fixture(scope="module")
def evaluation(
    encoder: tokenizer.TextEncoder, fill: data.Filler
) -> tuple[list[dict], frozenset[str]]:
    return data.evaluation(encoder, fill)


def test_vocabulary(folder: Path) -> None:
    loaded = Tokenizer(folder / "tokenizer.json")
    assert sorted(loaded.special_ids.values()) == list(range(4096, 4111))
    assert tokenizer.VOCAB_SIZE == 4111 < tokenizer.PADDED_VOCAB_SIZE == 4160
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == loaded.special_ids["<|content_model_end_sampling|>"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a  b\n\n\tc",
        "Grüße, 世界! 🙂",
        "x = 1234.5e-6",
        "\0\x7f",
        "½ of ٣",
        "<|end_message|>",
    ],
)
def test_text_comes_back(folder: Path, encoder: tokenizer.TextEncoder, text: str) -> None:
    loaded = Tokenizer(folder / "tokenizer.json")
    ids = encoder.encode(text)
    assert ids == loaded.encode(text)
    assert encoder.decode(ids) == loaded.decode(ids) == text
    assert all(token < 4096 for token in ids)


def test_every_marker_in_text_stays_text(encoder: tokenizer.TextEncoder) -> None:
    for marker in tokenizer.SPECIAL_TOKENS:
        chat = Conversation([{"role": "user", "content": f"a{marker}b"}])
        ids = render(chat, encoder).tokens
        markers = [token for token in ids if token >= 4096]
        assert len(markers) == 6  # of the effort's message and the user's
        assert encoder.decode(encoder.encode(marker)) == marker


def test_digits_are_apart(encoder: tokenizer.TextEncoder) -> None:
    ids = encoder.encode("sum 12345")
    assert [encoder.decode([token]) for token in ids[-5:]] == list("12345")


@pytest.mark.parametrize("kind", data.NUM_CHATS)
def test_rendering_is_the_templates(
    kind: str, folder: Path, encoder: tokenizer.TextEncoder, fill: data.Filler
) -> None:
    loaded = Tokenizer(folder / "tokenizer.json")
    template = chat_environment().from_string(CHAT_TEMPLATE)
    runtime = ChatTemplate.load(folder)
    assert runtime is not None
    for seed in range(15):
        chat = data.sample(kind, Random(seed), fill, frozenset())
        out = render(chat, encoder)
        text = template.render(
            messages=chat.messages, tools=list(chat.tools), reasoning_effort=chat.effort
        )
        assert out.tokens == loaded.encode(text, parse_special=True)
        if kind != "tool_call":  # the runtime's messages have no tool calls
            assert out.tokens == runtime.encode_chat(
                chat.messages, loaded, add_generation_prompt=False, reasoning_effort=chat.effort
            )


def test_only_answers_are_predicted(encoder: tokenizer.TextEncoder) -> None:
    reply = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    out = render(Conversation([{"role": "user", "content": "2 + 2?"}, reply]), encoder)
    predicted = [t for t, loss in zip(out.tokens, out.loss, strict=True) if loss]
    names = ("content_thinking", "end_message", "message_model", "content_text")
    thinking, end, model, text = (encoder.special(name) for name in names)
    stop = encoder.special("content_model_end_sampling")
    assert predicted == [
        *(thinking, *encoder.encode("2 + 2"), end),
        *(model, text, *encoder.encode("4"), end, stop),
    ]


def test_order_and_form_of_tool_declarations_and_results() -> None:
    tool = {"function": {"name": "f", "parameters": {"b": 1, "a": "é"}}}
    call = {"id": "c", "function": {"name": "f", "arguments": {"y": 1, "x": "é"}}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "R", "tool_call_id": "c"},
    ]
    rendered = (
        chat_environment()
        .from_string(CHAT_TEMPLATE)
        .render(messages=messages, tools=[tool], reasoning_effort="none")
    )
    assert rendered == (
        "<|message_system|>tool_declare<|content_xml|>"
        '[{"description":"","name":"f","parameters":{"a":"é","b":1},"type":"function"}]'
        "<|end_message|><|message_system|><|content_text|>S<|end_message|>"
        "<|message_system|><|content_text|>Thinking effort level: 0.0<|end_message|>"
        "<|message_user|><|content_text|>U<|end_message|>"
        '<|message_model|>f<|content_invoke_tool_json|>{"name":"f","args":{"x":"é","y":1}}'
        "<|end_message|><|content_model_end_sampling|>"
        "<|message_tool|>f<|content_text|>R<|end_message|>"
    )


def test_arithmetic_is_right() -> None:
    signs = {"+": operator.add, "-": operator.sub}
    for seed in range(300):
        task = tasks.arithmetic(Random(seed))
        a, sign, b = re.fullmatch(r"(\d+)([+-])(\d+)", task.key).groups()
        assert sorted(re.findall(r"\d+", task.question)) == sorted([a, b])
        assert int(task.answer) == signs[sign](int(a), int(b)) >= 0


def test_reasoning_is_right() -> None:
    for seed in range(300):
        task = tasks.reasoning(Random(seed))
        numbers = [int(n) for n in re.findall(r"\d+", task.question)]
        if "list" in task.question:
            listed = task.question.split(": ")[1].rstrip("?").split(", ")
            assert task.answer == listed[numbers[0] - 1]
        elif "largest" in task.question or "smallest" in task.question:
            pick = max if "largest" in task.question else min
            assert int(task.answer) == pick(numbers)
        else:
            a, b, c = numbers
            assert int(task.answer) == a + b + (c if "together" in task.question else -c)
            for step in task.reasoning.rstrip(".").split(". "):
                left, right = step.split(" = ")
                x, sign, y = left.split()
                assert int(right) == (int(x) + int(y) if sign == "+" else int(x) - int(y))


def test_copies_and_tool_calls_are_right(encoder: tokenizer.TextEncoder) -> None:
    for seed in range(200):
        task = tasks.copy(Random(seed))
        assert task.question.endswith(task.answer)
        task = tasks.tool_call(Random(seed))
        call = json.loads(task.answer)
        (tool,) = [t["function"] for t in task.tools if t["function"]["name"] == call["name"]]
        assert 3 <= len(task.tools) <= 5
        assert sorted(call["args"]) == tool["parameters"]["required"]
        for name, value in call["args"].items():
            kind = {"integer": int, "string": str}[tool["parameters"]["properties"][name]["type"]]
            assert isinstance(value, kind)
            assert str(value) in task.question


def test_evaluation_is_complete_and_fits(evaluation: tuple[list[dict], frozenset[str]]) -> None:
    entries, taken = evaluation
    kinds = [entry["kind"] for entry in entries]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(
        [*tasks.GENERATORS, "passkey"], data.NUM_TASKS
    )
    assert len(taken) == len(entries)
    for entry in entries:
        assert len(entry["prompt"]) + len(entry["reply"]) <= data.CONTEXT
        if entry["kind"] == "passkey":
            assert (
                abs(entry["measured_distance"] - entry["distance"]) <= 0.05 * entry["distance"] + 20
            )


def test_evaluation_and_samples_are_the_same_every_time(
    encoder: tokenizer.TextEncoder, fill: data.Filler, evaluation: tuple[list[dict], frozenset[str]]
) -> None:
    assert data.evaluation(encoder, fill) == evaluation
    for kind in data.NUM_CHATS:
        first, second = (data.sample(kind, Random(7), fill, frozenset()) for _ in range(2))
        assert first == second


def test_training_has_no_evaluation_task() -> None:
    random = Random(3)
    taken = frozenset(f"arithmetic {a}{s}{b}" for a in range(10) for b in range(10) for s in "+-")
    keys = {tasks.fresh("arithmetic", random, taken).key for _ in range(300)}
    assert not {f"arithmetic {key}" for key in keys} & taken


def test_saved_documents_come_back(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    assert data.save(path, [([1, 6207], [1, 1]), ([5], [0])], [False, True]) == 3
    with np.load(path) as saved:
        assert saved["tokens"].tolist() == [1, 6207, 5]
        assert saved["tokens"].dtype == np.uint16
        assert saved["loss"].tolist() == [1, 1, 0]
        assert saved["starts"].tolist() == [0, 2]
        assert saved["is_chat"].tolist() == [0, 1]


def test_pages_become_text() -> None:
    page = "<head><title>no</title></head><p>a  <b>b</b>\n c &amp; d</p><pre>x\n  y</pre>"
    assert sources.tidy(sources.plain_text(page)) == "a b c & d\n\nx\n  y"


def test_a_missing_apt_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="apt-get is missing; build the data on Debian 12"):
        sources.load(tmp_path)
