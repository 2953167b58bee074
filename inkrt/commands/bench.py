"""ink-bench: time the steps of an engine on its GPU, each beside its floor."""

import json
import platform
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from inkrt.commands import console
from inkrt.errors import ConfigError, EngineMismatchError

# Read-only bandwidth of one H200, measured; see docs/kernels.md.
BANDWIDTH_TB_S = 4.55


def engine(
    folder: Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine folder for a GPU.")],
    *,
    contexts: Annotated[str, typer.Option(help="Context lengths, with commas.")] = "1024,8192",
    steps: Annotated[str, typer.Option(help="Steps; default: all of the engine.")] = "",
    runs: Annotated[int, typer.Option(help="Graph replays per figure.")] = 60,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures.")
    ] = None,
) -> None:
    """Median GPU time of every step at every context, beside the bytes it must move."""
    from inkrt.runtime.engine import Engine
    from inkrt.runtime.executor import Sampling, StepInput
    from inkrt.runtime.executor.cuda import CudaExecutor

    with Engine.open(folder) as opened:
        executor = opened.executor
        if not isinstance(executor, CudaExecutor):
            raise EngineMismatchError(f"engine {folder} is for {opened.config.target}, not a GPU")
        config = opened.config
        executor.memory.fill_state(0x3C)  # small finite keys and values; zeros can be special
        wanted = steps.split(",") if steps else [step.name for step in config.steps]
        rows: list[dict[str, Any]] = []
        console.say(
            f"{'step':<10} {'context':>8} {'median us':>10} {'min':>8} {'MB':>9} {'floor':>8}"
        )
        for step in config.steps:
            if step.name not in wanted:
                continue
            for context in _numbers(contexts):
                if context + step.num_tokens > config.max_seq_len:
                    continue
                page_count = -(-config.max_seq_len // config.state.page_tokens)
                step_input = StepInput(
                    [17 + 31 * i for i in range(step.num_tokens)],
                    context,
                    0,
                    list(range(page_count)),
                    Sampling(),
                )
                executor.time_step(step.name, step_input, 5)
                times = executor.time_step(step.name, step_input, runs)
                rows.append(
                    {
                        "step": step.name,
                        "context": context,
                        "median_us": statistics.median(times) * 1e3,
                        "min_us": min(times) * 1e3,
                        "weight_bytes": executor.step_bytes(step.name),
                    }
                )
                row = rows[-1]
                floor_us = row["weight_bytes"] / BANDWIDTH_TB_S / 1e6
                console.say(
                    f"{step.name:<10} {context:>8} {row['median_us']:>10.1f} {row['min_us']:>8.1f} "
                    f"{row['weight_bytes'] / 1e6:>9.1f} {floor_us:>8.1f}"
                )
        machine = {"device": executor.device_name, "python": platform.python_version()}
    if as_json is not None:
        as_json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def _numbers(text: str) -> list[int]:
    try:
        values = [int(item) for item in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise ConfigError(f"--contexts takes positive integers with commas, got {text!r}")
    return values


def make_app() -> typer.Typer:
    """The application."""
    app = console.make_app("ink-bench", "Time an engine.")
    console.add_command(app, engine, name="engine")
    app.callback()(lambda: None)  # keeps the subcommand's name while there is one
    return app


def main() -> None:
    """Entry point."""
    console.run(make_app())


if __name__ == "__main__":
    main()
