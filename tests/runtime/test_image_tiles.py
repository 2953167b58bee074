"""Tiles of images are those of the families' processors in transformers."""

import io
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from image_processors import image_processors
from image_samples import encoded, noise, png
from numpy.typing import NDArray
from PIL import Image, ImageOps

from inkrt.errors import RequestError
from inkrt.runtime.images.grid import image_grid
from inkrt.runtime.images.patches import folded
from inkrt.runtime.images.request import ImageLimits, RequestImage, open_images
from inkrt.runtime.images.settings import INKLING, INKLING2, ImageSettings
from inkrt.runtime.images.tower_inputs import tower_inputs

pytest.importorskip("transformers")

NO_LIMITS = ImageLimits(1 << 20, 1 << 20)
DOUBLED = replace(INKLING, upscale=2.0)
HALVED = replace(INKLING, upscale=0.5)
FAMILIES = pytest.mark.parametrize("settings", [INKLING, INKLING2], ids=["inkling", "inkling2"])
# Whole tiles, one pixel less, one more; one pixel alone; a strip.
SIZES = ((1, 1), (40, 40), (39, 80), (80, 41), (123, 57), (641, 3))


@cache
def processor(settings: ImageSettings) -> Any:
    made = image_processors()[settings.processor]
    if settings.upscale is None:
        return made()
    return made(
        rescale_image_frac=settings.upscale,
        rescale_image_max_upscaled_long_edge=settings.upscaled_long_edge,
    )


