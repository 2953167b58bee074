"""The towers of an Inkling model, from its config.json in either spelling."""

from collections.abc import Mapping
from typing import Any

from inkrt.engines.inkling.audio import audio_tower, parse_audio
from inkrt.engines.inkling.config import FAMILY, InklingConfig
from inkrt.engines.inkling.vision import parse_vision, vision_tower
from inkrt.engines.reader import ConfigReader
from inkrt.engines.tower import Placeholder, Tower
from inkrt.errors import ConfigError

# Placeholder and opening marker, where the configuration names none.
_IMAGE, _AUDIO = Placeholder(200054, 200005), Placeholder(200053, 200020)


def towers(values: Mapping[str, Any], config: InklingConfig) -> tuple[Tower, ...]:
    """Those that the configuration describes; a text configuration has none.

    Raises:
        ConfigError: a value is invalid, contradicts another or is not supported.
    """
    found: list[Tower] = []
    if (vision := _section(values, "vision_config")) is not None:
        parsed = parse_vision(vision, config.hidden_size)
        found.append(vision_tower(parsed, _placeholder(values, "image", _IMAGE, config)))
    if (audio := _section(values, "audio_config")) is not None:
        heard = parse_audio(audio, config.hidden_size)
        found.append(audio_tower(heard, _placeholder(values, "audio", _AUDIO, config)))
    return tuple(found)


def _section(values: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    found = values.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise ConfigError(f"config.json: {key} must be an object, got {found!r}")
    return found


def _placeholder(
    values: Mapping[str, Any], kind: str, default: Placeholder, config: InklingConfig
) -> Placeholder:
    read = ConfigReader(values, FAMILY)
    token_id = read.integer(f"{kind}_token_id", default.token_id, minimum=0)
    if token_id >= config.vocab_size:
        raise ConfigError(
            f"config.json: {kind}_token_id {token_id} is none of {config.vocab_size} tokens; give "
            f"the id of the placeholder"
        )
    marker_id = read.integer(f"{kind}_bos_token_id", default.marker_id or 0, minimum=0)
    return Placeholder(token_id, marker_id if marker_id < config.vocab_size else None)
