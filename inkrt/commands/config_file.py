"""--config FILE.toml: a command's options from a file, below those typed and those of variables.

A key is an option's name, hyphens or underscores; an argument of the command has one too. Paths are
those from the file's folder. --show-config prints what holds, in the form of such a file.
"""

import inspect
import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import typer

from inkrt.errors import UsageError

_SOURCES = {
    "COMMANDLINE": "command line",
    "ENVIRONMENT": "environment",
    "DEFAULT_MAP": "--config",
    "DEFAULT": "default",
}


class ConfigFile:
    """The options --config and --show-config of one command.

    Args:
        parameters: of the command, annotated for typer; a key each.
        secrets: names of those that are never shown.
    """

    def __init__(self, parameters: Sequence[inspect.Parameter], secrets: Collection[str]) -> None:
        self._types = {p.name: get_args(p.annotation)[0] for p in parameters}
        self._secrets = secrets

    def parameters(self) -> list[inspect.Parameter]:
        """Those of the two options; `take` takes their values."""

        def load(context: typer.Context, value: Path | None) -> Path | None:
            if value is not None:
                try:
                    context.default_map = read_config(value, self._types)
                except UsageError as error:
                    # No error of ours is expected this early.
                    typer.echo(f"error: {error}", err=True)
                    raise typer.Exit(error.exit_code) from None
            return value

        options: dict[str, tuple[Any, Any]] = {
            "context": (typer.Context, inspect.Parameter.empty),
            "config": (
                Annotated[
                    Path | None,
                    typer.Option(
                        is_eager=True,
                        callback=load,
                        metavar="FILE",
                        help="A TOML file with options by their names; what is typed or in the "
                        "environment wins.",
                    ),
                ],
                None,
            ),
            "show_config": (
                Annotated[
                    bool,
                    typer.Option("--show-config", help="Print all options and where from; end."),
                ],
                False,
            ),
        }
        kind = inspect.Parameter.KEYWORD_ONLY
        return [
            inspect.Parameter(name, kind, annotation=annotation, default=default)
            for name, (annotation, default) in options.items()
        ]

    def take(self, values: dict[str, Any]) -> bool:
        """Remove the values of the two options; whether the command was only to show its options.

        Args:
            values: of all parameters of the command.
        """
        context: typer.Context = values.pop("context")
        values.pop("config")
        if not values.pop("show_config"):
            return False
        for name in self._types:
            source = context.get_parameter_source(name)
            shown = self._line(name, context.params[name])
            typer.echo(f"{shown}  # {_SOURCES[source.name] if source else 'unknown'}")
        return True

    def _line(self, name: str, value: object) -> str:
        key = name.replace("_", "-")
        if value is None or value in ([], ()):
            return f"# {key} is not set"
        if name in self._secrets:
            return f"# {key} is set and not shown"
        return f"{key} = {json.dumps(value, default=str, ensure_ascii=False)}"


def read_config(path: Path, types: Mapping[str, Any]) -> dict[str, Any]:
    """Options by their names with underscores.

    Args:
        path: of the file.
        types: of the options.

    Raises:
        UsageError: the file cannot be read; a key is not known or its value is of another type.
    """
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config: cannot read {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--config: {path} is not valid TOML: {error}") from None
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in types:
            (nearest,) = get_close_matches(name, types, n=1, cutoff=0.0)
            raise UsageError(
                f"--config: {path} has the key {key[:50]!r}, which is no option; the nearest is "
                f"{nearest.replace('_', '-')!r}"
            )
        if name in found:
            raise UsageError(f"--config: {path} has {key!r} in both spellings; leave one out")
        try:
            found[name] = _convert(value, types[name], path.parent)
        except msgspec.ValidationError as error:
            raise UsageError(f"--config: {path}: {key}: {error}") from None
    return found


def _convert(value: object, kind: Any, folder: Path) -> object:
    """The value, checked, as one of a command line would be."""
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (each for each in get_args(kind) if each is not type(None))
    if kind is Path:
        # Of its own folder, so that a file means the same wherever the command runs.
        return str(folder / msgspec.convert(value, str))
    return msgspec.convert(value, kind)
