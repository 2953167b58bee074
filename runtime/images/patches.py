"""Pixels to tiles: composition on a background, scaling, padding, normalization, order.

Every number is the one that the family's image processor in transformers computes, but for the
scaling of Inkling's images: Pillow's differs from that of torchvision by single levels of 255.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from inkrt.runtime.images.grid import ImageGrid
from inkrt.runtime.images.settings import ImageSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of padding, on the scale of 0 to 255.
_PADDING = -1.0
# Squares and grey levels of the checkerboard.
_SQUARE, _LIGHT, _DARK = 8, 204, 153


def on_background(pixels: NDArray[np.uint8], settings: ImageSettings) -> NDArray[np.uint8]:
    """Pixels uint8 [H, W, 4] laid on the family's background, or [H, W, 3] as they are."""
    if pixels.shape[-1] == 3:
        return pixels
    if settings.background == "white":
        return _on_white(pixels)
    height, width = pixels.shape[:2]
    rows, columns = np.arange(height)[:, None] // _SQUARE, np.arange(width)[None] // _SQUARE
    board = np.where((rows + columns) % 2 == 0, _LIGHT, _DARK).astype(np.int32)[..., None]
    alpha = pixels[..., 3:].astype(np.int32)
    mixed = (pixels[..., :3].astype(np.int32) * alpha + board * (255 - alpha) + 127) // 255
    return mixed.astype(np.uint8)


def _on_white(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    from PIL import Image

    image = Image.fromarray(pixels)  # of four channels, so RGBA
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return np.asarray(Image.alpha_composite(white, image).convert("RGB"))


def scaled(pixels: NDArray[np.uint8], grid: ImageGrid) -> NDArray[np.uint8]:
    """Pixels uint8 [H, W, 3] at the grid's size."""
    if pixels.shape[:2] == (grid.height, grid.width):
        return pixels
    from PIL import Image

    size = (grid.width, grid.height)
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def tiles(
    pixels: NDArray[np.uint8], grid: ImageGrid, settings: ImageSettings
) -> NDArray[np.float32]:
    """Normalized tiles of an image, row by row.

    Args:
        pixels: uint8 [H, W, 3] of the grid's size.
        grid: of the image.
        settings: of the family.

    Returns:
        float32 [N, tile, tile, 3], or [N, frames, tile, tile, 3]; the image is padded at the right
        and at the bottom.
    """
    side = settings.tile
    shape = (grid.rows * side, grid.columns * side, 3)
    canvas = np.full(shape, _PADDING, np.float32)
    canvas[: grid.height, : grid.width] = pixels
    # Mean and deviation go to the scale of pixels, in float32, as the reference computes it.
    levels = np.float32(1 / settings.rescale_factor)
    canvas -= np.array(settings.mean, np.float32) * levels
    canvas /= np.array(settings.std, np.float32) * levels
    cut = canvas.reshape(grid.rows, side, grid.columns, side, 3).swapaxes(1, 2)
    cut = cut.reshape(grid.num_tokens, side, side, 3)
    if settings.frames:
        cut = np.repeat(cut[:, None], settings.frames, axis=1)
    return cut


def folded(values: NDArray[np.float32], folds: "Sequence[int]") -> NDArray[np.float32]:
    """The same numbers in the order in which a tower folds squares of pixels into channels.

    Folding by 5, then by 2, takes 5 x 5 pixels to a vector, then 2 x 2 such vectors to one. In this
    order every fold is a view of memory.

    Args:
        values: float32 [..., S, S, C], S the product of all folds and of what remains.
        folds: sides of squares, the innermost first.

    Returns:
        float32 [..., S * S * C].
    """
    *lead, side, _, channels = values.shape
    inner = 1
    for fold in folds:
        inner *= fold
    assert side % inner == 0, f"tiles of {side} pixels do not fold by {tuple(folds)}"
    sides = [side // inner, *reversed(folds)]  # outermost first
    num_lead, depth = len(lead), len(sides)
    split = values.reshape(*lead, *sides, *sides, channels)
    pairs = [axis for d in range(depth) for axis in (num_lead + d, num_lead + depth + d)]
    order = [*range(num_lead), *pairs, num_lead + 2 * depth]
    return np.ascontiguousarray(split.transpose(order)).reshape(*lead, -1)
