"""The Jinja2 environment that published chat templates expect, sandboxed."""

import json

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def chat_environment() -> ImmutableSandboxedEnvironment:
    """An environment with loop controls, `tojson`, `raise_exception`, `namespace` and `dict`.

    `strftime_now` depends on the time and is given to each rendering.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["namespace"] = _PlainNamespace
    environment.globals["dict"] = _make_dict
    return environment


class _PlainNamespace(Namespace):
    """Jinja's namespace without names that Python itself gives a meaning to."""

    def __init__(self, **attributes: object) -> None:
        Namespace.__init__(self)
        for name, value in attributes.items():
            self[name] = value

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot have an attribute {name!r}")
        Namespace.__setitem__(self, name, value)


def _make_dict(**items: object) -> dict[str, object]:
    # The type itself would give templates its methods, which can change their arguments.
    return items


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which prompts must not.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
