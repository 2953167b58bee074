"""Engines of a tiny Inkling that read images and recordings, against transformers."""

import io
import wave
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.engines.tiny import inkling, tokenizer
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.errors import RequestError
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling
from inkrt.runtime.images.patches import folded
from inkrt.runtime.llm import LLM
from inkrt.runtime.media.encode import TowerInputs, encode
from inkrt.runtime.media.rows import FeatureRows, place_rows
from inkrt.runtime.sampling_params import SamplingParams

transformers = pytest.importorskip("transformers")

GREEDY = Sampling()
CHUNK = 12
IDS = tokenizer.special_ids(tokenizer.INKLING_AUDIO)
IMAGE, AUDIO = IDS[tokenizer.IMAGE_TOKEN], IDS[tokenizer.AUDIO_TOKEN]
MakeEngine = Callable[[int], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media") / "checkpoint"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inkling, "NUM_LAYERS", 3)  # two with a window, the second dense
        write_checkpoint(folder, model="inkling", seed=3, dtype="float32")
    return folder


@pytest.fixture(scope="module")
def make_engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeEngine:
    @cache
    def make(tp_size: int) -> Path:
        folder = tmp_path_factory.mktemp("engine") / "engine"
        options = BuildOptions(
            max_seq_len=150,
            max_verify_tokens=2,
            prefill_chunk=CHUNK,
            spec="none",
            tp_size=tp_size,
        )
        build_engine(checkpoint, folder, options)
        return folder

    return make


@pytest.fixture(scope="module")
def engine(make_engine: MakeEngine) -> Iterator[Engine]:
    with Engine.open(make_engine(1)) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return transformers.InklingForConditionalGeneration.from_pretrained(
        checkpoint,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    """Of 31 tiles: two images."""
    shape = (31, inkling.NUM_FRAMES, inkling.TILE_SIZE, inkling.TILE_SIZE, 3)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def levels() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(inkling.MEL_VOCAB, (17, inkling.MEL_BINS), generator=generator)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    """An image over several chunks, a recording, another image; text before, between, behind."""
    text = torch.randint(470, (30,), generator=torch.Generator().manual_seed(4)).tolist()
    return [
        *text[:5],
        *[IMAGE] * 29,
        *text[5:8],
        *[AUDIO] * 17,
        *text[8:9],
        IMAGE,
        IMAGE,
        *text[9:],
    ]


@pytest.fixture(scope="module")
def features(engine: Engine, prompt: list[int], pixels: Tensor, levels: Tensor) -> FeatureRows:
    vision, hearing = engine.config.towers
    nested = folded(pixels.numpy(), vision.processor.folds).reshape(31, -1)  # type: ignore[union-attr]
    images = [TowerInputs(n, {"pixels": x}) for n, x in ((29, nested[:29]), (2, nested[29:]))]
    sounds = [TowerInputs(17, {"levels": levels.int().numpy()})]
    rows = {
        "vision": encode(engine.executor, vision, images, inkling.TINY.hidden),
        "audio": encode(engine.executor, hearing, sounds, inkling.TINY.hidden),
    }
    return place_rows(prompt, rows, engine.config)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected(reference: Any, prompt: list[int], pixels: Tensor, levels: Tensor) -> Tensor:
    """Logits of every position."""
    with torch.inference_mode():
        mask = torch.ones(1, len(levels))
        logits: Tensor = reference(
            input_ids=torch.tensor([prompt]),
            pixel_values=pixels,
            audio_input_ids=levels[None],
            audio_input_ids_mask=mask,
        ).logits[0]
    return logits


def relative_error(ours: np.ndarray, theirs: Tensor) -> float:
    return float(np.linalg.norm(ours - theirs.numpy()) / np.linalg.norm(theirs.numpy()))


def test_towers_give_the_rows_of_transformers(
    reference: Any, features: FeatureRows, prompt: list[int], pixels: Tensor, levels: Tensor
) -> None:
    with torch.inference_mode():
        images = reference.model.vision_tower(pixel_values=pixels).pooler_output[:, 0]
        sounds = reference.model.audio_tower(levels[None]).last_hidden_state[0]
    kinds = np.array(prompt)[features.places]
    assert relative_error(features.rows[kinds == IMAGE], images) < 1e-6
    assert relative_error(features.rows[kinds == AUDIO], sounds) < 1e-6


def test_rows_of_towers_do_not_depend_on_steps(engine: Engine, levels: Tensor) -> None:
    """A step of 16 and one row more, and a step of 256."""
    tower = engine.config.towers[1]
    values = levels.int().numpy()
    assert [step.num_rows for step in tower.steps] == [16, 256]
    one = encode(engine.executor, tower, [TowerInputs(17, {"levels": values})], inkling.TINY.hidden)
    parts = [TowerInputs(len(x), {"levels": x}) for x in (values[:3], values[3:16])]
    two = encode(engine.executor, tower, parts, inkling.TINY.hidden)
    assert np.array_equal(one[:16], two)


# Chunks that end before, in and behind images; 1 and 2 would take decode and verify steps.
@pytest.mark.parametrize("chunk", [None, 2, 7])
def test_logits_with_images_and_audio(
    engine: Engine, prompt: list[int], features: FeatureRows, expected: Tensor, chunk: int | None
) -> None:
    with engine.session() as session:
        output = session.prefill(prompt, GREEDY, chunk=chunk, features=features)
    assert relative_error(output.logits[-1], expected[-1]) < 2e-6
    assert output.tokens[-1] == expected[-1].argmax()


def test_every_row_is_heard_where_it_stands(
    engine: Engine, prompt: list[int], features: FeatureRows, expected: Tensor
) -> None:
    """Logits at the end of each part; without features they are others."""
    for length in (6, 34, 37, 57):
        part = features.within(0, length)
        with engine.session() as session:
            logits = session.prefill(prompt[:length], GREEDY, features=part).logits[-1]
        assert relative_error(logits, expected[length - 1]) < 2e-6, length
        with engine.session() as session:
            without = session.prefill(prompt[:length], GREEDY).logits[-1]
        assert relative_error(without, expected[length - 1]) > 1e-2, length


def test_rollback_into_an_image_and_forks(
    engine: Engine, prompt: list[int], features: FeatureRows, expected: Tensor
) -> None:
    with engine.session() as session:
        session.prefill(prompt[:34], GREEDY, features=features.within(0, 34))
        session.rollback(27)
        session.prefill(prompt[27:50], GREEDY, features=features.within(27, 50))
        output = session.prefill(prompt[50:], GREEDY, features=features.within(50, len(prompt)))
    assert relative_error(output.logits[-1], expected[-1]) < 2e-6


def wav(samples: np.ndarray, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


def png(height: int, width: int) -> bytes:
    image = pytest.importorskip("PIL.Image")
    values = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    image.fromarray(values).save(file, "PNG")
    return file.getvalue()


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "image", "image": png(3, 4)},
            {"type": "audio", "audio": wav(np.arange(3000) % 700 * 40)},
            {"type": "text", "text": "What?"},
            {"type": "image", "image": png(1, 1)},
        ],
    },
]


