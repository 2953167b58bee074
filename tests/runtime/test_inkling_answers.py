"""Answers of the Inkling family: what is read of them, however their tokens are grouped."""

import itertools
import json

import pytest
from answers import Read, encode, read, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from inkrt import SamplingParams
from inkrt.runtime.answer.inkling import MARKERS, OTHER_TEXT, OTHERS
from inkrt.runtime.tokenizer import REPLACEMENT, Tokenizer

MODEL, TEXT, THINKING, CALL, END, END_SAMPLING = MARKERS
WORDS = st.text(max_size=8)
TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]
ARGUMENTS = '{"city": "Zü\\"rich}", "deep": {"a": [1, {"b": "]"}]}, "☃": "🎉"}'
CALLED = f'{MODEL}get_weather{CALL}{{"name":"get_weather","args":{ARGUMENTS}}}{END}'
THOUGHT = f"{THINKING}the quick brown fox \n{END}"
SAID = f"{MODEL}{TEXT}hello 👩‍👩‍👧 world{END}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("inkling") / "tokenizer.json"
    write_tokenizer(path, (*MARKERS, *OTHER_TEXT, *OTHERS))
    return Tokenizer(path)


CASES = {
    "text alone": (f"{TEXT}hello{END}{END_SAMPLING}", Read(content="hello", end="stop")),
    "its own header": (f"{MODEL}{TEXT}hello{END}{END_SAMPLING}", Read(content="hello", end="stop")),
    "reasoning, text": (
        THOUGHT + SAID + END_SAMPLING,
        Read("the quick brown fox", "hello 👩‍👩‍👧 world", end="stop"),
    ),
    "reasoning, call": (
        THOUGHT + CALLED + END_SAMPLING,
        Read("the quick brown fox", calls=[["get_weather", ARGUMENTS]], end="tool_calls"),
    ),
    "text between and behind calls": (
        f"{TEXT} \n{END}{CALLED}{SAID}{CALLED}{MODEL}{TEXT} there{END}{END_SAMPLING}",
        Read(
            content="hello 👩‍👩‍👧 world there",
            calls=[["get_weather", ARGUMENTS]] * 2,
            end="tool_calls",
        ),
    ),
    "no arguments": (
        f'{CALL}{{"name": "f"}}{END}{END_SAMPLING}',
        Read(calls=[["f", "{}"]], end="tool_calls"),
    ),
    "arguments first": (
        f'{CALL}{{"parameters": {{"a":1}}, "name":"f\\n"}}{END}{END_SAMPLING}',
        Read(calls=[["f\n", '{"a":1}']], end="tool_calls"),
    ),
    "arguments that are no object": (
        f'{CALL}{{"name":"f","args":[1]}}{END}{SAID}{END_SAMPLING}',
        Read(content="hello 👩‍👩‍👧 world", end="stop"),
    ),
    "no call at all": (f"{CALL}hello{END}{END_SAMPLING}", Read(end="stop")),
    "no name": (f'{CALL}{{"args":{{}}}}{END}{END_SAMPLING}', Read(end="stop")),
    "a header that was the answer": (
        f"hello{END}{END_SAMPLING}",
        Read(content="hello", end="stop"),
    ),
    "thinking twice": (
        f"{THINKING}a{THINKING}b{END}{MODEL}{THINKING}c{END}{SAID}{END_SAMPLING}",
        Read("abc", "hello 👩‍👩‍👧 world", end="stop"),
    ),
    "white space alone": (f"{TEXT} \n {END}{END_SAMPLING}", Read(content=" \n ", end="stop")),
}


@pytest.mark.parametrize("name", CASES)
def test_however_the_tokens_are_grouped(tokenizer: Tokenizer, name: str) -> None:
    text, expected = CASES[name]
    ids = encode(tokenizer, text)
    for size in range(1, 9):
        found = read(tokenizer, ids, itertools.repeat(size), tools=TOOLS)
        assert (found.reasoning, found.content, found.calls, found.end) == (
            expected.reasoning,
            expected.content,
            expected.calls,
            expected.end,
        )
        assert found.num_tokens == len(ids)
    for cut in range(1, len(ids)):
        again = read(tokenizer, ids, (cut, len(ids)), tools=TOOLS)
        assert again == found


def test_reasoning_is_counted_without_markers(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, THOUGHT + SAID + END_SAMPLING)
    thought = len(tokenizer.encode("the quick brown fox \n"))
    assert read(tokenizer, ids, itertools.repeat(3)).num_reasoning == thought


