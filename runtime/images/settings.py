"""How a model family prepares images, from the files that come with its checkpoints.

A family's rules are fixed; its numbers come from preprocessor_config.json, or from the
`image_processor` part of processor_config.json, and where a key is absent they are the publisher's.
Sources: `InklingImageProcessor` and `Inkling2ImageProcessor` of transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from inkrt.errors import ConfigError

FILES = ("preprocessor_config.json", "processor_config.json")

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Rules and numbers of one family.

    Attributes:
        processor: class that the publisher's files name.
        tile: side in pixels of the square that becomes one token.
        mean: of red, green and blue, on the scale of 0 to 1.
        std: likewise.
        rescale_factor: of values 0 to 255 to that scale.
        background: what shows through transparent pixels.
        frames: copies of every tile along time; 0 for tiles without that axis.
        has_spare_column: whether there is one more column of tiles where the width is a multiple
            of a tile's side, all padding.
        upscale: factor of the long edge before tiles are cut; None leaves images as they are.
        upscaled_long_edge: pixels that scaling up goes to at most; None for no limit.
    """

    processor: str
    tile: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float
    background: Literal["white", "checkerboard"]
    frames: int
    has_spare_column: bool
    upscale: float | None = None
    upscaled_long_edge: int | None = None


INKLING = ImageSettings(
    processor="InklingImageProcessor",
    tile=40,
    mean=_CLIP_MEAN,
    std=_CLIP_STD,
    rescale_factor=1 / 255,
    background="white",
    frames=2,
    has_spare_column=True,
    upscaled_long_edge=2048,
)
INKLING2 = ImageSettings(
    processor="Inkling2ImageProcessor",
    tile=40,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    rescale_factor=1 / 255,
    background="checkerboard",
    frames=0,
    has_spare_column=False,
)


def read_image_settings(folder: Path, family: ImageSettings) -> ImageSettings:
    """The settings of a checkpoint or an engine.

    Args:
        folder: that has `FILES`, or some of them, or none.
        family: INKLING or INKLING2, whose rules hold and whose numbers stand in for absent keys.

    Raises:
        ConfigError: a file is damaged, of another family, or asks for what is not supported.
    """
    for name in FILES:
        path = folder / name
        try:
            content = msgspec.json.decode(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"cannot read {path}: {error}; copy the file again") from error
        own = content.get("image_processor") if name == FILES[1] else content
        if own is None and isinstance(content, dict):
            continue  # a processor_config.json that leaves images to the other file
        if not isinstance(own, dict):
            raise ConfigError(f"{path}: expected an object of settings; copy the file again")
        return _Reader(path, own).settings(family)
    return family


class _Reader:
    """Reads one object of settings."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def settings(self, family: ImageSettings) -> ImageSettings:
        processor = str(self.values.get("image_processor_type", family.processor))
        if processor.removesuffix("Fast") != family.processor:
            raise self.refusal("image_processor_type", f"only {family.processor!r}")
        for key, only in (
            ("do_convert_rgb", True),
            ("do_rescale", True),
            ("do_normalize", True),
            ("do_center_crop", False),
            *((("do_resize", True), ("resample", 1)) if family.frames else ()),
        ):
            if self.values.get(key) not in (None, only):
                raise self.refusal(key, f"only {only!r}")
        settings = replace(
            family,
            tile=self.tile(family.tile),
            mean=self.channels("image_mean", family.mean),
            std=self.channels("image_std", family.std),
            rescale_factor=self.positive("rescale_factor", family.rescale_factor),
        )
        if not family.frames:
            return settings
        edge = self.values.get("rescale_image_max_upscaled_long_edge", family.upscaled_long_edge)
        if edge is not None and not _is_integer(edge, 1):
            raise self.refusal("rescale_image_max_upscaled_long_edge", "only a count of pixels")
        scale = None
        if self.values.get("rescale_image_frac") is not None:
            scale = self.positive("rescale_image_frac", 1.0)
        return replace(settings, upscale=scale, upscaled_long_edge=edge)

    def tile(self, default: int) -> int:
        """The side of a tile, from a size that has to be square."""
        size = self.values.get("size")
        if size is None:
            return default
        side: Any = size.get("height") if isinstance(size, dict) else size
        is_square = not isinstance(size, dict) or size.get("width") == side
        if not is_square or not _is_integer(side, 1):
            raise self.refusal("size", "only equal height and width, in pixels")
        return int(side)

    def channels(self, key: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        """A positive number for each of the three channels."""
        value = self.values.get(key)
        if value is None:
            return default
        if not (isinstance(value, list) and len(value) == 3 and all(map(_is_positive, value))):
            raise self.refusal(key, "only three positive numbers")
        red, green, blue = map(float, value)
        return red, green, blue

    def positive(self, key: str, default: float) -> float:
        """A positive number."""
        value = self.values.get(key)
        if value is None:
            return default
        if not _is_positive(value):
            raise self.refusal(key, "only a positive number")
        return float(value)

    def refusal(self, key: str, allowed: str) -> ConfigError:
        return ConfigError(
            f"{self.path}: {key} = {self.values.get(key)!r} is not supported, {allowed}"
        )


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def _is_integer(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum
