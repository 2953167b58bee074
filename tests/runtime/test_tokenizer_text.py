"""Text to ids and back: markers in user text, characters across tokens."""

from pathlib import Path

import pytest
import tokenizers
from fake import ASSISTANT, CORPUS, END, EOS, SPECIAL, USER, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from inkrt.errors import EngineFormatError, RequestError
from inkrt.runtime.tokenizer import IncrementalDecoder, Tokenizer

THINK = 330


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    make_tokenizer().save(str(path))
    return Tokenizer(path)


def test_special_ids_by_name(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_ids == {**{s: i for i, s in enumerate(SPECIAL)}, "<think>": THINK}


@pytest.mark.parametrize("marker", [*SPECIAL, "<think>"])
def test_markers_in_text_are_text_unless_asked_for(tokenizer: Tokenizer, marker: str) -> None:
    text = f"hello{marker} world"
    parsed = tokenizer.encode(text, parse_special=True)
    plain = tokenizer.encode(text)
    assert parsed.count(tokenizer.special_ids[marker]) == 1
    assert not set(plain) & set(tokenizer.special_ids.values())
    assert tokenizer.decode(plain) == tokenizer.decode(plain, skip_special_tokens=False) == text
    assert tokenizer.encode(text, parse_special=True) == parsed  # neither call changes the other


def test_same_ids_as_the_library(tokenizer: Tokenizer) -> None:
    library = make_tokenizer()
    for text in [*CORPUS, "a<|user|>b<think>c", ""]:
        ids = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, parse_special=True) == ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == library.decode(
                ids, skip_special_tokens=skip
            )


def test_split_special(tokenizer: Tokenizer) -> None:
    text = "<|user|>你好 <think>🎉<|end|><|eos|>x"
    assert tokenizer.split_special(text) == [USER, "你好 ", THINK, "🎉", END, EOS, "x"]
    assert tokenizer.split_special("no marker") == ["no marker"]
    assert tokenizer.split_special("") == []


def test_decode_ignores_unknown_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello")
    assert tokenizer.decode([399, *ids, 405]) == "hello"


def test_a_damaged_file_is_an_engine_format_error(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for content in ("{", "{}", '{"added_tokens": [{}]}', "[]"):
        path.write_text(content)
        with pytest.raises(EngineFormatError, match=r"cannot read .*tokenizer\.json: "):
            Tokenizer(path)


def test_text_that_is_not_unicode(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError) as caught:
        tokenizer.encode("a\ud800b")
    assert str(caught.value) == "a text holds an unpaired surrogate, it must be valid Unicode"


def check_increments(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    given_out = ""
    for i, token in enumerate(ids):
        given_out += decoder.push(token)
        assert whole.startswith(given_out)
        # What is held back is at most what does not end in a whole character yet.
        now = tokenizer.decode(ids[: i + 1], skip_special_tokens=skip)
        assert given_out == now.rstrip("\ufffd") or now.startswith(given_out)
        if not now.endswith("\ufffd"):
            assert given_out == now
    assert given_out + decoder.flush() == whole
    assert decoder.flush() == ""


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=20), skip=st.booleans())
def test_increments_of_text(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    check_increments(tokenizer, tokenizer.encode(text + CORPUS[len(text) % 3]), skip)


@settings(max_examples=500, deadline=None)
@given(ids=st.lists(st.integers(0, 345), max_size=40), skip=st.booleans())
def test_increments_of_garbage(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    check_increments(tokenizer, ids, skip)


def test_increments_where_the_first_token_decodes_differently(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1}, unk_token="▁one"))
    library.decoder = decoders.Metaspace()  # drops the space before the first word
    library.save(str(tmp_path / "tokenizer.json"))
    decoder = IncrementalDecoder(Tokenizer(tmp_path / "tokenizer.json"))
    assert [decoder.push(token) for token in (0, 1, 1, 0)] == ["one", " two", " two", " one"]


def test_no_part_of_a_character_comes_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x𝄞y")
    assert len(ids) == 6  # the character is four tokens of one byte
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(token) for token in ids] == ["x", "", "", "", "𝄞", "y"]


def test_flush_gives_out_an_unfinished_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x𝄞")[:-1]
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(token) for token in ids] == ["x", "", "", ""]
    assert decoder.flush() == "\ufffd"


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("hi"), ASSISTANT, THINK]
    for skip, expected in ((True, "hi<think>"), (False, "hi<|assistant|><think>")):
        decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
        assert "".join(decoder.push(token) for token in ids) + decoder.flush() == expected
