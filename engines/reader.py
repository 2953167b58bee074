"""Reading a checkpoint's config.json: type checks, and errors that name the key.

What the keys mean is the business of each model's own `config.py`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from inkrt.errors import ConfigError

# Positions and ids are int32 on the device.
LARGEST = 2**31 - 1
# Of what readers count one by one: a layer or an expert is a few entries of lists. Several times
# what any model has.
MOST_LAYERS, MOST_EXPERTS = 512, 8192
NO_ALIASES: Mapping[str, str] = MappingProxyType({})


class ConfigReader:
    """Reads the keys of one JSON object.

    Args:
        values: the object.
        family: the model's name, for messages.
        aliases: other spellings of keys that are accepted.
        section: what stands before a key in messages, such as "vision_config.".
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        family: str,
        aliases: Mapping[str, str] = NO_ALIASES,
        section: str = "",
    ) -> None:
        self._values = values
        self._family = family
        self._aliases = aliases
        self._section = section

    def get(self, key: str, default: Any) -> Any:
        """The value of a key or of its alias, else `default`."""
        alias = self._aliases.get(key)
        if key in self._values:
            return self._values[key]
        if alias is not None and alias in self._values:
            return self._values[alias]
        return default

    def integer(self, key: str, default: int, *, minimum: int = 1, maximum: int = LARGEST) -> int:
        """An integer from `minimum` to `maximum`.

        Raises:
            ConfigError: it is none.
        """
        value = self.get(key, default)
        if not _is_integer(value, minimum, maximum):
            raise ConfigError(
                f"config.json: {self._section}{key} must be an integer from {minimum} to "
                f"{maximum}, got {value!r}"
            )
        return int(value)

    def number(self, key: str, default: float) -> float:
        """A positive number.

        Raises:
            ConfigError: it is none.
        """
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(
                f"config.json: {self._section}{key} must be a positive number, got {value!r}"
            )
        return float(value)

    def require(self, key: str, allowed: object) -> None:
        """Accept a key only if it is absent or has the value `allowed`.

        Raises:
            ConfigError: it has another.
        """
        value = self.get(key, allowed)
        if value != allowed:
            raise ConfigError(
                f"config.json: {self._section}{key} = {value!r} is not supported for "
                f"{self._family}, only {allowed!r}"
            )

    def token_ids(self, key: str, default: int | None) -> tuple[int, ...]:
        """Token ids, given as one, a list or null.

        Raises:
            ConfigError: it is none of these.
        """
        value = self.get(key, default)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(_is_integer(token, 0) for token in ids):
            raise ConfigError(
                f"config.json: {self._section}{key} must be a token id or a list of ids, "
                f"got {value!r}"
            )
        return tuple(ids)

    def dtype(self) -> str | None:
        """The dtype that the object names under its new or its old key.

        Raises:
            ConfigError: it is not one of ours.
        """
        value = self._values.get("dtype", self._values.get("torch_dtype"))
        if value is None:
            return None
        if value not in ("bfloat16", "float32"):
            raise ConfigError(
                f"config.json: {self._section}dtype {value!r} is not supported, only 'bfloat16' "
                f"and 'float32'"
            )
        return str(value)


def _is_integer(value: object, minimum: int, maximum: int = LARGEST) -> bool:
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return minimum <= value <= maximum
