"""Answers in the markup of GLM-4.7: what is read of them, however their tokens are grouped."""

import itertools
import json
from typing import Any

import pytest
from answers import encode, read, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from inkrt.runtime.answer.coerce import coerce
from inkrt.runtime.answer.glm import MARKERS, TURNS
from inkrt.runtime.tokenizer import Tokenizer

THINK, END_THINK, CALL, END_CALL = MARKERS
HARD = 'a</arg_<b>&quot; quote: " \\ 🎉'
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "items": {"type": ["array", "null"]},
                }
            },
        },
    },
    {"type": "function", "function": {"name": "g"}},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("glm") / "tokenizer.json"
    write_tokenizer(path, (*MARKERS[1:], *TURNS))  # the fake one has <think>
    return Tokenizer(path)


def pair(key: str, value: str) -> str:
    return f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"


CASES: dict[str, tuple[str, str, str, list[tuple[str, object]]]] = {
    "reasoning, text": (f"hello \n{END_THINK}there 🎉", "hello", "there 🎉", []),
    "reasoning, call": (
        f"hello{CALL}f{pair('text', ' 12 ')}{pair('count', '12')}{END_CALL}",
        "hello",
        "",
        [("f", {"text": " 12 ", "count": 12})],
    ),
    "space before a call": (
        f"{END_THINK}\n\n{CALL} f\n{pair(' items ', '[1, null]')}{END_CALL}{CALL}g{END_CALL}",
        "",
        "",
        [("f", {"items": [1, None]}), ("g", {})],
    ),
    "text and calls": (
        f"{END_THINK}over {CALL}f{pair('items', 'null')}{pair('other', '1')}{END_CALL}there",
        "",
        "over there",
        [("f", {"items": None, "other": "1"})],
    ),
    "an unknown call": (f"{END_THINK}{CALL}h{pair('a', '1')}{END_CALL}over", "", "over", []),
    "text like tags": (
        f"{END_THINK}</arg_value>{CALL}f{pair('text', HARD)}{END_CALL}",
        "",
        "</arg_value>",
        [("f", {"text": HARD})],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_however_the_tokens_are_grouped(tokenizer: Tokenizer, name: str) -> None:
    text, reasoning, content, calls = CASES[name]
    ids = [*encode(tokenizer, text), tokenizer.special_ids["<|user|>"]]
    prompt = encode(tokenizer, f"<|user|>hello<|assistant|>{THINK}")
    for size in range(1, 9):
        found = read(tokenizer, ids, itertools.repeat(size), prompt=prompt, tools=TOOLS)
        assert (found.reasoning, found.content) == (reasoning, content)
        assert [(name, json.loads(arguments)) for name, arguments in found.calls] == calls
        assert found.end == ("tool_calls" if calls else "stop")
    for cut in range(1, len(ids)):
        assert read(tokenizer, ids, (cut, len(ids)), prompt=prompt, tools=TOOLS) == found


def test_without_an_open_block_it_begins_with_text(tokenizer: Tokenizer) -> None:
    ids = [*encode(tokenizer, f"the{THINK}hello{END_THINK} fox"), 0]
    for prompt in (f"<|user|>{THINK}<|assistant|>", f"<|assistant|>{THINK}{END_THINK}"):
        found = read(tokenizer, ids, (len(ids),), prompt=encode(tokenizer, prompt))
        assert (found.reasoning, found.content) == ("hello", "the fox")


def test_what_a_cut_call_gives_is_json(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, f"{CALL}f{pair('text', 'hello world')}{pair('count', '12')}")
    for length in range(3, len(ids)):
        found = read(tokenizer, ids[:length], itertools.repeat(1), tools=TOOLS, finish="length")
        for _, arguments in found.calls:
            assert json.loads(arguments).keys() <= {"text", "count"}


@settings(max_examples=40, deadline=None)
@given(value=st.text(max_size=20).filter(lambda text: "</arg_value>" not in text))
def test_any_string_comes_through(tokenizer: Tokenizer, value: str) -> None:
    ids = [
        tokenizer.special_ids[CALL],
        *tokenizer.encode(f"f{pair('text', value)}"),
        tokenizer.special_ids[END_CALL],
        0,
    ]
    ((_, arguments),) = read(tokenizer, ids, itertools.repeat(1), tools=TOOLS).calls
    assert json.loads(arguments) == {"text": value}


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("12", {"type": "integer"}, 12),
        ("x", {"type": "integer"}, "x"),
        ("1.0", {"type": "number"}, 1),
        ("1.5", {"type": "float"}, 1.5),
        ("nan", {"type": "number"}, "nan"),
        ("True", {"type": "bool"}, True),
        ("0", {"type": "boolean"}, False),
        ("NULL", {"type": ["string", "null"]}, None),
        ('{"a": 1}', {"type": "dict"}, {"a": 1}),
        ("[NaN]", {"type": "array"}, "[NaN]"),
        ("7", {"anyOf": [{"type": "string"}, {"type": "int32"}]}, 7),
        ("7", {"enum": ["a", 7]}, 7),
        ("7", {}, "7"),
        ("7", None, "7"),
        ("[1]", {"type": "integer"}, [1]),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
    ],
)
def test_values_by_schema(text: str, schema: object, expected: object) -> None:
    found = coerce(text, schema)
    assert (type(found), found) == (type(expected), expected)
