"""Reading a drafter's settings from the places of a config.json where layouts put them.

A layout is a list of places by precedence. What is absent takes a default with the reason for it,
which is written down, or is an error that names the key. Which keys there are, and what they mean,
is the business of `layouts`.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inkrt.engines.reader import LARGEST
from inkrt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """An object of a config.json in which settings stand.

    Attributes:
        values: the object.
        path: of the object, in front of its keys in messages, e.g. "dflash_config.".
        prefix: of the keys that are settings, e.g. "dspark_".
    """

    values: Mapping[str, Any]
    path: str = ""
    prefix: str = ""

    def spell(self, key: str) -> str:
        """A setting as it is called here."""
        return f"{self.path}{self.prefix}{key}"


@dataclass(frozen=True, slots=True)
class Default:
    """What stands for an absent setting.

    Attributes:
        value: of the type that is read.
        reason: why it is this; None if it decides nothing that a reader would want to know.
    """

    value: Any
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A setting's value and how it is spelled where it stands."""

    value: Any
    spelling: str


class Settings:
    """Settings of one drafter, by precedence of places. A null counts as absent.

    Args:
        where: the file, for messages.
        places: the first that has a key wins.
        usual: the one of them in which absent settings are asked for.

    Attributes:
        where: see above.
        decisions: what was decided without the configuration saying so, one line each.
    """

    def __init__(self, where: str, places: Sequence[Place], usual: Place) -> None:
        self.where = where
        self.decisions: list[str] = []
        self._places = tuple(places)
        self._usual = usual
        self._asked: set[str] = set()

    def find(self, *keys: str) -> Found | None:
        """The setting with one of these names, the earlier names first within a place."""
        self._asked |= set(keys)
        found: Found | None = None
        for place in self._places:
            for key in keys:
                value = place.values.get(place.prefix + key)
                if value is None:
                    continue
                if found is None:
                    found = Found(value, place.spell(key))
                elif value != found.value:
                    line = f"{found.spelling} = {json.dumps(found.value)} overrides "
                    line += f"{place.spell(key)} = {json.dumps(value)}"
                    if line not in self.decisions:
                        self.decisions.append(line)
        return found

    def skip(self, *keys: str) -> None:
        """Keys that are known and of no use."""
        self._asked |= set(keys)

    def spell(self, key: str) -> str:
        """A setting that is nowhere, as it would be called in the usual place."""
        return self._usual.spell(key)

    def error(self, message: str) -> ConfigError:
        """An error with the file in front."""
        return ConfigError(f"{self.where}: {message}")

    def missing(self, key: str, needed: str) -> ConfigError:
        """The error for a setting that is absent and has no default."""
        return self.error(f"{self.spell(key)} is missing and has no default; {needed}")

    def decide(self, key: str, default: Default) -> Any:
        """A default's value; writes down that it was taken."""
        if default.reason is not None:
            value = json.dumps(default.value)
            self.decisions.append(f"{self.spell(key)} is absent: {value}, {default.reason}")
        return default.value

    def integer(
        self, *keys: str, needed: str = "", default: Default | None = None, minimum: int = 1
    ) -> int:
        """An integer from `minimum` to LARGEST.

        Args:
            *keys: names of the setting.
            needed: what it is, for the error if it is absent.
            default: for an absent one, if there is any.
            minimum: smallest allowed.

        Raises:
            ConfigError: it is none, or absent without a default.
        """
        found = self.find(*keys)
        if found is None:
            if default is None:
                raise self.missing(keys[0], needed)
            return int(self.decide(keys[0], default))
        if not _is_integer(found.value, minimum):
            raise self.error(
                f"{found.spelling} must be an integer from {minimum} to {LARGEST}, "
                f"got {found.value!r}"
            )
        return int(found.value)

    def number(self, *keys: str, needed: str = "", default: Default | None = None) -> float:
        """A positive number; see `integer`.

        Raises:
            ConfigError: it is none, or absent without a default.
        """
        found = self.find(*keys)
        if found is None:
            if default is None:
                raise self.missing(keys[0], needed)
            return float(self.decide(keys[0], default))
        value = found.value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            raise self.error(f"{found.spelling} must be a positive number, got {value!r}")
        return float(value)

    def boolean(self, *keys: str, default: Default) -> bool:
        """True or false; see `integer`.

        Raises:
            ConfigError: it is neither.
        """
        found = self.find(*keys)
        return bool(self.decide(keys[0], default)) if found is None else self.as_boolean(found)

    def as_boolean(self, found: Found) -> bool:
        """A found setting that must be true or false.

        Raises:
            ConfigError: it is neither.
        """
        if not isinstance(found.value, bool):
            raise self.error(f"{found.spelling} must be true or false, got {found.value!r}")
        return found.value

    def choice(self, *keys: str, allowed: Sequence[str], default: Default) -> str:
        """One of some words; see `integer`.

        Raises:
            ConfigError: it is none of them.
        """
        found = self.find(*keys)
        if found is None:
            return str(self.decide(keys[0], default))
        if found.value not in allowed:
            raise self.error(
                f"{found.spelling} = {found.value!r} is not supported, only "
                f"{', '.join(map(repr, allowed))}"
            )
        return str(found.value)

    def integers(self, *keys: str) -> tuple[tuple[int, ...], str] | None:
        """A list of integers and its spelling, or None if it is absent.

        Raises:
            ConfigError: it is something else or empty.
        """
        found = self.find(*keys)
        if found is None:
            return None
        value = found.value
        if not isinstance(value, list) or not value or not all(_is_integer(x, -1) for x in value):
            raise self.error(f"{found.spelling} must be a list of layers, got {value!r}")
        return tuple(value), found.spelling

    def require(self, key: str, *allowed: object) -> None:
        """Accept a setting only if it is absent or has one of some values.

        Raises:
            ConfigError: it has another.
        """
        found = self.find(key)
        if found is not None and found.value not in allowed:
            only = f", only {' or '.join(map(repr, allowed))}" if allowed else "; its absence is"
            raise self.error(
                f"{found.spelling} = {found.value!r} is not supported for DSpark drafters{only}"
            )

    def unasked(self, path: str, prefix: str = "") -> list[str]:
        """Keys of one place that nothing has asked for, as they are called there."""
        return sorted(
            place.path + key
            for place in self._places
            if (place.path, place.prefix) == (path, prefix)
            for key in place.values
            if key.startswith(prefix) and key.removeprefix(prefix) not in self._asked
        )


def _is_integer(value: object, minimum: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return minimum <= value <= LARGEST
