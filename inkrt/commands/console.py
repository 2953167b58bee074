"""What the commands share: how options look and how errors end a command.

Options are hyphenated and accept underscores too. Where a command has environment variables, they
are called INK_<COMMAND>_<OPTION>. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 the engine does
not fit this machine, 130 interrupted.

Heavy modules are imported inside the commands, so that `--help` is instant.
"""

import contextlib
import functools
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, TextIO, get_type_hints

import typer

from inkrt.errors import ConfigError, InkError, RequestError, UsageError

_DEBUG = inspect.Parameter(
    "debug",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")],
)


def make_app(name: str, help_text: str, *, variables: bool = False) -> typer.Typer:
    """An empty application.

    Args:
        name: of the command, e.g. "ink-run".
        help_text: first paragraph of `--help` if there are several subcommands.
        variables: whether options can come from the environment, for ink-run from INK_RUN_...
    """
    settings: dict[str, Any] = {
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),
    }
    if variables:
        settings["auto_envvar_prefix"] = name.replace("-", "_").upper()
    return typer.Typer(
        name=name,
        help=help_text,
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=settings,
    )


def add_command(
    app: typer.Typer,
    function: Callable[..., None],
    *,
    name: str | None = None,
    options: type[Any] | None = None,
    api_names: Mapping[str, str] | None = None,
    secrets: Collection[str] | None = None,
) -> None:
    """Add `function` to `app`, with `--debug` and with our errors as one line on stderr.

    Args:
        app: made by `make_app`.
        function: its annotated parameters become arguments and options.
        name: of the subcommand, if the application has several.
        options: a dataclass; every field becomes an option (with the help text that its metadata
            holds) and `function` receives an instance as its keyword argument `options`.
        api_names: parameters by what the Python API calls them, where that is something else.
        secrets: parameters that --show-config does not show; None for a command without --config.
    """
    signature = inspect.signature(function, eval_str=True)
    own = [p for p in signature.parameters.values() if options is None or p.name != "options"]
    derived = _option_parameters(options) if options is not None else []
    config = None
    if secrets is not None:
        from inkrt.commands.config_file import ConfigFile

        config = ConfigFile([*own, *derived], secrets)

    @functools.wraps(function)
    def command(*, debug: bool, **values: object) -> None:
        try:
            if config is not None and config.take(values):
                return
            if options is not None:
                chosen = {parameter.name: values.pop(parameter.name) for parameter in derived}
                values["options"] = options(**chosen)
            function(**values)
        except InkError as error:
            if debug:
                raise
            fail(_as_typed(error, spelling), error.exit_code)
        except ModuleNotFoundError as error:
            if debug or error.name not in ("matplotlib", "torch", "transformers"):
                raise
            fail(
                f"{error.name} is needed for this and not installed; "
                f"install it with: pip install {error.name}",
                1,
            )

    parameters = [*own, *derived, *(config.parameters() if config else ()), _DEBUG]
    names = {p.name: p.name for p in parameters} | dict(api_names or {})
    spelling = {api: f"--{name.replace('_', '-')}" for api, name in names.items()}
    # typer reads both: the signature for order and defaults, the annotations for types.
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    app.command(name)(command)


def run(app: typer.Typer, arguments: Sequence[str] | None = None) -> None:
    """Run the application and exit.

    Args:
        app: with all its commands.
        arguments: those of the process if None.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    app(args=arguments, prog_name=app.info.name)


def say(text: str, *, is_result: bool = True) -> None:
    """Print a line: results to stdout, everything about them to stderr."""
    typer.echo(text, err=not is_result)


def can_color(stream: TextIO) -> bool:
    """Whether text on a stream may be colored: a terminal, and the user does not mind.

    See https://no-color.org.
    """
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not is_plain


@contextlib.contextmanager
def byte_meter(what: str, *, is_shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal: share, GB/s and time left of what goes through many bytes.

    Args:
        what: is done.
        is_shown: whether to show it where there is a terminal.

    Yields:
        Takes the bytes that are done and all bytes. The bar appears with the first call; what is
        done then was done before.
    """
    if not (is_shown and sys.stderr.isatty()):
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as SpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), SpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None, visible=False)

    def advance(done: int, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
            bar.reset(task, total=total, completed=done, visible=True)
        bar.update(task, completed=done)
        if done == total:
            bar.stop()

    try:
        yield advance
    finally:
        bar.stop()


def fail(message: str, exit_code: int) -> None:
    """Print an error and end the command.

    Raises:
        typer.Exit: always.
    """
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(exit_code)


def require_uses(chosen: str = "", *, options: Sequence[tuple[str, bool, set[str]]]) -> None:
    """Refuse the first of some options that is given where it would do nothing.

    Args:
        chosen: what is measured; "" for steps.
        options: name, whether it is given, and the measurements that have a use for it.

    Raises:
        UsageError: there is one.
    """
    for name, is_given, uses in options:
        if is_given and chosen not in uses:
            if chosen:
                raise UsageError(f"{name}: of no use with {chosen}; leave it out")
            several = "have" if len(uses) > 1 else "has"
            raise UsageError(
                f"{name}: only {' and '.join(sorted(uses))} {several} a use for it; add that or "
                "leave it out"
            )


def require_writable(path: Path) -> None:
    """Check that a file can be written, before what takes long.

    Raises:
        ConfigError: it cannot.
    """
    place = path if path.exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(f"cannot write {path}; name a file in a folder that exists")


def format_bytes(count: int) -> str:
    """A size for people: exact below 10 KiB, then three digits, e.g. "1.46 GiB"."""
    if count < 10 * 1024:
        return f"{count:,} B"
    value, unit = count / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value < 999.5:
            break
        value, unit = value / 1024, larger
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def format_table(
    rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()
) -> list[str]:
    """Lines with aligned columns.

    Args:
        rows: equal in length; no cell has line breaks.
        right: columns aligned to the right.
    """
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _as_typed(error: InkError, spelling: Mapping[str, str]) -> str:
    """The message, with options where it names fields; see `RequestError`."""
    message = str(error)
    if isinstance(error, RequestError) and error.param in spelling:
        message = re.sub(rf"^{error.param}\b", spelling[error.param], message)
    # Not within paths and options.
    return re.sub(
        r"(?<![\w/.-])(\w+)=", lambda found: f"{spelling.get(found[1], found[1])}=", message
    )


def _option_parameters(options: type[Any]) -> list[inspect.Parameter]:
    """One keyword parameter per field of a dataclass, annotated for typer."""
    hints = get_type_hints(options)
    parameters = []
    for field in fields(options):
        assert field.default is not MISSING, f"{options.__name__}.{field.name} has no default"
        option = typer.Option(f"--{field.name.replace('_', '-')}", help=field.metadata["help"])
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[hints[field.name], option],
            )
        )
    return parameters
