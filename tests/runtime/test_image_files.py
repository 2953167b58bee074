"""Files of images: 16 bits, damaged ones, limits, and what is refused."""

import json
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_samples import encoded, noise, png
from PIL import Image

from inkrt.errors import ConfigError, InkError, RequestError
from inkrt.runtime.images import image_file
from inkrt.runtime.images.image_file import ImageFile
from inkrt.runtime.images.settings import INKLING, INKLING2, read_image_settings

COLOR = Image.fromarray(noise(61, 43, 3))
FILES = {
    "PNG": encoded(COLOR),
    "JPEG": encoded(COLOR, "JPEG"),
    "WEBP": encoded(COLOR, "WEBP", lossless=True),
    "GIF": encoded(COLOR, "GIF"),
    "BMP": encoded(COLOR, "BMP"),
    "TIFF": encoded(COLOR, "TIFF", compression="tiff_lzw"),
}


def refusal(source: Any) -> str:
    """What is said of an image that cannot be read; its size may be."""
    with pytest.raises(RequestError) as caught:
        ImageFile(source, name="images[2]").pixels()
    assert caught.value.param == "images"
    text = str(caught.value)
    assert text.startswith("images[2] ")
    assert "\n" not in text
    return text


def png_header(width: int, height: int) -> bytes:
    """A PNG file that says it has so many pixels and has none."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checked = kind + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def test_sixteen_bits_are_rounded_to_eight() -> None:
    values = noise(37, 29, 1, np.uint16)[..., 0]
    values[0, :3] = (0, 65535, 257 * 100)
    expected = np.rint(values / 257).astype(np.uint8)
    for format in ("PNG", "TIFF"):  # noqa: A001
        pixels = ImageFile(encoded(Image.fromarray(values), format)).pixels()
        assert pixels.shape == (29, 37, 3)
        assert np.array_equal(pixels, np.repeat(expected[..., None], 3, axis=-1))


def test_one_grey_of_sixteen_bits_may_be_transparent() -> None:
    values = noise(9, 7, 1, np.uint16)[..., 0]
    values[2, 3] = values[5, 5] = 12345
    data = encoded(Image.fromarray(values), transparency=12345)
    pixels = ImageFile(data).pixels()
    assert pixels.shape == (7, 9, 4)
    assert np.array_equal(pixels[..., 3] == 0, values == 12345)


def test_opacity_is_kept_as_it_is() -> None:
    values = noise(9, 7, 4)
    assert np.array_equal(ImageFile(encoded(Image.fromarray(values))).pixels(), values)


def test_paths_and_bytes_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(FILES["PNG"])
    for source in (path, str(path), FILES["PNG"]):
        assert np.array_equal(ImageFile(source).pixels(), np.asarray(COLOR))


@pytest.mark.parametrize("kind", FILES)
def test_truncated_files_are_refused(kind: str) -> None:
    data = FILES[kind]
    for length in (len(data) // 2, len(data) * 3 // 4):
        text = refusal(data[:length])
        if kind == "TIFF":  # what it is stands at its end
            assert "is no image of a format that is read" in text
            continue
        assert "is damaged or incomplete (" in text
        assert text.endswith("; save or send it again")


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    unknown = (
        "is no image of a format that is read (PNG, JPEG, WEBP, GIF, BMP, TIFF), or a damaged one; "
        "convert it or save it again"
    )
    (tmp_path / "text.png").write_text("not an image")
    drawing = encoded(COLOR, "EPS")  # reading it would run Ghostscript
    for source in (b"", b"\x89PNG\r\n\x1a\n", drawing, tmp_path / "text.png"):
        assert refusal(source) == f"images[2] {unknown}"
    assert "cannot be read from" in refusal(tmp_path / "absent.png")
    assert "No such file or directory; give another path" in refusal(tmp_path / "absent.png")
    assert "cannot be read from" in refusal("a\0b")
    assert "cannot be read from" in refusal(tmp_path)


@pytest.mark.filterwarnings("ignore:Image size:PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(9000, 9000), (10000, 10000), (65000, 65000), (1 << 30, 1)])
def test_sizes_over_the_limit_are_refused_unread(size: tuple[int, int]) -> None:
    text = refusal(png_header(*size))
    assert "67108864" in text
    assert text.endswith("send a smaller one")


def test_sizes_at_the_limit_are_read() -> None:
    file = ImageFile(png_header(8192, 8192))
    assert (file.width, file.height) == (8192, 8192)
    file = ImageFile(png_header(1, image_file.MAX_PIXELS))
    assert (file.width, file.height) == (1, image_file.MAX_PIXELS)


def test_files_over_the_limit_are_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "huge.png"
    with path.open("wb") as file:
        file.truncate(image_file.MAX_FILE_BYTES + 1)
    expected = "images[2] has 67108865 bytes, at most 67108864 are read; send a smaller one"
    assert refusal(path) == expected
    monkeypatch.setattr(image_file, "MAX_FILE_BYTES", 10)
    assert "has 11 bytes, at most 10 are read" in refusal(b"x" * 11)


def test_channels_of_32_bits_are_refused() -> None:
    values = noise(4, 4, 1)[..., 0].astype(np.float32)
    text = refusal(encoded(Image.fromarray(values), "TIFF"))
    assert "one channel of 32 bits (mode F)" in text
    assert "convert it to 8 or 16 bits" in text


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(FILES)),
    changes=st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), max_size=6),
    length=st.integers(0, 1 << 30),
    is_cut=st.booleans(),
)
def test_damaged_files_give_pixels_or_one_error(
    name: str, changes: list[tuple[int, int]], length: int, is_cut: bool
) -> None:
    data = bytearray(FILES[name])
    for place, value in changes:
        # Headers matter most, so half of all changes hit the first bytes.
        data[place % (80 if place % 2 else len(data))] = value
    cut = bytes(data[: length % len(data)] if is_cut else data)
    try:
        file = ImageFile(cut)
        pixels = file.pixels()
    except RequestError:
        return
    assert pixels.dtype == np.uint8
    assert pixels.shape[:2] == (file.height, file.width)
    assert pixels.shape[2] in (3, 4)


def test_pillow_is_imported_with_the_first_image() -> None:
    code = (
        "import sys\n"
        "from inkrt.errors import UsageError\n"
        "import inkrt.runtime.images.request, inkrt.runtime.images.tower_inputs\n"
        "from inkrt.runtime.images.image_file import ImageFile\n"
        "assert not {'PIL', 'torch', 'torchvision'} & set(sys.modules)\n"
        "sys.modules['PIL'] = None\n"
        "try: ImageFile(b'x')\n"
        "except UsageError as error: print(error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.stdout == (
        "reading images needs Pillow; install it with: pip install 'inkrt[images]'\n"
    ), result.stderr


def test_settings_are_those_of_the_files(tmp_path: Path) -> None:
    assert read_image_settings(tmp_path, INKLING2) is INKLING2
    own = {
        "image_processor_type": "Inkling2ImageProcessorFast",
        "do_rescale": True,
        "size": {"height": 24, "width": 24},
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": None,
        "rescale_factor": 0.5,
    }
    expected = replace(INKLING2, tile=24, mean=(0.1, 0.2, 0.3), rescale_factor=0.5)
    nested = {"processor_class": "Inkling2Processor", "image_processor": own}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert read_image_settings(tmp_path, INKLING2) == expected
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "x"}))
    assert read_image_settings(tmp_path, INKLING2) is INKLING2
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own | {"size": 8}))
    assert read_image_settings(tmp_path, INKLING2) == replace(expected, tile=8)


def test_settings_of_inkling(tmp_path: Path) -> None:
    own = {
        "image_processor_type": "InklingImageProcessor",
        "resample": 1,
        "rescale_image_frac": 2.0,
        "rescale_image_max_upscaled_long_edge": None,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    expected = replace(INKLING, upscale=2.0, upscaled_long_edge=None)
    assert read_image_settings(tmp_path, INKLING) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read .*preprocessor_config.json: .*; copy the file again"),
        ("[" * 100_000, "cannot read .*; copy the file again"),
        ("[]", "expected an object of settings"),
        ({"image_processor_type": "InklingImageProcessor"}, "only 'Inkling2ImageProcessor'"),
        ({"do_rescale": False}, "do_rescale = False is not supported, only True"),
        ({"do_center_crop": True}, "do_center_crop = True is not supported, only False"),
        ({"size": {"height": 40, "width": 20}}, "size = .* only equal height and width"),
        ({"size": {"shortest_edge": 40}}, "size = .* only equal height and width"),
        ({"size": 0}, "size = 0 is not supported"),
        ({"image_mean": [0.5, 0.5]}, "image_mean = .* only three positive numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std = .* only three positive numbers"),
        ({"rescale_factor": "1"}, "rescale_factor = '1' is not supported, only a positive"),
    ],
)
def test_settings_that_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_image_settings(tmp_path, INKLING2)


@pytest.mark.parametrize(
    "change",
    [
        {"resample": 3},
        {"do_resize": False},
        {"rescale_image_frac": -1},
        {"rescale_image_frac": True},
        {"rescale_image_max_upscaled_long_edge": 0},
    ],
)
def test_settings_of_inkling_that_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(change))
    with pytest.raises(InkError, match=rf"{next(iter(change))} = .* is not supported"):
        read_image_settings(tmp_path, INKLING)


def test_an_image_is_read_once_it_is_needed() -> None:
    """A header is enough to know the size; pixels that are missing show when they are decoded."""
    file = ImageFile(png(61, 43)[:200])
    assert (file.width, file.height) == (61, 43)
    with pytest.raises(RequestError, match="is damaged or incomplete"):
        file.pixels()