def test_an_answer_cut_short(tokenizer: Tokenizer) -> None:
    """By its length: what had come of a call, in what state ever it was."""
    ids = encode(tokenizer, THOUGHT + CALLED)
    for length in range(1, len(ids)):
        found = read(tokenizer, ids[:length], itertools.repeat(2), tools=TOOLS, finish="length")
        assert found.end == "length"
        assert "the quick brown fox".startswith(found.reasoning)
        assert found.content == ""
        # A character that was cut is one that nobody knows, as in all text.
        assert all(ARGUMENTS.startswith(call[1].rstrip(REPLACEMENT)) for call in found.calls)


def test_an_answer_without_markers_is_shown(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "hello there")
    assert read(tokenizer, ids, (3, 99), tools=TOOLS, finish="length").content == "hello there"
    assert read(tokenizer, ids[:1], (9,), finish="length").content == tokenizer.decode(ids[:1])


def test_the_prompt_says_where_an_answer_begins(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, f"hello{END}{MODEL}{TEXT}there{END}{END_SAMPLING}")
    for head, expected in ((THINKING, ("hello", "there")), (TEXT, ("", "hellothere"))):
        prompt = encode(tokenizer, f"{MODEL}{head}")
        found = read(tokenizer, ids, itertools.repeat(1), prompt=prompt)
        assert (found.reasoning, found.content) == expected


def test_calls_that_are_not_allowed_are_dropped(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, SAID + CALLED + END_SAMPLING)
    found = read(tokenizer, ids, itertools.repeat(1))
    assert (found.content, found.calls, found.end) == ("hello 👩‍👩‍👧 world", [], "stop")


def test_one_call_where_only_one_is_wanted(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, CALLED + CALLED + END_SAMPLING)
    for size in range(1, 9):
        found = read(tokenizer, ids, itertools.repeat(size), tools=TOOLS, single_call=True)
        assert (found.calls, found.end) == ([["get_weather", ARGUMENTS]], "tool_calls")
        assert found.num_tokens == len(encode(tokenizer, CALLED))


def test_stop_strings_end_text_not_reasoning(tokenizer: Tokenizer) -> None:
    """At every place of a delta; tokens behind the match are not counted."""
    ids = encode(tokenizer, f"{THINKING}over there{END}{MODEL}{TEXT}hello there, hello{END}")
    num_expected = len(encode(tokenizer, f"{THINKING}over there{END}{MODEL}{TEXT}hello there"))
    for include in (False, True):
        params = SamplingParams(stop=["there"], include_stop_str_in_output=include)
        for size in range(1, 9):
            found = read(tokenizer, ids, itertools.repeat(size), params=params)
            assert found.reasoning == "over there"
            assert found.content == ("hello there" if include else "hello ")
            assert (found.end, found.stop_reason) == ("stop", "there")
            assert found.num_tokens == num_expected
    early = SamplingParams(stop=["there"], min_tokens=num_expected)
    assert read(tokenizer, ids, itertools.repeat(1), params=early).stop_reason is None


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_marker_is_ever_shown(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Whatever tokens come, and the same however they are grouped."""
    words = [*MARKERS, *OTHER_TEXT, *OTHERS, "hello", "{", '"name"', ":", '"f"', ',"args":{', "}"]
    ids = encode(tokenizer, "".join(data.draw(st.lists(st.sampled_from(words), min_size=1))))
    one = read(tokenizer, ids, itertools.repeat(1), tools=TOOLS)
    sizes = data.draw(st.lists(st.integers(1, 8), min_size=len(ids), max_size=len(ids)))
    assert read(tokenizer, ids, sizes, tools=TOOLS) == one
    shown = one.reasoning + one.content + "".join(map("".join, one.calls))
    assert not any(marker in shown for marker in (*MARKERS, *OTHER_TEXT, *OTHERS))


@settings(max_examples=40, deadline=None)
@given(
    arguments=st.dictionaries(
        WORDS,
        st.recursive(
            st.none() | st.booleans() | st.integers() | WORDS,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
            max_leaves=6,
        ),
        max_size=3,
    ),
    name=st.text(min_size=1, max_size=8),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_any_call_is_given_to_the_character(
    tokenizer: Tokenizer, arguments: dict[str, object], name: str, ascii_only: bool, indent: None
) -> None:
    body = json.dumps({"name": name, "args": arguments}, ensure_ascii=ascii_only, indent=indent)
    ids = [
        tokenizer.special_ids[CALL],
        *tokenizer.encode(body),
        tokenizer.special_ids[END],
        tokenizer.special_ids[END_SAMPLING],
    ]
    ((found_name, found),) = read(tokenizer, ids, itertools.repeat(2), tools=TOOLS).calls
    assert (found_name, json.loads(found)) == (name, arguments)
    assert found in body
