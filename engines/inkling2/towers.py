"""The image tower of an Inkling-2 model, as the builder wants it."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from inkrt.engines.inkling2.config import Inkling2Config
from inkrt.engines.inkling2.vision import VisionTower, tower_input_shapes
from inkrt.engines.inkling2.vision_config import parse_vision_config
from inkrt.engines.inkling2.vision_weights import VISION_ROOTS, vision_sources
from inkrt.engines.tower import Placeholder, Tower, read_placeholder

_IMAGE = Placeholder(200054, 200005)
# Tiles of an image: 320 x 320, 640 x 640 and 1920 x 1080 pixels in the published model. Attention
# within an image costs the square of them.
_SIZES = (64, 256, 1296)


def towers(values: Mapping[str, Any], config: Inkling2Config) -> tuple[Tower, ...]:
    """The tower that the configuration describes; a text configuration has none.

    Raises:
        ConfigError: a value is invalid, contradicts another or is not supported.
    """
    if values.get("vision_config") is None:
        return ()
    vision = parse_vision_config(values, config)
    if vision is None:
        return ()
    tower = Tower(
        kind="vision",
        placeholder=read_placeholder(values, "image", _IMAGE, config.vocab_size),
        sizes=_SIZES,
        inputs=partial(tower_input_shapes, vision),
        is_rowwise=False,
        processor={
            "type": "inkling2-patches",
            "tile_size": vision.patch_size * vision.spatial_merge_size,
            "merge": vision.spatial_merge_size,
        },
        build_module=partial(VisionTower, vision),
        weight_sources=partial(vision_sources, vision),
        is_weight=is_weight,
    )
    return (tower,)


def is_weight(name: str) -> bool:
    """Whether a checkpoint tensor is the tower's."""
    return name.startswith(VISION_ROOTS)
