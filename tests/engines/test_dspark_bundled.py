"""Where the settings of a drafter stand that comes with its target."""

import dataclasses
from typing import Any

import pytest
from drafter_layouts import EXPECTED, read

from inkrt.engines.dspark.flavours import BUNDLED_KEYS
from inkrt.engines.dspark.layouts import bundled_places
from inkrt.errors import ConfigError


@pytest.mark.parametrize("key", [*BUNDLED_KEYS, "dspark_config"])
def test_any_of_the_keys_marks_a_bundled_drafter(key: str) -> None:
    assert bundled_places({key: 1})
    assert bundled_places({"text_config": {key: 1}})
    assert not bundled_places({key: None, "text_config": {"dspark_rope_theta": 1}})


BUNDLED_PLACES = ("text_config.dspark_config.", "dspark_config.", "text_config.dspark_", "dspark_")


@pytest.mark.parametrize("last", range(len(BUNDLED_PLACES)))
def test_a_bundled_drafter_is_read_wherever_it_is_found(last: int) -> None:
    """Each place alone holds a whole drafter; with others, the later of this list wins."""

    def move(config: dict[str, Any], prefix: str, settings: dict[str, Any]) -> None:
        *path, start = prefix.split(".")
        for name in path:
            config = config.setdefault(name, {})
        config.update({start + key: value for key, value in settings.items()})

    def edit(config: dict[str, Any], first: int) -> None:
        keys = [key for key in config if key.startswith("dspark_")]
        settings = {key.removeprefix("dspark_"): config.pop(key) for key in keys}
        for number, prefix in enumerate(BUNDLED_PLACES[first : last + 1], first):
            move(config, prefix, {**settings, "block_size": 4 + number})
        assert bundled_places(config)

    expected = dataclasses.replace(EXPECTED, block_size=4 + last)
    alone = read("embedded", lambda config: edit(config, last))
    among_others = read("embedded", lambda config: edit(config, 0))
    assert alone.config == among_others.config == expected
    assert not [line for line in alone.decisions if "is unknown" in line or "overrides" in line]
    overridden = [line for line in among_others.decisions if " overrides " in line]
    assert len(overridden) == last


@pytest.mark.parametrize("outer", ["", "text_config."])
def test_settings_that_are_no_object_are_refused(outer: str) -> None:
    def edit(config: dict[str, Any]) -> None:
        (config.setdefault("text_config", {}) if outer else config)["dspark_config"] = [1]

    with pytest.raises(ConfigError, match=rf"{outer}dspark_config must be an object, got \[1\]"):
        read("embedded", edit)
