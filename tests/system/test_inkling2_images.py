"""Engines of a tiny Inkling-2 and a looped one that read images, against transformers."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.engines.tiny import inkling2, inkling2_loop, tokenizer
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.errors import RequestError
from inkrt.runtime.llm import LLM
from inkrt.runtime.sampling_params import SamplingParams

transformers = pytest.importorskip("transformers")
images = pytest.importorskip("PIL.Image")

NUM_LAYERS = 2
SIDE = inkling2.VISION_PATCH * inkling2.VISION_MERGE
IMAGE = tokenizer.special_ids()[tokenizer.IMAGE_TOKEN]
PROMPT = [3, 4, IMAGE, 7, 8, 9, IMAGE, IMAGE, 11, 12]


def png(height: int, width: int) -> bytes:
    values = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    images.fromarray(values).save(file, "PNG")
    return file.getvalue()


# Tiles: 4 x 4, 1 and 2 x 2.
SIZES = ((3 * SIDE + 1, 4 * SIDE), (1, 1), (2 * SIDE, 2 * SIDE - 1))
FILES = [png(height, width) for height, width in SIZES]


def pixel_values(file: bytes) -> tuple[NDArray[np.float32], list[int]]:
    """Tiles [N, SIDE, SIDE, 3] of an image and their grid."""
    with images.open(io.BytesIO(file)) as opened:
        values = np.asarray(opened).astype(np.float32)
    rows, columns = (-(-size // SIDE) for size in values.shape[:2])
    canvas = np.full((rows * SIDE, columns * SIDE, 3), -1.0, np.float32)
    canvas[: values.shape[0], : values.shape[1]] = values
    canvas = (canvas - 127.5) / 127.5
    tiles = [
        canvas[row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE]
        for row in range(rows)
        for column in range(columns)
    ]
    return np.stack(tiles), [1, rows, columns]


@pytest.fixture(params=["inkling2", "inkling2-loop"])
def checkpoint(
    request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> Path:
    if request.param == "inkling2":
        return make_checkpoint("float32", NUM_LAYERS)
    assert inkling2_loop.TINY.hidden == inkling2.TINY.hidden
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, model=request.param, seed=1, dtype="float32")
    return folder


def test_answers_to_several_images_are_those_of_transformers(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "engine"
    build_engine(
        checkpoint, folder, BuildOptions(max_seq_len=250, max_verify_tokens=1, prefill_chunk=10)
    )
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(folder) as llm:
        (output,) = llm.generate({"prompt_token_ids": PROMPT, "images": FILES}, params)
        with pytest.raises(RequestError, match="audio cannot be read, this engine has no audio"):
            llm.generate({"prompt_token_ids": [3], "audio": [b""]}, params)
        huge = png(37 * SIDE, 36 * SIDE)
        with pytest.raises(RequestError, match=r"images\[0\] of .* this engine takes at most 250"):
            llm.generate({"prompt_token_ids": [IMAGE], "images": [huge]}, params)
    assert output.prompt_token_ids.count(IMAGE) == 16 + 1 + 4
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        checkpoint,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    tiles, grids = zip(*map(pixel_values, FILES), strict=True)
    tokens, answered = list(output.prompt_token_ids), []
    for _ in output.outputs[0].token_ids:
        with torch.inference_mode():
            logits = model(
                input_ids=torch.tensor([tokens]),
                pixel_values=torch.from_numpy(np.concatenate(tiles)),
                image_grid_thw=torch.tensor(grids),
            ).logits
        answered.append(int(logits[0, -1].argmax()))
        tokens.append(answered[-1])
    assert tuple(answered) == output.outputs[0].token_ids
