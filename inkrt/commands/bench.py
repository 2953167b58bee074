"""ink-bench: time the steps of an engine on its GPU, each beside its floor."""

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inkrt.commands import console
from inkrt.errors import ConfigError, EngineMismatchError

if TYPE_CHECKING:
    from inkrt.runtime.engine_file import EngineConfig, StepSpec
    from inkrt.runtime.executor import StepInput
    from inkrt.runtime.executor.cuda import CudaExecutor

# Read-only bandwidth of one H200, measured.
BANDWIDTH_TB_S = 4.55
WARM_UP_RUNS = 5


def engine(
    folder: Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine folder for a GPU.")],
    *,
    contexts: Annotated[str, typer.Option(help="Context lengths, with commas.")] = "1024,8192",
    steps: Annotated[
        str, typer.Option(help="Steps, also by kind (prefill); default: all of the engine.")
    ] = "",
    runs: Annotated[int, typer.Option(help="Graph replays per figure.")] = 60,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also time each step without each kind of kernel.")
    ] = False,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures.")
    ] = None,
) -> None:
    """Median GPU time of every step at every context, beside the bytes it must move."""
    from inkrt.runtime.engine import Engine
    from inkrt.runtime.executor.cuda import CudaExecutor

    with Engine.open(folder) as opened:
        executor, config = opened.executor, opened.config
        if not isinstance(executor, CudaExecutor):
            raise EngineMismatchError(f"engine {folder} is for {config.target}, not a GPU")
        executor.memory.fill_state(0x3C)  # small finite keys and values; zeros can be special
        wanted = steps.split(",") if steps else [step.name for step in config.steps]
        columns = ("context", "median us", "min us", "MB", "floor us")
        console.say(f"{'step':<10}" + "".join(f"{name:>11}" for name in columns))
        rows = [
            _measure(executor, config, step, context, runs, profile=profile)
            for step in config.steps
            for context in _numbers(contexts)
            if {step.name, step.name.rstrip("0123456789")} & {*wanted}
            and context + step.num_tokens <= config.max_seq_len
        ]
        device = executor.device_name
    if as_json is not None:
        text = json.dumps({"device": device, "rows": rows}, indent=1) + "\n"
        as_json.write_text(text, encoding="utf-8")


def _measure(
    executor: "CudaExecutor",
    config: "EngineConfig",
    step: "StepSpec",
    context: int,
    runs: int,
    *,
    profile: bool,
) -> dict[str, Any]:
    """Time one step behind `context` tokens of one session, and print a line."""
    from inkrt.runtime.executor import Sampling, StepInput

    pages = list(range(-(-config.max_seq_len // config.state.page_tokens)))
    tokens = [(17 + 31 * row) % config.model.vocab_size for row in range(step.num_tokens)]
    step_input = StepInput(tokens, context, 0, pages, Sampling())
    executor.time_step(step.name, step_input, WARM_UP_RUNS)
    times = executor.time_step(step.name, step_input, runs)
    num_bytes = executor.step_bytes(step.name) + context * config.memory.paged_bytes_per_token
    row: dict[str, Any] = {
        "step": step.name,
        "context": context,
        "median_us": statistics.median(times) * 1e3,
        "min_us": min(times) * 1e3,
        "bytes": num_bytes,
        "floor_us": num_bytes / BANDWIDTH_TB_S / 1e6,
    }
    figures = (row["median_us"], row["min_us"], num_bytes / 1e6, row["floor_us"])
    console.say(f"{step.name:<10}{context:>11}" + "".join(f"{figure:>11.1f}" for figure in figures))
    if profile:
        row["without_us"] = _price(executor, step.name, step_input, runs, row["median_us"])
    return row


def _price(
    executor: "CudaExecutor", step: str, step_input: "StepInput", runs: int, whole_us: float
) -> dict[str, float]:
    """What a step loses in time without each kind of kernel, in us, largest first."""
    prices = {}
    for name in executor.kernel_names(step):
        times = executor.time_step(step, step_input, runs, without=name)
        prices[name] = whole_us - statistics.median(times) * 1e3
    prices = dict(sorted(prices.items(), key=lambda item: -item[1]))
    prices["rest"] = whole_us - sum(prices.values())
    for name, price in prices.items():
        console.say(f"  {name:<40}{price:>11.1f} us")
    return prices


def _numbers(text: str) -> list[int]:
    try:
        values = [int(item) for item in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 0:
        raise ConfigError(f"--contexts takes numbers from 0 with commas, got {text!r}")
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
