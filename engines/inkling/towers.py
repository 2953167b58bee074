"""The towers of an Inkling model, from its config.json in either spelling."""

from collections.abc import Mapping
from typing import Any

from inkrt.engines.inkling.audio import audio_tower, parse_audio
from inkrt.engines.inkling.config import InklingConfig
from inkrt.engines.inkling.vision import parse_vision, vision_tower
from inkrt.engines.tower import Placeholder, Tower, read_placeholder
from inkrt.errors import ConfigError

# Placeholder and opening marker, where the configuration names none.
_IMAGE, _AUDIO = Placeholder(200054, 200005), Placeholder(200053, 200020)


def towers(values: Mapping[str, Any], config: InklingConfig) -> tuple[Tower, ...]:
    """Those that the configuration describes; a text configuration has none.

    Raises:
        ConfigError: a value is invalid, contradicts another or is not supported.
    """

    def place(kind: str, default: Placeholder) -> Placeholder:
        return read_placeholder(values, kind, default, config.vocab_size)

    found: list[Tower] = []
    if (vision := _section(values, "vision_config")) is not None:
        parsed = parse_vision(vision, config.hidden_size)
        found.append(vision_tower(parsed, place("image", _IMAGE)))
    if (audio := _section(values, "audio_config")) is not None:
        heard = parse_audio(audio, config.hidden_size)
        found.append(audio_tower(heard, place("audio", _AUDIO)))
    return tuple(found)


def _section(values: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    found = values.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise ConfigError(f"config.json: {key} must be an object, got {found!r}")
    return found
