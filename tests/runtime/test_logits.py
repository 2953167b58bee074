"""The logits processor against token-by-token float64, and what it refuses."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake import EOS, NUM_EMBEDDINGS, VOCAB, make_config, make_tokenizer
from logits_oracle import process_row
from numpy.typing import NDArray

from inkrt.errors import RequestError
from inkrt.runtime.executor import Sampling
from inkrt.runtime.generation import check_request
from inkrt.runtime.logits import LogitsProcessor, draw_rows, require_choice
from inkrt.runtime.sampling import draw
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.tokenizer import Tokenizer

STOP = 6
SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.01},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -2.0, "presence_penalty": 2.0},
    {"presence_penalty": -0.3},
    {"logit_bias": {0: 100.0, 3: -100.0, VOCAB - 1: 0.5}},
    {"allowed_token_ids": [1, 2, 2, 17, VOCAB - 1]},
    {"bad_words": [[9], [3, 4], [3, 5], [2, 3, 4], [3, 3, 3, 3]]},
    {"min_tokens": 7},
    {"min_tokens": 7, "ignore_eos": True},
    {
        "repetition_penalty": 100.0,
        "frequency_penalty": 1.5,
        "presence_penalty": -1.0,
        "logit_bias": {token: token / 40 - 5 for token in range(VOCAB)},
        "allowed_token_ids": list(range(0, VOCAB, 3)),
        "bad_words": [[6], [3, 9], [2, 3, 6]],
        "min_tokens": 12,
    },
]


def make(num_prompt: int = 0, **params: Any) -> LogitsProcessor:
    checked = SamplingParams(stop_token_ids=[STOP, 10**9], **params)
    processor = LogitsProcessor.make(checked, num_prompt, make_config(), None)
    assert processor is not None
    return processor


def random_rows(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    rows = rng.normal(scale=4, size=(count, VOCAB)).astype(np.float32)
    rows[:, ::7] = 0.0  # neither positive nor negative
    return rows


@pytest.mark.parametrize("params", SETTINGS, ids="+".join)
def test_rows_of_growing_timelines_and_wrong_drafts(params: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    choose = random.Random(2)
    prompt = [3, 3, 8, 2, NUM_EMBEDDINGS - 1, 3]  # one of them has no logit
    processor = make(len(prompt), **params)
    ends = [STOP] if params.get("ignore_eos") else [STOP, EOS]
    words = params.get("bad_words", [])
    output: list[int] = []
    while len(output) < 30:
        # Few tokens, so that counts grow and bad words begin; drafts may have no logit either.
        drafts = [choose.choice([2, 3, 3, 4, 5, 9, VOCAB]) for _ in range(choose.randrange(8))]
        logits = random_rows(rng, len(drafts) + 1)
        before = logits.copy()
        rows = processor.process(logits, [*prompt, *output], drafts)
        assert rows.dtype == np.float32
        assert np.array_equal(logits, before)
        for i, row in enumerate(rows):
            seen = [*output, *drafts[:i]]
            expected = process_row(logits[i].tolist(), prompt, seen, params, ends, words)
            np.testing.assert_allclose(row, expected, rtol=2e-6, atol=2e-6)
        output += [choose.choice([2, 3, 4, 5]) for _ in range(choose.randrange(1, 4))]


def test_an_infinite_or_undefined_logit_stays_what_it_is() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [2, 3, 4]] = np.nan, np.inf, -np.inf
    processor = make(1, repetition_penalty=2.0, frequency_penalty=1.0, logit_bias={2: 1.0, 4: 9})
    row = processor.process(logits, [2, 2, 3, 4])[0]
    assert np.isnan(row[2])
    assert (row[3], row[4]) == (np.inf, -np.inf)


def test_a_bad_word_needs_its_beginning_in_the_output() -> None:
    processor = make(2, bad_words=[[7, 8], [1, 7, 9]])
    logits = np.zeros((3, VOCAB), np.float32)
    # The prompt ends with 7, which was not generated; then it is drafted, and 1 before it.
    rows = processor.process(logits, [5, 7], [1, 7])
    assert [np.flatnonzero(np.isneginf(row)).tolist() for row in rows] == [[], [], [8, 9]]
    rows = processor.process(logits[:1], [5, 7, 1, 7])
    assert np.flatnonzero(np.isneginf(rows[0])).tolist() == [8, 9]
    rows = processor.process(logits[:2], [5, 7, 1, 7, 3], [7])
    assert [np.flatnonzero(np.isneginf(row)).tolist() for row in rows] == [[], [8]]


def test_a_text_is_banned_with_and_without_a_space_before_it(tmp_path: Path) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    lengths = set()
    for word in ("hello", " hello", "wor", "café", "zebra"):
        processor = LogitsProcessor.make(
            SamplingParams(bad_words=[word]), 1, make_config(), tokenizer
        )
        assert processor is not None
        bare = word.lstrip()
        sequences = [tokenizer.encode(bare), tokenizer.encode(" " + bare)]
        assert sequences[0] != sequences[1]
        for *beginning, last in sequences:
            logits = np.zeros((len(beginning) + 1, VOCAB), np.float32)
            rows = processor.process(logits, [1], beginning)
            assert rows[-1, last] == -np.inf
            singles = sorted(tokens[0] for tokens in sequences if len(tokens) == 1)
            assert np.flatnonzero(np.isneginf(rows[0])).tolist() == singles
        lengths.update(len(tokens) for tokens in sequences)
    assert lengths > {1, 2}


def test_requests_without_processing_have_no_processor() -> None:
    params = SamplingParams(temperature=0.5, stop_token_ids=[3], max_tokens=4, stop="x", seed=1)
    assert LogitsProcessor.make(params, 3, make_config(), None) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_are_drawn_up_to_the_first_wrong_draft(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, top_k=9, seed=5)
    logits = random_rows(np.random.default_rng(3), 5)
    timeline = [4, 5, 6]
    drawn = [int(draw(row, sampling, 3 + i)) for i, row in enumerate(logits)]
    for right in range(5):
        drafts = [*drawn[:right], *[token ^ 1 for token in drawn[right:4]]]
        processor = make(3, logit_bias={0: 0.0})
        got = draw_rows(logits, processor, sampling, timeline, drafts)
        assert got == drawn[: right + 1]
        # Nothing of the wrong drafts was kept.
        assert draw_rows(logits[:1], processor, sampling, timeline) == drawn[:1]


def test_a_row_without_any_token() -> None:
    processor = make(1, allowed_token_ids=[7], bad_words=[[7, 7, 7]])
    logits = np.zeros((3, VOCAB), np.float32)
    # It ends the row of drafts behind it, and raises once it is the next token's.
    assert draw_rows(logits, processor, Sampling(), [5], [7, 7]) == [7, 7]
    with pytest.raises(RequestError) as caught:
        draw_rows(logits[:1], processor, Sampling(), [5, 7, 7])
    assert str(caught.value) == (
        "no token may come next: allowed_token_ids, bad_words, min_tokens, stop_token_ids and "
        "grammar ban all that the model can generate; ban less"
    )
    # A row behind a wrong draft is never drawn from.
    assert draw_rows(logits, processor, Sampling(), [5, 7], [3, 7]) == [7]
    require_choice(np.array([-np.inf, np.nan], np.float32))
    require_choice(np.array([-np.inf, -3e38], np.float32))


@pytest.mark.parametrize(
    ("params", "param", "message"),
    [
        (
            {"logit_bias": {VOCAB: 1.0}},
            "logit_bias",
            "logit_bias has token id 400, this model generates ids 0..399",
        ),
        (
            {"logit_bias": dict.fromkeys(range(10**5), 1.0)},
            "logit_bias",
            "logit_bias has token id 400, this model generates ids 0..399",
        ),
        (
            {"allowed_token_ids": [3, 10**5000]},
            "allowed_token_ids",
            "allowed_token_ids has token id 2**64 or more, this model generates ids 0..399",
        ),
        (
            {"bad_words": [[1, 2], [VOCAB + 5, 2]]},
            "bad_words",
            "bad_words has token id 405, this model generates ids 0..399",
        ),
        (
            {"bad_words": [[1, 2], "oh"]},
            "bad_words",
            "bad words as text need a tokenizer, but the engine has no tokenizer.json; give lists "
            "of token ids",
        ),
    ],
    ids=["bias", "huge bias", "allowed", "bad ids", "bad text"],
)
def test_requests_that_the_engine_cannot_serve(
    params: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        check_request([1], SamplingParams(**params), make_config(), has_tokenizer=False)
    assert (str(caught.value), caught.value.param) == (message, param)
