"""From the images and recordings of a request to what the towers of an engine take of them."""

import dataclasses
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from inkrt.errors import EngineFormatError, RequestError
from inkrt.runtime.engine_file import EngineConfig
from inkrt.runtime.media.dmel import dmel_inputs
from inkrt.runtime.media.encode import TowerInputs
from inkrt.runtime.media.recording import read_recording
from inkrt.runtime.media.rows import MEDIA_NAMES, require_tower
from inkrt.runtime.tower_spec import Dmel, Inkling2Patches, InklingTiles, Kind, TowerSpec

if TYPE_CHECKING:
    from inkrt.runtime.images.request import RequestImage
    from inkrt.runtime.images.settings import ImageSettings

ImageProcessor = InklingTiles | Inkling2Patches
# An encoded image or recording: bytes or a path. A recording may be (samples, rate) too.
MediaSource = bytes | str | os.PathLike[str] | tuple[object, int]


class MediaReader:
    """Reads what the towers of one engine take.

    Args:
        folder: of the engine.
        config: of the engine.
    """

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        self._folder = folder
        self._config = config

    def read(self, kind: Kind, sources: Sequence[MediaSource]) -> list[TowerInputs]:
        """Read images (kind "vision") or recordings, in the order of the prompt.

        Raises:
            RequestError: one cannot be read, or is too large; the engine has no such tower.
            UsageError: a library that reads them is not installed.
        """
        name = MEDIA_NAMES[kind]
        if isinstance(sources, str | bytes | os.PathLike) or not isinstance(sources, Sequence):
            raise RequestError(
                f"{name} is of type {type(sources).__name__}, it must be a list", param=name
            )
        if not sources:
            return []
        tower = require_tower(kind, self._config)
        processor = tower.processor
        if isinstance(processor, Dmel):
            return [
                dmel_inputs(read_recording(source, name=f"{name}[{i}]", param=name), processor)
                for i, source in enumerate(sources)
            ]
        return self._images(sources, tower, processor)

    def _images(
        self, sources: Sequence[MediaSource], tower: TowerSpec, processor: ImageProcessor
    ) -> list[TowerInputs]:
        from inkrt.runtime.images.request import ImageLimits, open_images

        encoded = []
        for i, source in enumerate(sources):
            if not isinstance(source, bytes | str | os.PathLike):
                raise RequestError(
                    f"images[{i}] is of type {type(source).__name__}, it must be bytes or a path",
                    param="images",
                )
            encoded.append(source)
        most = self._config.max_seq_len
        limits = ImageLimits(most if tower.is_rowwise else min(most, tower.most_rows), most)
        images = open_images(encoded, self._image_settings, limits)
        return [_inputs(image, processor) for image in images]

    @cached_property
    def _image_settings(self) -> "ImageSettings":
        """Those of the folder, which must be those that the tower was built for."""
        from inkrt.runtime.images.settings import INKLING, INKLING2, read_image_settings

        processor = require_tower("vision", self._config).processor
        assert not isinstance(processor, Dmel)
        family = dataclasses.replace(INKLING2, tile=processor.tile_size)
        if isinstance(processor, InklingTiles):
            family = dataclasses.replace(
                INKLING, tile=processor.tile_size, frames=processor.num_frames
            )
        settings = read_image_settings(self._folder, family)
        if settings.tile != processor.tile_size:
            raise EngineFormatError(
                f"{self._folder}: the image processor's tiles have {settings.tile} pixels, the "
                f"tower takes {processor.tile_size}; copy the checkpoint's files again and rebuild"
            )
        return settings


def _inputs(image: "RequestImage", processor: ImageProcessor) -> TowerInputs:
    """What the tower takes of one image."""
    from inkrt.runtime.images.patches import folded
    from inkrt.runtime.images.tower_inputs import tower_inputs

    if isinstance(processor, InklingTiles):
        pixels = folded(image.tiles(), processor.folds).reshape(image.num_tokens, -1)
        return TowerInputs(image.num_tokens, {"pixels": pixels})
    found = tower_inputs(image.tiles(), image.grid, processor.merge)
    names = ("patches", "positions", "grid", "num_rows")
    return TowerInputs(image.num_tokens, {name: getattr(found, name) for name in names})
