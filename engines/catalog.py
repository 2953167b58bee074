"""The model families that can be built, by `model_type` of the checkpoint's config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from inkrt.engines.interface import Definition
from inkrt.errors import ConfigError


def _flint() -> Definition:
    from inkrt.engines.flint.config import parse_config
    from inkrt.engines.flint.model import Flint
    from inkrt.engines.flint.weights import is_ignored, weight_sources

    return Definition(parse_config, Flint, weight_sources, is_ignored)


def _inkling2() -> Definition:
    from inkrt.engines.inkling2.config import parse_config
    from inkrt.engines.inkling2.model import Inkling2
    from inkrt.engines.inkling2.weights import is_ignored, weight_sources

    return Definition(parse_config, Inkling2, weight_sources, is_ignored)


_DEFINITIONS: dict[str, Callable[[], Definition]] = {
    "flint": _flint,
    "inkling2": _inkling2,
    "inkling2_text": _inkling2,
}


def find_definition(config: Mapping[str, Any]) -> Definition:
    """The definition for a checkpoint's config.json.

    Raises:
        ConfigError: `model_type` is absent or none of ours.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _DEFINITIONS:
        raise ConfigError(
            f"config.json: model_type {model_type!r} is not supported; "
            f"this version builds {', '.join(sorted(_DEFINITIONS))}"
        )
    return _DEFINITIONS[model_type]()
