"""The images of one request: counted from their headers, then decoded one by one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import RequestError
from inkrt.runtime.images import patches
from inkrt.runtime.images.grid import ImageGrid, image_grid
from inkrt.runtime.images.image_file import ImageFile, ImageSource
from inkrt.runtime.images.settings import ImageSettings


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What an engine takes.

    Attributes:
        tokens_of_image: most tiles that its vision tower takes at once.
        tokens_of_request: most tokens that all images of a request may take.
    """

    tokens_of_image: int
    tokens_of_request: int


@dataclass(frozen=True, slots=True)
class RequestImage:
    """One image, whose pixels are not decoded yet.

    Attributes:
        file: the encoded image.
        grid: its tiles; `grid.num_tokens` placeholders stand for it in the prompt.
        settings: of the model family.
    """

    file: ImageFile
    grid: ImageGrid
    settings: ImageSettings

    @property
    def num_tokens(self) -> int:
        """Placeholder tokens that stand for it in the prompt."""
        return self.grid.num_tokens

    def tiles(self) -> NDArray[np.float32]:
        """Decode, scale, pad and normalize it: the `pixel_values` of its family's processor.

        Returns:
            float32 [N, tile, tile, 3], or [N, frames, tile, tile, 3] for Inkling.

        Raises:
            RequestError: the file is truncated or damaged.
        """
        pixels = patches.on_background(self.file.pixels(), self.settings)
        pixels = patches.scaled(pixels, self.grid)
        return patches.tiles(pixels, self.grid, self.settings)


def open_images(
    sources: Sequence[ImageSource],
    settings: ImageSettings,
    limits: ImageLimits,
    *,
    param: str = "images",
) -> list[RequestImage]:
    """Open the images of a request and count their tokens; only headers are read.

    Args:
        sources: encoded images or paths of files, in the order of the prompt.
        settings: of the model family.
        limits: of the engine.
        param: the request's field that they came in; messages call them `param`[0] and so on.

    Raises:
        RequestError: one cannot be read or is too large, or they are too large together.
        UsageError: Pillow is not installed.
    """
    images = []
    for index, source in enumerate(sources):
        name = f"{param}[{index}]"
        file = ImageFile(source, name=name, param=param)
        grid = image_grid(file.width, file.height, settings)
        if grid.num_tokens > limits.tokens_of_image:
            raise RequestError(
                f"{name} of {file.width} x {file.height} pixels becomes {grid.num_tokens} tokens "
                f"of {settings.tile} x {settings.tile} pixels, this engine takes at most "
                f"{limits.tokens_of_image} for an image; scale it down to "
                f"{_fitting_size(file, settings, limits.tokens_of_image)}",
                param=param,
            )
        images.append(RequestImage(file, grid, settings))
    total = sum(image.num_tokens for image in images)
    if total > limits.tokens_of_request:
        raise RequestError(
            f"{param} become {total} tokens together, at most {limits.tokens_of_request} fit; send "
            f"fewer or smaller ones",
            param=param,
        )
    return images


def _fitting_size(file: ImageFile, settings: ImageSettings, num_tokens: int) -> str:
    """A size of the same proportions that becomes at most so many tokens."""
    count = image_grid(file.width, file.height, settings).num_tokens
    factor = math.sqrt(num_tokens / count)
    while True:
        width, height = (max(1, int(side * factor)) for side in (file.width, file.height))
        if image_grid(width, height, settings).num_tokens <= num_tokens or width * height == 1:
            return f"{width} x {height} pixels"
        factor *= 0.98
