"""Placeholders and feature rows: every row at its token, or one clear line."""

from collections.abc import Mapping

import numpy as np
import pytest
from fake import make_config

from inkrt.errors import RequestError
from inkrt.runtime.media.prompt import AUDIO_END, expand, in_front
from inkrt.runtime.media.rows import FeatureRows, check_features, place_rows
from inkrt.runtime.tower_spec import Dmel, InklingTiles, TowerSpec, TowerStepSpec

IMAGE, IMAGE_MARK, AUDIO, AUDIO_MARK, END = 300, 301, 302, 303, 304
STEPS = (TowerStepSpec(4, {}),)
VISION = TowerSpec("vision", IMAGE, IMAGE_MARK, STEPS, True, InklingTiles(2, 1, (2,)))
HEARING = TowerSpec("audio", AUDIO, AUDIO_MARK, STEPS, True, Dmel(3, 4, 0.0, 1.0))
CONFIG = make_config(towers=(VISION, HEARING))
SPECIAL = {AUDIO_END: END}


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        # One placeholder for each.
        (
            [IMAGE_MARK, IMAGE, 5, IMAGE, 6, AUDIO, END],
            [IMAGE_MARK, IMAGE, IMAGE, 5, IMAGE, IMAGE, IMAGE, 6, AUDIO, AUDIO, END],
        ),
        # All of them.
        (
            [5, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, AUDIO, AUDIO, 6],
            [5, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, AUDIO, AUDIO, 6],
        ),
        # Markers alone; a recording gets its end.
        (
            [IMAGE_MARK, 5, IMAGE_MARK, AUDIO_MARK, 6],
            [
                *(IMAGE_MARK, IMAGE, IMAGE, 5, IMAGE_MARK, IMAGE, IMAGE, IMAGE),
                *(AUDIO_MARK, AUDIO, AUDIO, END, 6),
            ],
        ),
        ([IMAGE, IMAGE, AUDIO_MARK, END], [*[IMAGE] * 5, AUDIO_MARK, AUDIO, AUDIO, END]),
    ],
)
def test_placeholders_become_as_many_as_rows(tokens: list[int], expected: list[int]) -> None:
    assert expand(tokens, {"vision": [2, 3], "audio": [2]}, CONFIG, SPECIAL) == expected


def test_text_stands_behind_everything() -> None:
    counts: Mapping = {"vision": [2], "audio": [1]}
    expected = [IMAGE_MARK, IMAGE, IMAGE, AUDIO_MARK, AUDIO, END, 7, 8]
    assert in_front([7, 8], counts, CONFIG, SPECIAL) == expected
    assert in_front([7], {}, CONFIG, {}) == [7]


@pytest.mark.parametrize(
    ("tokens", "counts", "message"),
    [
        (
            [IMAGE, 5, IMAGE],
            {"vision": [2, 3, 4]},
            "images are 3 of 9 tokens together, but the prompt has 2 placeholders (token 300); "
            "give one for each of the images, or one for each token of theirs",
        ),
        ([5], {"audio": [2]}, "audio are 1 of 2 tokens together, but the prompt has 0"),
        ([5, IMAGE], {}, "images are 0 of 0 tokens together, but the prompt has 1 placeholders"),
        ([IMAGE_MARK], {"vision": [1, 1]}, "images are 2 of 2 tokens together, but the prompt has"),
    ],
)
def test_other_counts_are_refused(tokens: list[int], counts: Mapping, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        expand(tokens, counts, CONFIG, SPECIAL)
    assert str(caught.value).startswith(message)


def test_rows_go_to_their_tokens_in_order() -> None:
    tokens = [5, AUDIO, IMAGE, IMAGE, 6, AUDIO, IMAGE]
    images, sounds = np.array([[1.0], [2.0], [3.0]]), np.array([[10.0], [20.0]])
    placed = place_rows(tokens, {"vision": images, "audio": sounds}, CONFIG)
    assert placed.places.tolist() == [1, 2, 3, 5, 6]
    assert placed.rows[:, 0].tolist() == [10.0, 1.0, 2.0, 20.0, 3.0]
    for start, stop, places, rows in (
        (0, 7, [1, 2, 3, 5, 6], [10.0, 1.0, 2.0, 20.0, 3.0]),
        (2, 4, [0, 1], [1.0, 2.0]),
        (3, 6, [0, 2], [2.0, 20.0]),
    ):
        part = placed.within(start, stop)
        assert part is not None
        assert (part.places.tolist(), part.rows[:, 0].tolist()) == (places, rows)
    assert placed.within(4, 5) is None
    assert placed.within(0, 1) is None
    # Placeholders of a kind that nothing is given for keep their embeddings.
    assert place_rows(tokens, {"audio": sounds}, CONFIG).places.tolist() == [1, 5]
    assert len(place_rows(tokens, {}, CONFIG).places) == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [[1.0]],
            "images have 1 feature rows, but the prompt has 2 placeholders (token 300); give one "
            "placeholder for each row",
        ),
        ([[1.0]] * 3, "images have 3 feature rows, but the prompt has 2 placeholders"),
        ([[1.0, 2.0]] * 2, "images have features of shape [2, 2], they must be [rows, 1]"),
        ([1.0, 2.0], "images have features of shape [2], they must be [rows, 1]"),
        ([[1.0], [float("inf")]], "images have features that are not finite"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: list, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        place_rows([IMAGE, 5, IMAGE], {"vision": np.array(rows)}, CONFIG)
    assert str(caught.value).startswith(message)
    assert caught.value.param == "images"


def test_an_engine_without_a_tower_says_so() -> None:
    with pytest.raises(RequestError, match="audio cannot be read, this engine has no audio tower"):
        place_rows([5], {"audio": np.zeros((0, 1))}, make_config(towers=(VISION,)))
    rows = FeatureRows(np.array([0]), np.zeros((1, 1), np.float32))
    with pytest.raises(RequestError, match="features cannot be read, this engine was built"):
        check_features(rows, 3, make_config())


@pytest.mark.parametrize(
    ("places", "shape", "message"),
    [
        ([0, 1], (3, 1), "features of 2 tokens have rows of shape [3, 1], they must be [2, 1]"),
        ([1, 0], (2, 1), "features have places that are not ascending indices of the 3 tokens"),
        ([1, 1], (2, 1), "features have places that are not ascending"),
        ([1, 3], (2, 1), "features have places that are not ascending"),
        ([-1, 1], (2, 1), "features have places that are not ascending"),
    ],
)
def test_rows_of_other_tokens_are_refused(
    places: list[int], shape: tuple[int, int], message: str
) -> None:
    rows = FeatureRows(np.array(places), np.zeros(shape, np.float32))
    with pytest.raises(RequestError) as caught:
        check_features(rows, 3, CONFIG)
    assert str(caught.value).startswith(message)
    assert caught.value.param == "features"
