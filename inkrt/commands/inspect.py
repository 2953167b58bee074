"""ink-inspect: look into an engine folder, check it, compare two. Needs neither torch nor a GPU."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from inkrt.commands import console

SUBCOMMANDS = ("show", "verify", "diff")
Folder = Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine folder.")]


def show(
    engine: Folder,
    *,
    launches: Annotated[bool, typer.Option("--launches", help="List every launch.")] = False,
    step: Annotated[
        str, typer.Option(metavar="STEP", help="With --launches: only this step, e.g. decode.")
    ] = "",
    memory: Annotated[bool, typer.Option("--memory", help="Break the memory down.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe an engine. The word `show` can be left out: ink-inspect ENGINE."""
    from inkrt.commands import engine_text
    from inkrt.errors import ConfigError
    from inkrt.runtime import engine_file

    config = engine_file.read_config(engine)
    plans = engine_file.read_plans(engine, 0)
    if step:
        if step not in plans:
            raise ConfigError(f"{engine} has no step {step!r}; it has {', '.join(plans)}")
        launches = True
    shown = [plans[step]] if step else list(plans.values())
    if as_json:
        console.say(engine_text.to_json(config, plans, shown if launches else []))
        return
    lines = engine_text.summary(config, plans)
    if memory:
        lines += ["", *engine_text.memory(config.memory, config.state, plans)]
    if launches:
        for plan in shown:
            lines += ["", *engine_text.launches(plan)]
    console.say("\n".join(lines))


def verify(engine: Folder) -> None:
    """Check that an engine is whole: format, files, hashes, plans. Exit code 1 if it is not."""
    from inkrt.errors import EngineFormatError
    from inkrt.runtime.engine import Engine
    from inkrt.runtime.engine_file import read_config

    config = read_config(engine)
    problems = Engine.check(engine, verify=True)
    for problem in problems:
        console.say(problem)
    if problems:
        raise EngineFormatError(
            f"engine {engine} is damaged ({len(problems)} problem{'s'[: len(problems) > 1]}); "
            f"copy it again or rebuild it with: {config.rebuild_command}"
        )
    size = sum(entry.size for entry in config.files.values())
    console.say(f"{engine} is whole: {len(config.files)} files, {console.format_bytes(size)}")


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="Engine folder.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Engine folder.")],
) -> None:
    """Compare two engines. Exit code 1 if they differ."""
    from inkrt.commands import engine_text
    from inkrt.runtime import engine_file

    configs = [engine_file.read_config(folder) for folder in (first, second)]
    plans = [engine_file.read_plans(folder, 0) for folder in (first, second)]
    lines = engine_text.difference(configs[0], plans[0], configs[1], plans[1])
    if lines:
        console.say("\n".join(lines))
        raise typer.Exit(1)
    console.say("the engines are the same")


def with_default_subcommand(arguments: list[str]) -> list[str]:
    """`ink-inspect ENGINE ...` means `ink-inspect show ENGINE ...`."""
    if not arguments or arguments[0] in (*SUBCOMMANDS, "-h", "--help"):
        return arguments
    return ["show", *arguments]


def make_app() -> typer.Typer:
    """The application."""
    app = console.make_app("ink-inspect", "Look into engine folders.")
    console.add_command(app, show, name="show")
    console.add_command(app, verify, name="verify")
    console.add_command(app, diff, name="diff")
    return app


def main() -> None:
    """Entry point."""
    console.run(make_app(), with_default_subcommand(sys.argv[1:]))


if __name__ == "__main__":
    main()
