"""StopMatcher against str.find on the whole text."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inkrt.runtime.stop import StopMatcher

TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_match=include)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.flush(), matcher.matched


@settings(max_examples=500, deadline=None)
@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30)), include=st.booleans())
def test_equals_find_on_the_whole_text(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    places = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if places:
        end, _, stop = min(places)
        expected = (text[: end if include else end - len(stop)], stop)
    else:
        expected = (text, None)
    assert run(pieces, stops, include) == expected


@settings(max_examples=300, deadline=None)
@given(text=TEXT, stops=STOPS)
def test_holds_back_no_more_than_a_possible_beginning(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    given_out = ""
    for i, character in enumerate(text):
        given_out += matcher.push(character)
        if matcher.matched is not None:
            break
        held = text[len(given_out) : i + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcd", ["abce", "bc"], ("a", "bc")),
        ("abcd", ["c", "abc"], ("", "abc")),
        ("aab", ["ab"], ("a", "ab")),
        ("x\n\ny", ["\n\n", "\n"], ("x", "\n")),
    ],
)
def test_the_first_complete_match_wins_then_the_longest(
    text: str, stops: list[str], expected: tuple[str, str]
) -> None:
    assert run(list(text), stops, include=False) == expected
    assert run([text], stops, include=False) == expected


def test_nothing_comes_out_after_a_match() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("one EN") == "one "
    assert matcher.push("D two") == ""
    assert matcher.push("three") == ""
    assert matcher.flush() == ""
    assert matcher.matched == "END"