@pytest.fixture(scope="module")
def answer(make_engine: MakeEngine) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of a prompt with files: its tokens, and those of the answer."""
    return ask(make_engine(1))


def ask(folder: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    with LLM(folder) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        output = llm.chat(MESSAGES, params)
        assert list(output.prompt_token_ids) == llm.prompt_tokens(MESSAGES)
        return output.prompt_token_ids, output.outputs[0].token_ids


def test_chat_has_the_formats_tokens(answer: Any, make_engine: MakeEngine) -> None:
    """One message for each part; 3 x 4 pixels are 2 x 3 tiles, of which the last column is none."""
    with LLM(make_engine(1)) as llm:
        tokenizer_ = llm.engine.tokenizer
    assert tokenizer_ is not None
    text = tokenizer_.decode(answer[0], skip_special_tokens=False)
    image, sound = tokenizer.IMAGE_TOKEN, tokenizer.AUDIO_TOKEN
    assert text == (
        "<|message_system|><|content_text|>Be brief.<|end_message|>"
        f"<|message_user|><|content_image|>{image * 6}<|end_message|>"
        f"<|message_user|><|content_audio_input|>{sound * 4}<|audio_end|><|end_message|>"
        "<|message_user|><|content_text|>What?<|end_message|>"
        f"<|message_user|><|content_image|>{image}<|end_message|>"
        "<|message_model|>"
    )


def test_the_answer_is_that_of_transformers(answer: Any, reference: Any) -> None:
    from transformers.models.inkling.feature_extraction_inkling import InklingFeatureExtractor

    images = pytest.importorskip("PIL.Image")
    tiles = []
    for part in (MESSAGES[1]["content"][i] for i in (0, 3)):  # type: ignore[index]
        with images.open(io.BytesIO(part["image"])) as opened:  # type: ignore[index]
            tiles += tiles_of(np.asarray(opened))
    extractor = InklingFeatureExtractor(feature_size=inkling.MEL_BINS)
    samples = (np.arange(3000) % 700 * 40 / 32768).astype(np.float32)
    logs = extractor(samples, sampling_rate=16_000)["input_features"]
    even = torch.linspace(-7, 2, inkling.MEL_VOCAB, dtype=torch.float64).float()
    levels = (logs.clamp(-7, 2).unsqueeze(-1) - even).abs().argmin(-1)
    tokens, answered = list(answer[0]), []
    for _ in answer[1]:
        with torch.inference_mode():
            logits = reference(
                input_ids=torch.tensor([tokens]),
                pixel_values=torch.tensor(np.stack(tiles), dtype=torch.float32),
                audio_input_ids=levels,
                audio_input_ids_mask=torch.ones(levels.shape[:2]),
            ).logits
        answered.append(int(logits[0, -1].argmax()))
        tokens.append(answered[-1])
    assert tuple(answered) == answer[1]


def tiles_of(image: np.ndarray) -> list[np.ndarray]:
    """Tiles [frames, 2, 2, 3] of an image [H, W, 3], written out pixel by pixel."""
    mean = np.array([0.48145466, 0.4578275, 0.40821073]) * 255
    std = np.array([0.26862954, 0.26130258, 0.27577711]) * 255
    height, width, _ = image.shape
    tiles = []
    for row in range(-(-height // 2)):
        for column in range(width // 2 + 1):
            tile = np.full((2, 2, 3), -1.0)
            for y in range(2):
                for x in range(2):
                    if 2 * row + y < height and 2 * column + x < width:
                        tile[y, x] = image[2 * row + y, 2 * column + x]
            tiles.append(np.stack([(tile - mean) / std] * 2))
    return tiles


def test_two_ranks_give_the_same_tokens(answer: Any, make_engine: MakeEngine) -> None:
    assert ask(make_engine(2)) == answer


def test_generate_takes_the_same(answer: Any, make_engine: MakeEngine) -> None:
    """With all placeholders, with one for each, and as files in front of a text."""
    parts = MESSAGES[1]["content"]
    media: dict[str, Any] = {
        "images": [parts[0]["image"], parts[3]["image"]],  # type: ignore[index]
        "audio": [parts[1]["audio"]],  # type: ignore[index]
    }
    tokens = list(answer[0])
    first = tokens.index(IMAGE)
    one_each = [x for i, x in enumerate(tokens) if x not in (IMAGE, AUDIO) or x != tokens[i - 1]]
    assert len(one_each) == len(tokens) - 5 - 3
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(make_engine(1)) as llm:
        prompts = [{"prompt_token_ids": ids, **media} for ids in (tokens, one_each)]
        outputs = llm.generate([*prompts, {"prompt": "What?", **media}], params)
        assert [x.outputs[0].token_ids for x in outputs[:2]] == [answer[1]] * 2
        assert list(outputs[1].prompt_token_ids) == tokens
        assert outputs[2].prompt_token_ids[:7] == (IDS["<|content_image|>"], *[IMAGE] * 6)
        for change, message in (
            ({"prompt_token_ids": tokens[: first + 3]}, "images are 2 of 7 tokens together, but "),
            ({"images": [b"x"]}, "images[0] is no image of a format that is read"),
            ({"audio": [b"RIFF"]}, "audio[0] is damaged or of no format that is read"),
            ({"audio": wav(np.zeros(3))}, "audio is of type bytes, it must be a list"),
            ({"images": [(1, 2)]}, "images[0] is of type tuple, it must be bytes or a path"),
        ):
            with pytest.raises(RequestError) as caught:
                llm.generate([{**prompts[0], **change}], params)
            assert str(caught.value).startswith(f"prompts[0]: {message}")
