"""How many tiles, and so tokens, an image of a given size becomes; no pixel is needed for it."""

import math
from dataclasses import dataclass

from inkrt.runtime.images.settings import ImageSettings


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """The tiles of one image.

    Attributes:
        width: pixels of the image, once it is scaled.
        height: likewise.
        rows: of tiles, from the top.
        columns: of tiles, from the left.
    """

    width: int
    height: int
    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        """Tokens that stand for the image in a prompt: one for each tile."""
        return self.rows * self.columns


def image_grid(width: int, height: int, settings: ImageSettings) -> ImageGrid:
    """The tiles of an upright image of `width` x `height` pixels."""
    width, height = _scaled(width, height, settings)
    tile = settings.tile
    rows = -(-height // tile)
    columns = width // tile + 1 if settings.has_spare_column else -(-width // tile)
    return ImageGrid(width, height, rows, columns)


def _scaled(width: int, height: int, settings: ImageSettings) -> tuple[int, int]:
    """Its size once its long edge is `upscale` times as long, as far as that is allowed.

    Half a pixel is rounded up. A side of an image that shrinks keeps one pixel.
    """
    if settings.upscale is None:
        return width, height
    long_edge = max(width, height)
    target = long_edge * settings.upscale
    if settings.upscaled_long_edge is not None:
        target = min(target, max(settings.upscaled_long_edge, long_edge))
    ratio = target / long_edge
    if ratio == 1.0:
        return width, height
    width, height = (max(1, math.floor(side * ratio + 0.5)) for side in (width, height))
    return width, height