def theirs(data: bytes, settings: ImageSettings) -> tuple[NDArray[np.float32], int]:
    """`pixel_values` and the number of placeholders."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    found = processor(settings)(image, return_tensors="pt")
    counts = found["image_grid_thw"].prod() if settings is INKLING2 else found["num_patches"]
    return found["pixel_values"].numpy(), int(counts)


def ours(data: bytes, settings: ImageSettings) -> RequestImage:
    (image,) = open_images([data], settings, NO_LIMITS)
    return image


def assert_equal(data: bytes, settings: ImageSettings) -> None:
    expected, num_tokens = theirs(data, settings)
    image = ours(data, settings)
    assert image.num_tokens == num_tokens
    tiles = image.tiles()
    assert tiles.dtype == np.float32
    assert np.array_equal(tiles, expected)


def samples(width: int, height: int) -> dict[str, bytes]:
    """One image of a size in every way to store it."""
    values = noise(width, height, 4)
    color, grey = Image.fromarray(values[..., :3]), Image.fromarray(values[..., 0])
    palette = color.quantize(17)
    return {
        "rgb": encoded(color),
        "rgba": encoded(Image.fromarray(values)),
        "grey": encoded(grey),
        "grey and alpha": encoded(Image.fromarray(np.ascontiguousarray(values[..., :2]), "LA")),
        "palette": encoded(palette),
        "palette, one color transparent": encoded(palette, transparency=3),
        "palette with alpha": encoded(palette, transparency=bytes(range(0, 170, 10))),
        "one color transparent": encoded(color, transparency=tuple(map(int, values[0, 0, :3]))),
        "one bit": encoded(grey.convert("1")),
        "jpeg": encoded(color, "JPEG"),
        "cmyk": encoded(Image.fromarray(values, "CMYK"), "JPEG"),
        "grey jpeg": encoded(grey, "JPEG"),
        "gif": encoded(color, "GIF"),
        "webp": encoded(Image.fromarray(values), "WEBP", lossless=True),
        "bmp": encoded(color, "BMP"),
        "tiff": encoded(color, "TIFF"),
    }


@FAMILIES
@pytest.mark.parametrize("size", SIZES)
def test_tiles_of_every_kind_of_image(size: tuple[int, int], settings: ImageSettings) -> None:
    for data in samples(*size).values():
        assert_equal(data, settings)


@FAMILIES
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_images_are_turned_as_they_say(
    orientation: int, kind: str, settings: ImageSettings
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(noise(81, 39, 3)), kind, exif=exif)
    assert_equal(data, settings)
    grid = ours(data, settings).grid
    assert (grid.height > grid.width) == (orientation >= 5)


@FAMILIES
def test_a_png_may_say_so_behind_its_pixels(settings: ImageSettings) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(Image.fromarray(noise(81, 39, 3)), exif=exif)
    start = data.index(b"eXIf") - 4
    chunk = data[start : start + 12 + int.from_bytes(data[start : start + 4], "big")]
    end = data.index(b"IEND") - 4
    moved = data[:start] + data[start + len(chunk) : end] + chunk + data[end:]
    assert moved.index(b"eXIf") > moved.index(b"IDAT")
    assert_equal(moved, settings)
    assert ours(moved, settings).grid.height == 81


@FAMILIES
def test_of_an_animation_the_first_frame(settings: ImageSettings) -> None:
    frames = [Image.fromarray(noise(50, 45, 3) // (i + 1)) for i in range(3)]
    for format in ("GIF", "PNG", "WEBP"):  # noqa: A001
        data = encoded(frames[0], format, save_all=True, append_images=frames[1:], duration=50)
        assert_equal(data, settings)


def test_a_large_photograph() -> None:
    """12 million pixels: 75 rows of 100 tiles, and the column of padding of Inkling."""
    ramp = np.arange(4000 * 3000, dtype=np.uint32)
    pixels = np.stack([ramp % 251, ramp // 4000 % 256, ramp // 4001 % 256], axis=-1)
    image = Image.fromarray(pixels.astype(np.uint8).reshape(3000, 4000, 3))
    data = encoded(image, "BMP")
    assert ours(data, INKLING).num_tokens == 75 * 101
    assert ours(data, INKLING2).num_tokens == 75 * 100
    assert_equal(data, INKLING2)


@pytest.mark.parametrize("settings", [DOUBLED, HALVED], ids=["doubled", "halved"])
@pytest.mark.parametrize("size", [(40, 40), (39, 80), (123, 57), (641, 333)])
def test_scaled_images_are_within_two_levels(
    size: tuple[int, int], settings: ImageSettings
) -> None:
    """Pillow and torch round weights, and rows between the two passes, in their own ways.

    Levels are kept away from 0 and 255, where they clip between the passes too.
    """
    data = encoded(Image.fromarray(noise(*size, 3) // 4 + 96))
    expected, num_tokens = theirs(data, settings)
    image = ours(data, settings)
    assert image.num_tokens == num_tokens
    levels = np.abs(image.tiles() - expected) * np.array(settings.std) * 255
    assert levels.max() < 2.1
    assert levels.mean() < 0.25


@pytest.mark.parametrize("frac", [None, 0.3, 1.0, 1.7, 2.0, 3.5])
@pytest.mark.parametrize("edge", [None, 300, 2048])
def test_counts_of_tokens_at_all_sizes(frac: float | None, edge: int | None) -> None:
    settings = replace(INKLING, upscale=frac, upscaled_long_edge=edge)
    reference = processor(settings)
    for width, height in ((1, 1), (40, 40), (7, 450), (299, 301), (160, 120)):
        image = torch.zeros(3, height, width, dtype=torch.uint8)
        if frac == 0.3 and width == 1:
            continue  # their image has no pixels then; ours keeps one
        expected = int(reference(image, return_tensors="pt")["num_patches"])
        assert image_grid(width, height, settings).num_tokens == expected, (width, height)
    tiny = image_grid(1, 1, replace(settings, upscale=0.3))
    assert (tiny.width, tiny.height, tiny.num_tokens) == (1, 1, 1)


def test_several_images_of_one_request() -> None:
    data = [png(40, 41), png(123, 57), png(1, 1)]
    images = open_images(data, INKLING2, NO_LIMITS)
    assert [image.num_tokens for image in images] == [2, 8, 1]
    for image, each in zip(images, data, strict=True):
        assert np.array_equal(image.tiles(), theirs(each, INKLING2)[0])


def test_too_many_tokens() -> None:
    limits = ImageLimits(tokens_of_image=8, tokens_of_request=11)
    open_images([png(123, 57), png(41, 40), png(1, 1)], INKLING2, limits)
    with pytest.raises(RequestError) as caught:
        open_images([png(123, 57), png(80, 80)], INKLING2, limits)
    assert str(caught.value) == (
        "images become 12 tokens together, at most 11 fit; send fewer or smaller ones"
    )
    with pytest.raises(RequestError) as caught:
        open_images([png(1, 1), png(163, 80)], INKLING2, limits, param="image")
    assert caught.value.param == "image"
    assert str(caught.value) == (
        "image[1] of 163 x 80 pixels becomes 10 tokens of 40 x 40 pixels, this engine takes at "
        "most 8 for an image; scale it down to 145 x 71 pixels"
    )
    assert image_grid(145, 71, INKLING2).num_tokens == 8


@pytest.mark.parametrize("settings", [INKLING, INKLING2, DOUBLED])
@pytest.mark.parametrize("size", [(4000, 3000), (3000, 41), (41, 3000), (640, 640)])
def test_the_size_that_is_proposed_fits(size: tuple[int, int], settings: ImageSettings) -> None:
    data = encoded(Image.new("L", size))
    for most in (1, 2, 7, 60):
        with pytest.raises(RequestError, match="scale it down to") as caught:
            open_images([data], settings, ImageLimits(most, 10**6))
        width, height = map(int, str(caught.value).split()[-4:-1:2])
        assert image_grid(width, height, settings).num_tokens <= most


def test_folding_is_that_of_nested_views() -> None:
    """As the hMLP of Inkling folds: 5 x 5 pixels, then 2 x 2, then 4 x 4 of these."""
    values = noise(40, 40, 3).astype(np.float32)[None]
    expected = torch.from_numpy(values)
    for fold in (5, 2, 4):  # [N, S, S, C] to [N, S / fold, S / fold, fold * fold * C]
        side = expected.shape[1] // fold
        expected = expected.reshape(1, side, fold, side, fold, -1).transpose(2, 3)
        expected = expected.reshape(1, side, side, -1)
    assert np.array_equal(folded(values, (5, 2, 4)), expected.reshape(1, -1).numpy())


def test_the_towers_inputs_go_with_each_other() -> None:
    """A patch's position is where its pixels stand in the image."""
    width, height, patch, merge = 100, 70, 20, 2
    pixels = np.zeros((height, width, 3), np.uint8)
    rows, columns = np.indices((height, width)) // patch
    pixels[..., 0], pixels[..., 1] = rows + 1, columns + 1
    image = ours(encoded(Image.fromarray(pixels)), INKLING2)
    inputs = tower_inputs(image.tiles(), image.grid, merge)
    assert inputs.grid.tolist() == [4, 6]
    assert inputs.num_rows.tolist() == [1 + 24]
    assert inputs.positions.dtype == np.int32
    assert inputs.positions[0].tolist() == [0, 0]
    assert len({tuple(place) for place in inputs.positions[1:].tolist()}) == 24
    first = np.rint(inputs.patches[:, :2] * 127.5 + 127.5).astype(int)  # of each patch's corner
    is_image = (first >= 0).all(axis=1)
    assert is_image.sum() == 4 * 5
    assert np.array_equal(first[is_image], inputs.positions[1:][is_image])
