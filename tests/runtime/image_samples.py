"""Random images in memory, as arrays and as files."""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def noise(width: int, height: int, channels: int, dtype: Any = np.uint8) -> NDArray[Any]:
    """[height, width, channels], uniform over the dtype; the same for the same arguments."""
    generator = np.random.default_rng(width + 10007 * height + 101 * channels)
    shape = (height, width, channels)
    return generator.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:  # noqa: A002
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def png(width: int, height: int) -> bytes:
    return encoded(Image.fromarray(noise(width, height, 3)))
